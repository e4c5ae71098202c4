"""A device takes a vocabulary, keeps it, and goes on where a link broke."""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from pilotfish import EdgeServer
from pilotfish.base.errors import (
    InterruptedGenerationError,
    PairMismatchError,
)
from pilotfish.device_runtime.draft_source import DraftSource
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.retry import FAIL, CancelToken
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire import messages as m
from tests.conftest import Pair
from tests.device_runtime.vocabulary_wire.arriving import (
    PARTS,
    arrive,
    greeted,
)
from tests.support.relay import Relay


def test_a_vocabulary_arrives_and_is_kept(
    pair: Pair,
    other_edge: EdgeServer,
    wanted: Vocabulary,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    size = len(wanted.encode())
    received: list[tuple[int, int]] = []
    caplog.set_level(logging.INFO, "pilotfish.device")
    with greeted(pair, other_edge.endpoint) as link:
        assert arrive(link, progress=lambda *at: received.append(at)) == wanted
        assert received == [(min(n * m.PART_BYTES, size), size) for n in range(1, PARTS + 1)]
        assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
        assert [file.name for file in cache.iterdir()] == [f"{wanted.digest}.bin"]
        received.clear()
        assert arrive(link, progress=lambda *at: received.append(at)) == wanted
        assert received == []


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a byte": lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:]),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "no file": lambda path: (path.unlink(), path.mkdir()),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_cache_is_fetched_anew(
    pair: Pair, other_edge: EdgeServer, wanted: Vocabulary, cache: Path, damage: Callable
) -> None:
    with greeted(pair, other_edge.endpoint) as link:
        arrive(link)
        damage(cache / f"{wanted.digest}.bin")
        for fetched in (PARTS, PARTS if damage is DAMAGES["no file"] else 0):
            received: list[tuple[int, int]] = []
            assert arrive(link, progress=lambda *at, to=received: to.append(at)) == wanted
            assert len(received) == fetched


def test_without_a_cache_it_goes_on_all_the_same(
    pair: Pair, other_edge: EdgeServer, wanted: Vocabulary, cache: Path
) -> None:
    cache.parent.write_bytes(b"a file where the folder would be")
    with greeted(pair, other_edge.endpoint) as link:
        assert arrive(link) == wanted
        assert arrive(link) == wanted


def test_the_cache_does_not_grow_for_ever(
    pair: Pair, other_edge: EdgeServer, wanted: Vocabulary, cache: Path
) -> None:
    cache.mkdir(parents=True)
    for number in range(30):
        (cache / f"{number:064x}.bin").write_bytes(b"old")
    with greeted(pair, other_edge.endpoint) as link:
        arrive(link)
    items = list(cache.iterdir())
    assert len(items) == 16
    assert cache / f"{wanted.digest}.bin" in items


def test_a_link_that_breaks_in_the_middle_goes_on(
    pair: Pair, other_edge: EdgeServer, wanted: Vocabulary, cache: Path
) -> None:
    relay = Relay(other_edge.endpoint)
    received: list[int] = []

    def progress(done: int, _: int) -> None:
        received.append(done)
        if len(received) in (2, 3):
            relay.cut()

    with greeted(pair, relay.endpoint) as link:
        assert arrive(link, progress=progress) == wanted
    relay.close()
    assert len(received) == PARTS
    assert received == sorted(set(received))
    assert relay.connections == 3


def test_another_edge_in_the_middle_is_noticed(
    pair: Pair, edge: EdgeServer, other_edge: EdgeServer, cache: Path
) -> None:
    relay = Relay(other_edge.endpoint)

    def progress(done: int, _: int) -> None:
        if done == 2 * m.PART_BYTES:
            relay.turn_to(edge.endpoint)
            relay.cut()

    with greeted(pair, relay.endpoint) as link, pytest.raises(PairMismatchError):
        arrive(link, progress=progress)
    relay.close()
    assert not cache.exists()


def test_on_a_slow_link_no_part_holds_up_the_heartbeats(
    pair: Pair, other_edge: EdgeServer, wanted: Vocabulary, cache: Path
) -> None:
    slow = Conditions(rtt_s=0.05, down_bps=1e6, up_bps=1e6)
    with Emulator(other_edge.endpoint, slow) as emulator, greeted(pair, emulator.endpoint) as link:
        assert arrive(link) == wanted
        traffic = emulator.traffic()
    assert traffic.connections == 1
    assert traffic.down_bytes < 1.02 * len(zlib.compress(wanted.encode())) + 4096


def test_a_wait_for_a_part_can_be_interrupted(pair: Pair, liar, cache: Path) -> None:
    edge = liar(lambda request: [])
    interrupt = CancelToken()
    link = EdgeLink(edge.endpoint, None, FAIL, interrupt)
    try:
        link.set_hello(DraftSource.open(pair.draft, text=False, text_location=None).hello)
        link.handshake()
        threading.Timer(0.2, interrupt.cancel).start()
        with pytest.raises(InterruptedGenerationError):
            arrive(link)
    finally:
        link.close()
