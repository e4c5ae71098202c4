"""Lanes without HTTP: the order of clients, and lanes that hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pilotfish import Device
from pilotfish.base.errors import DrainingError
from pilotfish.device_runtime.record import Generation
from pilotfish.device_runtime.service.lanes import Lanes
from pilotfish.device_runtime.service.refusal import RefusalError
from pilotfish.wire.request import Options, Request
from tests.conftest import Pair

NOWHERE = "tcp://127.0.0.1:1"
LOCAL: Options = {"protocol": "local", "max_tokens": 20}
LONG: Options = {"protocol": "local", "max_tokens": 500}  # still under way when it is looked at


@asynccontextmanager
async def one_lane(device: Device, places: int) -> AsyncIterator[Lanes]:
    lanes = Lanes([device], places=places)
    try:
        yield lanes
    finally:
        lanes.interrupt()
        assert await asyncio.to_thread(lanes.close, 30)


async def answer(lanes: Lanes, client: str, ids: list[int], options: Options) -> Generation:
    with lanes.admit(client) as job:
        lanes.submit(
            job, lanes.lanes[0].device.prompt(ids), Request.from_options(options), streamed=False
        )
        assert await job.ready(60)
        whole = job.take()
        assert isinstance(whole, Generation)
        return whole


def test_many_requests_at_once_are_not_starved_by_repeated_ones(long_pair: Pair) -> None:
    """Two clients ask again as soon as they are answered, and one has three requests waiting."""
    ended: list[str] = []

    async def ask(lanes: Lanes, client: str) -> None:
        await answer(lanes, client, [1, 2, 3], LOCAL)
        ended.append(client)

    async def again(lanes: Lanes, client: str) -> None:
        while ended.count("alice") < 3 and len(ended) < 40:
            await ask(lanes, client)

    async def all_of_them(device: Device) -> None:
        async with one_lane(device, 12) as lanes:
            await asyncio.gather(
                *(ask(lanes, "alice") for _ in range(3)), again(lanes, "bob"), again(lanes, "carol")
            )

    with Device(long_pair.draft, threads=1) as device:
        asyncio.run(all_of_them(device))
    turns = [at for at, client in enumerate(ended) if client == "alice"]
    assert len(turns) == 3
    assert turns[-1] <= 8, ended  # each of the three is served once in three turns


def test_a_lane_that_waits_for_its_edge_does_not_hang(pair: Pair) -> None:
    """However long that may take: it can be told to stop at any time."""

    async def wait(device: Device) -> list[int]:
        async with one_lane(device, 1) as lanes:
            with lanes.admit("somebody") as job:
                lanes.submit(job, device.prompt([1, 2, 3]), Request(max_tokens=8), streamed=False)
                await asyncio.sleep(2.5)
                waiting = lanes.stuck(1.5)
                assert not await job.ready(0)
            return waiting

    with Device(pair.draft, NOWHERE, threads=1, on_link_loss="wait", patience_s=60.0) as device:
        assert asyncio.run(wait(device)) == []


def test_a_lane_that_reads_a_long_prompt_does_not_hang(long_pair: Pair) -> None:
    long = [1 + at % 60 for at in range(12_000)]
    seen: list[list[int]] = []

    async def read(device: Device) -> None:
        async with one_lane(device, 1) as lanes:
            running = asyncio.ensure_future(
                answer(lanes, "somebody", long, {"protocol": "local", "max_tokens": 1})
            )
            while not running.done():
                await asyncio.sleep(0.05)
                seen.append(lanes.stuck(0.4))
            await running

    with Device(long_pair.draft, threads=1) as device:
        asyncio.run(read(device))
    assert len(seen) > 10, "it was read too fast to tell"
    # on a busy machine a single part of it may take so long
    assert sum(map(bool, seen)) < len(seen) / 2


async def answers(lanes: Lanes, client: str, count: int, options: Options) -> list[Generation]:
    """All answers to one request, one after the other."""
    with lanes.admit(client, count) as job:
        prompt = lanes.lanes[0].device.prompt([1, 2, 3])
        lanes.submit(job, prompt, Request.from_options(options), streamed=False)
        results: list[Generation] = []
        while len(results) < count:
            assert await job.ready(60)
            event = job.take()
            assert isinstance(event, Generation)
            results.append(event)
        return results


def talk(draft: Path, places: int, work: Callable[[Lanes], Coroutine[Any, Any, Any]]) -> Any:
    """What ``work`` comes to with lanes of this drafter; their end is the device's, too."""

    async def run(device: Device) -> Any:
        async with one_lane(device, places) as lanes:
            return await work(lanes)

    with Device(draft, threads=1) as device:
        return asyncio.run(run(device))


