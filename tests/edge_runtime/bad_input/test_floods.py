"""Floods faster than the edge: what waits is bounded, whoever comes again; others go on.

The law: the process grows by less than `TIMES` messages of full size, and gives that back.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.wire.keys import DeviceKeys
from tests.conftest import Pair
from tests.support.daemons import free_port, scrape
from tests.support.hostile import PROMPT, RawClient, await_idle, peak_mib, resident_mib

FLOOD_S = 3.0
MESSAGE_MIB, TIMES = 16, 8
OPTIONS = {"protocol": "ahead", "max_tokens": 60, "temperature": 1.0, "seed": 3}
CUT = 'connections_cut_total{reason="'


@contextmanager
def flooded(kind: str, endpoint: str, *keys: Path) -> Iterator[float]:
    """Flood from another process until the end of the context; when that shall be."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.flood", kind, endpoint, *map(str, keys)],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        yield time.monotonic() + FLOOD_S
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def assert_returned(edge: EdgeServer, before: float) -> None:
    assert peak_mib(edge.pid) - before < TIMES * MESSAGE_MIB
    await_idle(edge.pid)
    time.sleep(1.0)  # freed memory is returned by then
    assert resident_mib(edge.pid) - before < MESSAGE_MIB


@pytest.mark.parametrize("flood", ["zeromq", "until-cut", "hanging-up"])
def test_at_an_edge_without_keys(pair: Pair, flood: str) -> None:
    with (
        EdgeServer(pair.target, threads=1, rate=2000, message_mib=MESSAGE_MIB) as edge,
        Device(pair.draft, edge.endpoint, threads=1) as device,
    ):
        wanted = device.generate(PROMPT, **OPTIONS | {"protocol": "stream"}).tokens
        before, _ = resident_mib(edge.pid), peak_mib(edge.pid)
        with flooded(flood, edge.endpoint) as end_s:
            while time.monotonic() < end_s:
                assert device.generate(PROMPT, **OPTIONS).tokens == wanted
        assert_returned(edge, before)
        with Device(pair.draft, edge.endpoint, threads=1) as newcomer:
            assert newcomer.generate(PROMPT, **OPTIONS).tokens == wanted


def test_an_allowed_key_at_an_edge_with_keys(pair: Pair, key_folders: dict[str, Path]) -> None:
    """Another key's texts stay, and its connection too."""
    port = free_port()
    with ExitStack() as stack:
        edge = stack.enter_context(
            EdgeServer(
                pair.target, keys=key_folders["edge"], threads=1, rate=2000,
                message_mib=MESSAGE_MIB, metrics=port,
            )
        )  # fmt: skip
        device = stack.enter_context(
            Device(pair.draft, edge.endpoint, key_folders["alice"], threads=1)
        )
        wanted = device.generate(PROMPT, **OPTIONS | {"protocol": "stream"}).tokens
        before, _ = resident_mib(edge.pid), peak_mib(edge.pid)
        with flooded("zeromq", edge.endpoint, key_folders["bob"]) as end_s:
            while time.monotonic() < end_s:
                assert device.generate(PROMPT, **OPTIONS).tokens == wanted
                assert device.last is not None
                assert not device.last.recoveries
        cut = {name for name, count in scrape(port).items() if name.startswith(CUT) and count}
        assert cut <= {CUT + 'unfinished-message"}', CUT + 'too-much-of-one-key"}'}
        assert_returned(edge, before)
        with RawClient(edge.endpoint, DeviceKeys.load(key_folders["bob"])) as back:
            back.settle()  # it is let in again
