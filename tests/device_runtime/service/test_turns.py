"""Lanes without HTTP: the order of clients, and lanes that hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pilotfish import Device
from pilotfish.device_runtime.plan import Options
from pilotfish.device_runtime.record import Generation
from pilotfish.device_runtime.service.lanes import Lanes
from tests.conftest import Pair

NOWHERE = "tcp://127.0.0.1:1"
LOCAL: Options = {"protocol": "local", "max_tokens": 20}


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
        lanes.submit(job, lanes.lanes[0].device.prompt(ids), options, streamed=False)
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
                lanes.submit(job, device.prompt([1, 2, 3]), {"max_tokens": 8}, streamed=False)
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