@pytest.fixture(scope="module")
def drafter(long_pair: Pair) -> Path:
    return long_pair.draft


def test_answers_of_one_request_take_turns_with_other_clients(drafter: Path) -> None:
    messages: list[str] = []

    async def many(lanes: Lanes) -> None:
        result = await answers(lanes, "bob", 16, {**LOCAL, "temperature": 1.0, "seed": 3})
        assert len({tuple(item.tokens) for item in result}) > 1
        messages.append("bob")

    async def one_after_the_other(lanes: Lanes) -> None:
        for _ in range(4):
            await answer(lanes, "alice", [1, 2, 3], LOCAL)
            messages.append(f"alice, {lanes.waiting + lanes.running} of bob's left")

    async def both(lanes: Lanes) -> None:
        bob = asyncio.ensure_future(many(lanes))
        await asyncio.sleep(0)
        assert lanes.waiting == 15
        assert lanes.running == 1
        await asyncio.gather(bob, one_after_the_other(lanes))
        assert not lanes.waiting

    talk(drafter, 40, both)
    left = [int(item.split()[1]) for item in messages if item.startswith("alice")]
    assert messages[-1] == "bob"
    assert left[0] >= 14, messages  # after the one that ran, perhaps with the next begun
    assert left[-1] >= 8, messages


def test_choices_say_what_they_would_say_without_company(drafter: Path) -> None:
    options: Options = {**LOCAL, "temperature": 1.0, "seed": 5}
    [alone] = [talk(drafter, 9, lambda lanes: answers(lanes, "bob", 5, options))]

    async def crowd(lanes: Lanes) -> list[Generation]:
        bob = asyncio.ensure_future(answers(lanes, "bob", 5, options))
        await asyncio.gather(*(answer(lanes, "eve", [4, at], LOCAL) for at in range(4)))
        return await bob

    together = talk(drafter, 9, crowd)
    assert [item.tokens for item in together] == [item.tokens for item in alone]


def test_long_answers_wait_for_as_much_work_of_short_ones(drafter: Path) -> None:
    """Not for as many: who asks for little is not held up by who asks for much."""
    ended: list[str] = []

    async def ask(lanes: Lanes, client: str, tokens: int) -> None:
        await answer(lanes, client, [1, 2, 3], {"protocol": "local", "max_tokens": tokens})
        ended.append(client)

    async def all_of_them(lanes: Lanes) -> None:
        long = [ask(lanes, "bob", 3000) for _ in range(3)]
        await asyncio.gather(*long, *(ask(lanes, "alice", 3) for _ in range(9)))

    talk(drafter, 24, all_of_them)
    assert ended == ["bob", *["alice"] * 9, "bob", "bob"]


def test_time_is_not_saved_up_by_silence(drafter: Path) -> None:
    """Bob used the lane alone for long: alice takes turns with him, not the whole of that time."""
    ended: list[str] = []

    async def ask(lanes: Lanes, client: str, times: int) -> None:
        options: Options = {"protocol": "local", "max_tokens": 300}
        await asyncio.gather(*(answer(lanes, client, [1, 2], options) for _ in range(times)))

    async def single(lanes: Lanes, client: str) -> None:
        await ask(lanes, client, 1)
        ended.append(client)

    async def late(lanes: Lanes) -> None:
        for _ in range(6):
            await ask(lanes, "bob", 1)
        await asyncio.gather(*(single(lanes, name) for name in ["alice"] * 6 + ["bob"] * 3))

    talk(drafter, 24, late)
    assert "bob" in ended[:4], ended


