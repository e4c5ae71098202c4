"""Several conversations on one drafter's weights: each as if it were alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pilotfish import Device, EdgeServer, Generation, Round
from pilotfish.base.errors import UnsupportedError
from pilotfish.drafting.model import FairLock
from tests.conftest import Pair
from tests.support.registered import LOSSLESS, temperature_of

PROMPT = [1, 3, 2, 7]
PROTOCOLS = (*LOSSLESS, "stream", "local")


@pytest.fixture(scope="module")
def server(long_pair: Pair) -> Iterator[EdgeServer]:
    with EdgeServer(long_pair.target, threads=1) as opened:
        yield opened


def wish(protocol: str) -> dict[str, Any]:
    temperature = temperature_of(protocol)
    return {"protocol": protocol, "temperature": temperature, "seed": 8, "max_tokens": 80}


def test_lanes_say_what_each_would_say_alone(long_pair: Pair, server: EdgeServer) -> None:
    rounds: list[Round] = []
    prompts = [[*PROMPT, lane] for lane in range(4)]
    with Device(
        long_pair.draft, server.endpoint, threads=1, lanes=4, on_round=rounds.append
    ) as device:
        alone = [
            [device.generate(prompt, **wish(name)).tokens for name in PROTOCOLS]
            for prompt in prompts
        ]
        rounds.clear()
        lanes = [device, *(device.beside() for _ in range(3))]
        together: list[list[list[int]]] = [[] for _ in lanes]

        def talk(at: int) -> None:
            for name in PROTOCOLS:
                together[at].append(lanes[at].generate(prompts[at], **wish(name)).tokens)

        threads = [threading.Thread(target=talk, args=(at,)) for at in range(len(lanes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert together == alone
        assert sum(len(item.tokens) for item in rounds) == sum(len(t) for a in alone for t in a)
        assert [lane.shared(device.prompt([*prompts[1], 5])) for lane in lanes[:2]] == [4, 5]
        for lane in lanes[1:]:
            lane.close()


def test_lanes_are_counted_and_given_back(long_pair: Pair, server: EdgeServer) -> None:
    with Device(long_pair.draft, server.endpoint, threads=1, lanes=2) as device:
        wanted = device.generate(PROMPT, **wish("dsd")).tokens
        for _ in range(3):
            with device.beside() as other:
                with pytest.raises(UnsupportedError, match="All 2 lanes"):
                    device.beside()
                assert other.generate(PROMPT, **wish("dsd")).tokens == wanted
                assert other.last is not device.last
            other.close()  # twice is once
        assert device.generate(PROMPT, **wish("dsd")).tokens == wanted
    with pytest.raises(UnsupportedError):
        Device(long_pair.draft, threads=1, lanes=0)


def test_a_lane_outlives_the_device_that_it_was_made_beside(long_pair: Pair, server) -> None:
    device = Device(long_pair.draft, server.endpoint, threads=1, lanes=2)
    with device.beside() as other:
        wanted = device.generate(PROMPT, **wish("tree")).tokens
        device.close()
        assert other.generate(PROMPT, **wish("tree")).tokens == wanted


def test_an_interrupt_strikes_its_own_lane(long_pair: Pair, server: EdgeServer) -> None:
    with (
        Device(long_pair.draft, server.endpoint, threads=1, lanes=2) as device,
        device.beside() as other,
    ):
        pieces = device.stream(PROMPT, **wish("dsd"))
        next(pieces)
        other.interrupt()
        assert sum(len(piece.tokens) for piece in pieces) > 70


def test_a_long_prompt_does_not_stall_the_other_lanes(long_pair: Pair) -> None:
    """A prompt is read in parts, and other lanes get their turns between two of them."""
    long = [1 + at % 60 for at in range(12000)]
    with Device(long_pair.draft, threads=1, lanes=2) as device, device.beside() as other:
        other.generate(PROMPT, protocol="local", max_tokens=5)
        read: list[Generation] = []

        def talk() -> None:
            read.append(device.generate(long, protocol="local", max_tokens=1))

        reading = threading.Thread(target=talk)
        reading.start()
        time.sleep(0.1)
        interim = 0
        for _ in other.stream(PROMPT, protocol="local", max_tokens=30):
            interim += reading.is_alive()
        reading.join()
        assert interim > 10, "the other lane had to wait for the whole prompt"
        assert len(read[0].tokens) == 1


def test_turns_go_round() -> None:
    turns, order = FairLock(), []

    def come(name: str) -> None:
        with turns:
            order.append(name)

    with turns:
        threads = []
        for name in "abc":
            thread = threading.Thread(target=come, args=(name,))
            thread.start()
            threads.append(thread)
            while len(turns._waiting) < len(threads):
                time.sleep(0.001)
    come("d")
    for thread in threads:
        thread.join()
    assert order == list("abcd")


def test_who_gives_way_has_the_next_turn() -> None:
    turns, order = FairLock(), []

    def come() -> None:
        with turns:
            order.append("other")

    with turns:
        thread = threading.Thread(target=come)
        thread.start()
        while not turns._waiting:
            time.sleep(0.001)
        turns.give_way()
        assert order == ["other"]
        late = threading.Thread(target=come)
        late.start()
        late.join(0.05)
        assert late.is_alive()  # this thread has the lock again
    for each in (thread, late):
        each.join()
    assert order == ["other"] * 2


@pytest.mark.parametrize("count", [1, 3])
def test_interrupts_while_others_have_their_turn_leave_the_lock_whole(count: int) -> None:
    class Interrupted(FairLock):
        interrupts = count

        def __enter__(self) -> None:
            if self._taken and self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            super().__enter__()

    turns, order = Interrupted(), []

    def come() -> None:
        FairLock.__enter__(turns)
        order.append("other")
        time.sleep(0.05)
        FairLock.__exit__(turns)

    thread = threading.Thread(target=come)

    def give_way() -> None:
        with turns:
            thread.start()
            while not turns._waiting:
                time.sleep(0.001)
            turns.give_way()

    with pytest.raises(KeyboardInterrupt):
        give_way()
    thread.join()
    assert order == ["other"]
    assert not turns._taken
    with turns:
        assert turns._taken
