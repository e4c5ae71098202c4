"""`AsyncDevice`: answers like `Device`'s, in order, cancellable, and no loop waits for them."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from functools import partial
from itertools import pairwise
from typing import Any, get_type_hints

import pytest

from pilotfish import (
    AsyncAnswerStream,
    AsyncDevice,
    Device,
    DeviceClosedError,
    DeviceInUseError,
    EdgeLostError,
    EdgeServer,
    EdgeUnreachableError,
    PromptTooLongError,
    Round,
    UnsupportedError,
)
from pilotfish.device_runtime.async_device import _PIECES, DeviceOptions
from tests.conftest import Pair

NOWHERE = "tcp://127.0.0.1:1"
ENDLESS = 30_000  # tokens
HOW: dict[str, Any] = {"protocol": "greedy", "window": 3, "max_tokens": 12}
LONG = {**HOW, "max_tokens": ENDLESS}
ALONE: dict[str, Any] = {"protocol": "local", "max_tokens": ENDLESS}


@pytest.fixture(scope="module")
def endless_edge(long_pair: Pair) -> Iterator[EdgeServer]:
    with EdgeServer(long_pair.target, threads=1) as server:
        yield server


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run in a loop of its own, and fail on what the loop would only log."""
    troubles: list[Any] = []

    async def watched() -> Any:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, trouble: troubles.append(trouble)
        )
        result = await asyncio.wait_for(work, 60)
        gc.collect()
        await asyncio.sleep(0)
        return result

    threads = threading.active_count()
    result = asyncio.run(watched())
    assert not troubles
    end_s = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < end_s:
        time.sleep(0.01)
    assert threading.active_count() <= threads, threading.enumerate()
    return result


