"""A pair over paths that are slow, lose what is large, or go dead, under the kernel's own TCP."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.wire.errors import EdgeLostError
from tests.conftest import Pair
from tests.support.kernel_path import KernelPath, needs_paths

pytestmark = needs_paths()

# 8 kB on the wire: 2 s at 32 kbit/s
LONG = [1 + at % 50 for at in range(4_000)]
BRIEF = {"max_tokens": 4, "protocol": "greedy"}


@pytest.fixture(scope="module")
def path() -> Iterator[KernelPath]:
    with KernelPath() as made:
        yield made


@pytest.fixture(scope="module")
def far_edge(
    path: KernelPath, long_pair: Pair, key_folders: dict[str, Path]
) -> Iterator[EdgeServer]:
    listen = f"tcp://{path.address}:0"
    options = {"threads": 1, "context": 8192}
    edge = EdgeServer(long_pair.target, listen, keys=key_folders["edge"], **options)
    with path.at_edge():
        edge.start()
    yield edge
    edge.stop()


@pytest.fixture
def ideal(path: KernelPath, far_edge: EdgeServer) -> Iterator[KernelPath]:
    """The path, which the test may change."""
    path.restore()
    yield path
    os.kill(far_edge.pid, signal.SIGCONT)
    path.restore()
    path.set(up_bps=None, down_bps=None, rtt_s=0.0, mtu_up=1500, mtu_down=1500)


@contextmanager
def device_on(
    path: KernelPath, edge: EdgeServer, pair: Pair, keys: Path, policy: str = "fail"
) -> Iterator[Device]:
    with path.at_device():
        device = Device(pair.draft, edge.endpoint, keys, threads=1, on_link_loss=policy)
    with device:
        yield device


def sent_up(path: KernelPath, since: int) -> int:
    """Payload of all connections from the ``since``th on."""
    return sum(each.up.sent_bytes for each in path.connections()[since:])


def test_a_message_of_seconds_crosses_a_slow_link_once(
    ideal: KernelPath, far_edge: EdgeServer, long_pair: Pair, key_folders: dict[str, Path]
) -> None:
    needed, tokens = [], []
    for rate in (None, 32e3):
        ideal.set(up_bps=rate, rtt_s=0.1)
        before = len(ideal.connections())
        with device_on(ideal, far_edge, long_pair, key_folders["alice"]) as device:
            tokens.append(device.generate(LONG, **BRIEF).tokens)
        needed.append(sent_up(ideal, before))
        assert len(ideal.connections()) - before == 1
    assert tokens[0] == tokens[1]
    # pings meanwhile, and a segment or two that TCP itself sent again too early
    assert needed[1] <= 1.5 * needed[0]


@pytest.mark.timing
@pytest.mark.parametrize("how", ["cut", "frozen"])
def test_a_dead_path_or_edge_shows_in_time(
    ideal: KernelPath, far_edge: EdgeServer, long_pair: Pair, key_folders: dict[str, Path], how: str
) -> None:
    with device_on(ideal, far_edge, long_pair, key_folders["alice"]) as device:
        pieces = device.stream([1, 3, 2], max_tokens=3000, protocol="greedy")
        next(pieces)
        if how == "cut":
            ideal.cut()
        else:
            os.kill(far_edge.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(EdgeLostError):
            list(pieces)
        assert time.monotonic() - began < 1.2 + 2.2 + 0.3


def test_a_path_that_loses_large_segments_ends_an_answer(
    ideal: KernelPath, far_edge: EdgeServer, long_pair: Pair, key_folders: dict[str, Path]
) -> None:
    with device_on(ideal, far_edge, long_pair, key_folders["alice"]) as device:
        device.generate([1, 3, 2], **BRIEF)
        ideal.set(mtu_up=600)
        began = time.monotonic()
        with pytest.raises(EdgeLostError):
            device.generate(LONG, **BRIEF)
        assert time.monotonic() - began < 8