def test_who_comes_back_waits_behind_those_that_wait_already(drafter: Path) -> None:
    """However long ago it was served last: its turn ended with its last answer."""
    ended: list[str] = []

    async def ask(lanes: Lanes, client: str) -> None:
        await answer(lanes, client, [1, 2, 3], LOCAL)
        ended.append(client)

    async def come_back(lanes: Lanes) -> None:
        for client in ("carol", "bob"):
            await ask(lanes, client)
        await asyncio.gather(*(ask(lanes, client) for client in ("bob", "alice", "carol")))

    talk(drafter, 9, come_back)
    assert ended == ["carol", "bob", "bob", "alice", "carol"]


def test_a_client_that_holds_a_lane_waits_behind_those_that_hold_none(pair: Pair) -> None:
    """Nobody knows yet how long its answer will take; the other lane is not for it as well."""
    ended: list[str] = []

    async def ask(lanes: Lanes, client: str) -> None:
        await answer(lanes, client, [1, 2, 3], LOCAL)
        ended.append(client)

    async def hold(devices: list[Device]) -> None:
        lanes = Lanes(devices, places=8)
        with lanes.admit("bob") as job:  # and waits for an edge
            lanes.submit(job, devices[0].prompt([1, 2, 3]), Request(max_tokens=8), streamed=False)
            await asyncio.gather(*(ask(lanes, client) for client in ("alice", "bob", "alice")))
        assert await asyncio.to_thread(lanes.close, 30)

    waits: dict[str, Any] = {"on_link_loss": "wait", "patience_s": 60.0}
    with Device(pair.draft, NOWHERE, threads=1, lanes=2, **waits) as device:
        asyncio.run(hold([device, device.beside()]))
    assert ended == ["alice", "alice", "bob"]


def test_each_answer_takes_a_place(drafter: Path) -> None:
    """One lane, six places: a client may hold four answers, or one larger request alone."""
    messages: list[tuple[int, int]] = []

    async def full(device: Device) -> None:
        lanes = Lanes([device], places=6, on_counts=lambda *counts: messages.append(counts))

        def refusal(client: str, choices: int) -> str:
            try:
                with lanes.admit(client, choices):
                    return ""
            except RefusalError as error:
                return f"{error.status}: {error.message}"

        with lanes.admit("bob", 2):
            assert refusal("bob", 2) == ""
            assert refusal("bob", 3).startswith("429: Your share")
        with lanes.admit("bob", 16):
            assert refusal("bob", 1).startswith("429: Your share")
            assert refusal("alice", 3) == ""
            assert refusal("alice", 4).startswith("429: The queue")
            lanes._report()
        assert messages[-2] == (16, 0)
        assert messages[-1] == (0, 0)
        with lanes.admit("bob", 3) as job:
            lanes.submit(job, device.prompt([1]), Request.from_options(LOCAL), streamed=False)
            for left in (2, 1, 0):
                assert await job.ready(60)
                job.take()
                assert lanes.waiting + lanes.running <= max(1, left)
        assert await asyncio.to_thread(lanes.close, 30)

    with Device(drafter, threads=1) as device:
        asyncio.run(full(device))


def test_a_drain_lets_all_answers_of_a_begun_request_end(drafter: Path) -> None:
    async def drain(lanes: Lanes) -> None:
        bob = asyncio.ensure_future(answers(lanes, "bob", 4, LOCAL))
        alice = asyncio.ensure_future(answer(lanes, "alice", [1], LONG))
        while not any(lane.job and lane.job.client == "alice" for lane in lanes.lanes):
            await asyncio.sleep(0.001)
        carol = asyncio.ensure_future(answer(lanes, "carol", [1], LOCAL))
        await asyncio.sleep(0)
        lanes.refuse_waiting()
        assert len(await bob) == 4
        assert (await alice).tokens
        with pytest.raises(DrainingError):
            await carol

    talk(drafter, 9, drain)


def test_a_client_that_goes_between_its_answers_leaves_nothing(drafter: Path) -> None:
    async def leave(lanes: Lanes) -> None:
        bob = asyncio.ensure_future(answers(lanes, "bob", 8, LOCAL))
        alice = asyncio.ensure_future(answer(lanes, "alice", [1], LONG))
        while not any(lane.job and lane.job.client == "alice" for lane in lanes.lanes):
            await asyncio.sleep(0.001)
        bob.cancel()
        await alice
        await asyncio.wait([bob])
        assert lanes.waiting + lanes.running == 0
        assert await answers(lanes, "bob", 2, LOCAL)

    talk(drafter, 9, leave)
