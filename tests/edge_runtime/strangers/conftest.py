"""An edge with keys, and beside every stranger an honest device in the middle of a generation.

It must finish with exactly the tokens that it would have got (`neighbour`, always there), and the
edge must not have grown (`edge_pid`'s memory, likewise).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.wire.keys import DeviceKeys
from tests.conftest import Pair
from tests.support.daemons import free_port, scrape
from tests.support.hostile import PROMPT, resident_mib

GENERATION = {
    "protocol": "dsd", "temperature": 1.0, "seed": 0, "window": 3, "max_tokens": 40,
}  # fmt: skip
GROWTH_MIB = 48


class Fort(NamedTuple):
    """An edge that lets Alice and Bob in, and where its figures are."""

    endpoint: str
    pid: int
    metrics: int

    def counted(self, name: str) -> float:
        return scrape(self.metrics).get(name, 0.0)


@pytest.fixture(scope="package")
def fort(pair: Pair, key_folders: dict[str, Path]) -> Iterator[Fort]:
    port = free_port()
    with EdgeServer(
        pair.target, keys=key_folders["edge"], threads=1, sessions=8, sessions_per_client=4,
        connections=64, message_mib=4, metrics=port, metrics_devices=True,
    ) as server:  # fmt: skip
        yield Fort(server.endpoint, server.pid, port)


@pytest.fixture(scope="package")
def alice(fort: Fort, pair: Pair, key_folders: dict[str, Path]) -> Iterator[Device]:
    with Device(pair.draft, fort.endpoint, key_folders["alice"], threads=1) as device:
        yield device


@pytest.fixture(scope="package")
def undisturbed(alice: Device) -> list[int]:
    return alice.generate(PROMPT, **GENERATION).tokens


@pytest.fixture(autouse=True)
def neighbour(alice: Device, undisturbed: list[int], fort: Fort) -> Iterator[None]:
    before = resident_mib(fort.pid)
    pieces = alice.stream(PROMPT, **GENERATION)
    got = [*next(pieces).tokens, *next(pieces).tokens]
    yield
    got += [token for piece in pieces for token in piece.tokens]
    assert got == undisturbed
    assert resident_mib(fort.pid) - before < GROWTH_MIB


@pytest.fixture
def bob(key_folders: dict[str, Path]) -> DeviceKeys:
    return DeviceKeys.load(key_folders["bob"])