async def until(claim: Callable[[], bool], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not claim():
        assert time.monotonic() < end_s, "it did not come true in time"
        await asyncio.sleep(0.005)


def free(device: AsyncDevice) -> bool:
    lanes = device._lanes
    return lanes is not None and not lanes.running and not lanes.waiting


def test_the_keywords_are_those_of_a_device() -> None:
    keywords = {
        name
        for name, parameter in inspect.signature(Device).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert {*get_type_hints(DeviceOptions)} == keywords


@pytest.mark.parametrize("protocol", ["greedy", "coupled", "ahead", "stream", "local", "auto"])
def test_answers_are_those_of_a_device(
    pair: Pair, edge: EdgeServer, device: Device, protocol: str
) -> None:
    how: dict[str, Any] = {"protocol": protocol, "max_tokens": 12, "temperature": 0.0, "seed": 5}
    how["temperature"] = 1.0 if protocol == "coupled" else 0.0
    prompts = [f"question {at}" for at in range(6)]
    alone = [device.generate(prompt, **how).tokens for prompt in prompts]

    async def streamed(opened: AsyncDevice, prompt: str) -> list[int]:
        stream = opened.stream(prompt, **how)
        tokens = [token async for piece in stream for token in piece.tokens]
        assert stream.generation is not None
        assert stream.generation.tokens == tokens
        assert [piece async for piece in stream] == []
        return tokens

    async def together() -> list[Any]:
        async with AsyncDevice(pair.draft, edge.endpoint, threads=1, lanes=2) as opened:
            whole = asyncio.gather(*(opened.generate(prompt, **how) for prompt in prompts))
            pieces = asyncio.gather(*(streamed(opened, prompt) for prompt in prompts))
            return [[each.tokens for each in await whole], await pieces]

    assert run(together()) == [alone, alone]


def test_lanes_run_at_once_and_others_wait_in_order(
    long_pair: Pair, endless_edge: EdgeServer
) -> None:
    async def crowd() -> tuple[list[int], int]:
        begun: list[int] = []
        ended: list[int] = []

        async def ask(opened: AsyncDevice, at: int) -> None:
            async with opened.stream([1, 2, at], **{**HOW, "max_tokens": 90}) as pieces:
                await anext(pieces)
                begun.append(at)
                async for _ in pieces:
                    pass
            ended.append(at)

        async with AsyncDevice(
            long_pair.draft, endless_edge.endpoint, threads=1, lanes=3
        ) as opened:
            tasks = [asyncio.ensure_future(ask(opened, at)) for at in range(9)]
            await until(lambda: len(begun) == 3)
            running = opened._usable().running
            await asyncio.gather(*tasks)
        return begun, running

    begun, running = run(crowd())
    assert running == 3
    assert {*begun[:3]} == {0, 1, 2}
    assert all(begun.index(at) <= at + 2 for at in range(9)), begun


async def cancel_task(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("way", ["generate", "stream", "between pieces", "wait_for", "waiting"])
def test_a_cancelled_task_frees_its_lane_within_a_round(
    long_pair: Pair, endless_edge: EdgeServer, way: str
) -> None:
    """The rounds are counted, not timed."""
    rounds: list[Round] = []
    streams: list[AsyncAnswerStream] = []  # so that none ends because it is deleted

    async def read(opened: AsyncDevice) -> None:
        streams.append(opened.stream("hi", **LONG))
        async for _ in streams[-1]:
            if way == "between pieces":
                await asyncio.sleep(100)

    async def cancel() -> None:
        async with AsyncDevice(
            long_pair.draft, endless_edge.endpoint, threads=1, on_round=rounds.append
        ) as opened:
            whole = (await opened.generate("ho", **HOW)).tokens
            rounds.clear()
            working: Coroutine[Any, Any, Any]
            working = read(opened) if way != "generate" else opened.generate("hi", **LONG)
            if way == "wait_for":
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(working, 0.3)
            else:
                task = asyncio.ensure_future(working)
                await until(lambda: len(rounds) > 2)
                if way == "waiting":
                    second = asyncio.ensure_future(opened.generate("hi", **LONG))
                    await until(lambda: opened._usable().waiting == 1)
                    await cancel_task(second)
                    assert (opened._usable().waiting, opened._usable().running) == (0, 1)
                await cancel_task(task)
            at_cancel = len(rounds)
            await until(partial(free, opened), 5)
            assert len(rounds) <= at_cancel + 2  # one that had ended, and one that was under way
            assert (await opened.generate("ho", **HOW)).tokens == whole

    run(cancel())


async def leave(opened: AsyncDevice, way: str) -> None:
    stream = opened.stream("hi", **ALONE)
    if way == "never read":
        return
    if way == "break":
        async for _ in stream:
            break
        return
    await anext(stream)
    if way == "aclose":
        await stream.aclose()
        assert [piece async for piece in stream] == []
        await stream.aclose()
    elif way == "aclosing":
        async with aclosing(stream):
            await anext(stream)
    elif way == "async with":
        async with stream:
            await anext(stream)
    elif way == "collected":
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del cycle, stream
        gc.collect()
    elif way == "an error":
        with suppress(ZeroDivisionError):
            async with stream:
                _ = 1 / 0


@pytest.mark.parametrize(
    "way",
    ["never read", "break", "dropped", "aclose", "aclosing", "async with", "collected", "an error"],
)
def test_a_stream_that_is_left_frees_its_lane(long_pair: Pair, way: str) -> None:
    async def left() -> None:
        async with AsyncDevice(long_pair.draft, threads=1) as opened:
            await leave(opened, way)
            await until(partial(free, opened), 5)
            assert (await opened.generate("ho", protocol="local", max_tokens=3)).tokens

    run(left())


def test_a_slow_reader_slows_its_answer_and_no_other(long_pair: Pair) -> None:
    async def slow() -> None:
        async with AsyncDevice(long_pair.draft, threads=1, lanes=2) as opened:
            stream = opened.stream([1, 2], **ALONE)
            first = await anext(stream)
            lane = opened._usable().lanes[0]
            await until(lambda: lane.job is not None and lane.job.backlog == _PIECES)
            await asyncio.sleep(0.3)
            assert lane.job is not None
            assert lane.job.backlog == _PIECES
            other = await opened.generate([3, 4], protocol="local", max_tokens=400)
            assert len(other.tokens) == 400
            tokens = [*first.tokens]
            async with stream:
                while len(tokens) < 200:
                    tokens += (await anext(stream)).tokens
                    assert lane.job.backlog <= _PIECES
        with Device(long_pair.draft, threads=1) as device:
            whole = device.generate([1, 2], protocol="local", max_tokens=200).tokens
        assert tokens[:200] == whole

    run(slow())


def test_two_tasks_cannot_read_one_stream_at_once(long_pair: Pair) -> None:
    async def both() -> None:
        async with AsyncDevice(long_pair.draft, NOWHERE, on_link_loss="wait") as opened:
            stream = opened.stream([1, 2], max_tokens=8)
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.05)
            for call in (partial(anext, stream), stream.aclose):
                with pytest.raises(DeviceInUseError, match="one task at a time"):
                    await call()
            await cancel_task(reading)

    run(both())


@pytest.mark.parametrize("way", ["aclose", "the end of the block", "a cancelled block"])
def test_closing_ends_all_answers(long_pair: Pair, endless_edge: EdgeServer, way: str) -> None:
    async def close() -> None:
        answers: list[asyncio.Future[Any]] = []

        async def read(stream: Any) -> None:
            async for _ in stream:
                pass

        async def block() -> None:
            async with AsyncDevice(
                long_pair.draft, endless_edge.endpoint, threads=1, lanes=2
            ) as opened:
                calls: list[Awaitable[Any]] = [
                    opened.generate("a", **LONG),
                    read(opened.stream("b", **LONG)),
                    opened.generate("c", **LONG),
                    read(opened.stream("d", **LONG)),
                ]
                answers.extend(map(asyncio.ensure_future, calls))
                await until(lambda: opened._usable().running == 2)
                await until(lambda: opened._usable().waiting == 2)
                answers.append(asyncio.ensure_future(opened.generate("e" * 40, **LONG)))
                await asyncio.sleep(0)  # its prompt is being read
                if way == "aclose":
                    await asyncio.gather(opened.aclose(), opened.aclose())
                    with pytest.raises(DeviceClosedError):
                        await opened.generate("x")
                    with pytest.raises(DeviceClosedError):
                        opened.stream("x")
                if way == "a cancelled block":
                    await asyncio.sleep(100)

        blocking = asyncio.ensure_future(block())
        if way == "a cancelled block":
            await until(lambda: len(answers) == 5)
            await cancel_task(blocking)
        else:
            await blocking
        for answer in answers:
            with pytest.raises(DeviceClosedError):
                await answer

    run(close())


def test_a_closed_or_unopened_device_says_so(pair: Pair) -> None:
    async def misuse() -> None:
        unopened = AsyncDevice(pair.draft)
        with pytest.raises(DeviceClosedError, match="async with"):
            await unopened.generate("x")
        with pytest.raises(DeviceClosedError, match="async with"):
            _ = unopened.device
        await unopened.aclose()
        async with AsyncDevice(pair.draft, threads=1) as opened:
            assert opened.device.link_up is False

            async def elsewhere() -> None:
                with pytest.raises(UnsupportedError, match="event loop"):
                    await opened.generate("x")

            def outside() -> None:
                with pytest.raises(UnsupportedError, match="event loop"):
                    opened.stream("x")

            await asyncio.to_thread(asyncio.run, elsewhere())
            await asyncio.to_thread(outside)
        with pytest.raises(DeviceClosedError, match="another"):
            async with opened:
                pass

    run(misuse())


def test_errors_are_typed(pair: Pair, edge: EdgeServer) -> None:
    async def fail() -> None:
        with pytest.raises(UnsupportedError):
            async with AsyncDevice(pair.draft, lanes=0):
                pass
        with pytest.raises(EdgeUnreachableError):
            async with AsyncDevice(pair.draft, NOWHERE):
                pass
        async with AsyncDevice(pair.draft, edge.endpoint, threads=1) as opened:
            for wrong in ({"tools": [{}]}, {"tool_choice": "none", "parallel_tool_calls": 1}):
                with pytest.raises(UnsupportedError):
                    await opened.generate("x", **wrong)
                with pytest.raises(UnsupportedError):
                    opened.stream("x", **wrong)
            with pytest.raises(PromptTooLongError):
                await opened.generate([1] * 1000)
            with pytest.raises(UnsupportedError):
                await opened.generate("x", protocol="none")
            with pytest.raises(UnsupportedError):
                await anext(opened.stream("x", temperature=-1.0))
            assert (await opened.generate("ho", **HOW)).tokens
        async with AsyncDevice(
            pair.draft, NOWHERE, on_link_loss="wait", patience_s=0.3, threads=1
        ) as opened:
            with pytest.raises(EdgeLostError):
                await opened.generate("x")

    run(fail())


def test_opening_can_be_cancelled(pair: Pair, edge: EdgeServer) -> None:
    async def impatient() -> None:
        for wait_s in (0.0, 0.01, 0.05):
            for address in (edge.endpoint, NOWHERE):
                device = AsyncDevice(pair.draft, address)
                opening = asyncio.ensure_future(device.__aenter__())
                await asyncio.sleep(wait_s)
                if opening.done():  # a fast machine
                    await opening
                    await device.aclose()
                else:
                    await cancel_task(opening)

    run(impatient())


def test_a_conversation_gets_its_lane_back(long_pair: Pair, endless_edge: EdgeServer) -> None:
    async def talk() -> None:
        async with AsyncDevice(
            long_pair.draft, endless_edge.endpoint, threads=1, lanes=2
        ) as opened:
            a, b = [1, 2] * 20, [3, 4] * 20
            await asyncio.gather(opened.generate(a, **HOW), opened.generate(b, **HOW))
            shared = [
                lane.device.shared(lane.device.prompt([*a, 9])) for lane in opened._usable().lanes
            ]
            assert sorted(shared) == [0, len(a)]
            await opened.generate([*b, 5], **HOW)
            assert [
                lane.device.shared(lane.device.prompt([*a, 9])) for lane in opened._usable().lanes
            ] == shared

    run(talk())


@pytest.mark.timing
def test_the_loop_never_waits(long_pair: Pair, endless_edge: EdgeServer) -> None:
    """It ticks while a device opens, reads a long prompt, answers, waits for an edge, and closes.

    Each of these takes longer than the limit. A busy machine delays a plain thread as much.
    """

    async def tick(ticks: list[float]) -> None:
        while True:
            await asyncio.sleep(0.001)
            ticks.append(time.perf_counter())

    def tick_beside(ticks: list[float], over: threading.Event) -> None:
        while not over.wait(0.001):
            ticks.append(time.perf_counter())

    async def work() -> None:
        async with AsyncDevice(
            long_pair.draft, endless_edge.endpoint, threads=1, lanes=2
        ) as opened:
            with pytest.raises(PromptTooLongError):
                await opened.generate("x" * 16_000_000, **HOW)
            await opened.generate("x" * 1_800, **{**HOW, "max_tokens": 2})
            await asyncio.gather(*(opened.generate("x", **HOW) for _ in range(8)))
            async for _ in opened.stream("x", **{**HOW, "max_tokens": 200}):
                pass
        async with AsyncDevice(
            long_pair.draft, NOWHERE, on_link_loss="wait", patience_s=0.3
        ) as opened:
            with pytest.raises(EdgeLostError):
                await opened.generate("x")

    async def watched() -> tuple[list[float], list[float]]:
        ticks: list[float] = []
        in_thread: list[float] = []
        over = threading.Event()
        thread = threading.Thread(target=tick_beside, args=(in_thread, over), daemon=True)
        thread.start()
        ticking = asyncio.ensure_future(tick(ticks))
        await work()
        await cancel_task(ticking)
        over.set()
        thread.join()
        return gaps(ticks), gaps(in_thread)

    def gaps(ticks: list[float]) -> list[float]:
        return sorted(after - before for before, after in pairwise(ticks))

    loop, plain = run(watched())
    assert len(loop) > 100
    assert loop[int(0.95 * len(loop))] < 0.005 + plain[int(0.95 * len(plain))]
    assert loop[-1] < 0.1 + plain[-1]
