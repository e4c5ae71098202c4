"""The background receiver answers while the target computes, and only then."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotfish import EdgeServer
from pilotfish.edge_runtime.receiver import BackgroundReceiver
from pilotfish.wire import messages as m
from tests.support.hostile import RawClient, RawSession
from tests.support.tiny import tiny_artifact

SOON_S = 5.0


class Door:
    """A pipe with a receiver that reads at most ``burst`` bytes at a time."""

    def __init__(self, burst: int = 1_000_000) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._burst = burst
        self.taken = b""
        self.calls = 0
        self.by: set[int] = set()
        self.keeper = BackgroundReceiver({self._reader: self.answer})
        self.keeper.start()

    def answer(self) -> bool:
        self.calls += 1
        self.by.add(threading.get_ident())
        try:
            new = os.read(self._reader, self._burst)
        except BlockingIOError:
            return False
        self.taken += new
        return len(new) == self._burst

    def knock(self, data: bytes = b"x") -> None:
        os.write(self._writer, data)

    def wait_for(self, data: bytes) -> None:
        deadline = time.monotonic() + SOON_S
        while self.taken != data and time.monotonic() < deadline:
            time.sleep(0.001)
        assert self.taken == data


def test_it_answers_between_begin_and_end() -> None:
    door = Door()
    door.keeper.begin()
    door.knock(b"a")
    door.wait_for(b"a")
    door.knock(b"b")
    door.wait_for(b"ab")
    door.keeper.end()


def test_outside_of_a_pass_it_touches_nothing() -> None:
    door = Door()
    door.knock(b"a")
    time.sleep(0.05)
    assert door.calls == 0
    door.keeper.begin()
    door.wait_for(b"a")
    door.keeper.end()
    calls = door.calls
    door.knock(b"b")
    time.sleep(0.05)
    assert (door.calls, door.taken) == (calls, b"a")


def test_nothing_happens_while_the_turn_is_taken() -> None:
    door = Door()
    door.keeper.begin()
    with door.keeper.turn:
        door.knock(b"a")
        time.sleep(0.05)
        assert door.taken == b""
    door.wait_for(b"a")
    door.keeper.end()


def test_what_one_turn_leaves_the_next_one_takes() -> None:
    """Told once about several messages, it goes on until none is left."""
    door = Door(burst=2)
    door.keeper.begin()
    door.knock(b"abcdefg")
    door.wait_for(b"abcdefg")
    door.keeper.end()
    assert door.calls >= 4


def test_it_survives_passes_without_number_and_sleeps_after_them() -> None:
    door = Door()
    for _ in range(3000):
        door.keeper.begin()
        door.keeper.end()
    door.keeper.begin()
    door.knock(b"a")
    door.wait_for(b"a")
    door.keeper.end()
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.1  # it does not spin
    assert len(door.by) == 1


@pytest.fixture(scope="module")
def slow_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chunk of a prompt keeps it busy for tens of milliseconds."""
    path = tmp_path_factory.mktemp("slow") / "target"
    tiny_artifact(path, vocab=64, hidden=512, intermediate=4096, layers=4, context=1024)
    return path


@pytest.fixture(scope="module")
def slow_edge(slow_target: Path) -> Iterator[EdgeServer]:
    with EdgeServer(slow_target, threads=1) as server:
        yield server


def test_pings_are_answered_while_the_target_is_busy(slow_edge: EdgeServer) -> None:
    with RawClient(slow_edge.endpoint) as busy, RawClient(slow_edge.endpoint) as other:
        session = RawSession()
        began = time.monotonic()
        busy.send(*session.begin([i % 60 for i in range(1000)]))
        busy.send(*session.window([1, 2]))
        waits = []
        while not busy.socket.poll(0):
            wanted = time.monotonic()
            other.say(m.Ping(nonce=1))
            assert isinstance(other.receive(), m.Pong)
            waits.append(time.monotonic() - wanted)
            time.sleep(0.002)
        reading_s = time.monotonic() - began
        assert isinstance(busy.receive(), m.Verdict)
    chunk_s = reading_s / 8
    assert len(waits) > 8, "the target was not busy for long enough to tell"
    assert sorted(waits)[len(waits) // 2] < chunk_s / 4


def test_windows_of_others_are_taken_in_while_the_target_is_busy(slow_edge: EdgeServer) -> None:
    """Many devices at once, with prompts of any length: all get the text that they get alone."""
    prompts = [[(i * j) % 60 for i in range(1, 40 * j)] for j in range(1, 6)]
    alone = []
    for prompt in prompts:
        with RawClient(slow_edge.endpoint) as client:
            session = RawSession()
            client.send(*session.begin(prompt))
            alone.append(session.go_on(client, 5, [3, 4]))
    clients = [RawClient(slow_edge.endpoint) for _ in prompts]
    sessions = [RawSession() for _ in prompts]
    for client, session, prompt in zip(clients, sessions, prompts, strict=True):
        client.send(*session.begin(prompt))
        client.send(*session.window([3, 4]))
    for _ in range(4):
        for client, session in zip(clients, sessions, strict=True):
            session.settle([3, 4], client.receive())
            client.send(*session.window([3, 4]))
    for client, session in zip(clients, sessions, strict=True):
        session.settle([3, 4], client.receive())
        client.close()
    assert [session.committed.ids.tolist() for session in sessions] == alone
