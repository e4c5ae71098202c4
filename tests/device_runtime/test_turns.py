"""One device, many callers: each gets its own answer, or a typed error at once."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import DeviceClosedError, DeviceInUseError, InterruptedGenerationError
from tests.conftest import Pair

PROTOCOLS = ("greedy", "coupled", "stream", "ahead", "tslt", "dssd", "local", "auto")
QUESTIONS = [f"question {at}" for at in range(20)]


def wish(protocol: str = "greedy", tokens: int = 12) -> dict[str, Any]:
    temperature = 0.0 if protocol in ("greedy", "stream", "ahead", "local", "auto") else 1.0
    return {
        "protocol": protocol, "temperature": temperature, "seed": 5, "max_tokens": tokens,
        "window": None if protocol in ("stream", "ahead", "local", "auto") else 3,
    }  # fmt: skip


@pytest.fixture
def device(pair: Pair, edge: EdgeServer) -> Iterator[Device]:
    with Device(pair.draft, edge.endpoint, threads=1, lanes=2) as opened:
        yield opened


def output_of(pieces: Any) -> str:
    return "".join(piece.text for piece in pieces)


def begun(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_200_answers_from_eight_threads_and_tasks(device: Device) -> None:
    wanted = [
        (question, wish(protocol, tokens=4 + at % 9))
        for at, question in enumerate(QUESTIONS)
        for protocol in PROTOCOLS[:5]
    ]
    alone = [device.generate(question, **how).tokens for question, how in wanted]

    def streamed(question: str, how: dict[str, Any]) -> list[int]:
        with device.stream(question, **how) as pieces:
            return [token for piece in pieces for token in piece.tokens]

    async def by_tasks(pool: ThreadPoolExecutor) -> list[list[int]]:
        asyncio.get_running_loop().set_default_executor(pool)
        return await asyncio.gather(*(asyncio.to_thread(streamed, *each) for each in wanted))

    with ThreadPoolExecutor(4) as threads, ThreadPoolExecutor(4) as others:
        by_threads = [threads.submit(device.generate, each, **how) for each, how in wanted]
        together = asyncio.run(by_tasks(others))
        assert [each.result().tokens for each in by_threads] == alone
    assert together == alone


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_second_answer_of_the_same_thread_is_refused(device: Device, protocol: str) -> None:
    whole = device.generate("hi", **wish(protocol)).text
    first = device.stream("hi", **wish(protocol))
    text = next(first).text
    for call in (device.stream, device.generate):
        with pytest.raises(DeviceInUseError, match=r"close\(\)"):
            call("ho", **wish(protocol))
    with pytest.raises(DeviceInUseError):
        device.probe()
    assert text + output_of(first) == whole
    assert first.generation is not None
    assert list(first) == []


def test_two_tasks_of_one_thread_do_not_mix(device: Device) -> None:
    whole = {question: device.generate(question, **wish()).text for question in QUESTIONS[:2]}

    async def answer(question: str) -> str:
        text = ""
        for piece in device.stream(question, **wish()):
            text += piece.text
            await asyncio.sleep(0)
        return text

    async def both() -> list[str | BaseException]:
        return await asyncio.gather(*map(answer, whole), return_exceptions=True)

    first, second = asyncio.run(both())
    assert first == whole[QUESTIONS[0]]
    assert isinstance(second, DeviceInUseError)


def leave(device: Device, how: str) -> None:
    """Begin an answer, and leave it so."""
    pieces = device.stream("hi", **wish(tokens=60))
    if how != "never begun":
        next(pieces)
    if how == "closed":
        pieces.close()
        assert list(pieces) == []
    elif how == "with":
        with pieces:
            next(pieces)
    elif how == "break":
        for _ in pieces:
            break
    elif how == "collected":
        cycle: list[Any] = [pieces]
        cycle.append(cycle)
        del cycle, pieces
        gc.collect()
    elif how == "an error":
        raise ZeroDivisionError
    elif how == "interrupted":
        device.interrupt()
        with pytest.raises(InterruptedGenerationError):
            list(pieces)


@pytest.mark.parametrize(
    "how", ["never begun", "dropped", "closed", "with", "break", "collected", "interrupted"]
)
def test_an_answer_that_is_left_frees_the_device(device: Device, how: str) -> None:
    whole = device.generate("ho", **wish()).text
    leave(device, how)
    assert device.generate("ho", **wish()).text == whole
    assert begun(partial(device.generate, "ho", **wish())).join(20.0) is None


def test_an_error_in_the_reader_frees_the_device(device: Device) -> None:
    whole = device.generate("ho", **wish()).text
    with pytest.raises(ZeroDivisionError):
        leave(device, "an error")
    with pytest.raises(Exception, match="no protocol"):
        device.generate("hi", protocol="none")
    assert device.generate("ho", **wish()).text == whole


def test_a_stream_may_be_read_in_another_thread(device: Device) -> None:
    whole = device.generate("hi", **wish()).text
    pieces = device.stream("hi", **wish())
    with ThreadPoolExecutor(1) as pool:
        text = next(pieces).text + pool.submit(next, pieces).result().text
        with pytest.raises(DeviceInUseError):  # the reader would wait for itself
            pool.submit(device.generate, "ho", **wish()).result()
        assert text + output_of(pieces) == whole
        assert pool.submit(device.generate, "hi", **wish()).result().text == whole


def test_callers_wait_in_the_order_of_request(device: Device) -> None:
    pieces = device.stream("hi", **wish())
    served: list[int] = []

    def ask(at: int) -> None:
        device.generate("ho", **wish())
        served.append(at)

    threads = []
    for at in range(4):
        threads.append(begun(partial(ask, at)))
        time.sleep(0.02)
    assert served == []
    pieces.close()
    for thread in threads:
        thread.join(20.0)
    assert served == [0, 1, 2, 3]


def test_only_the_end_of_an_answer_wakes_waiting_callers(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, wakeups = device._turns._changed, []
    notify_all = changed.notify_all

    def counted() -> None:
        wakeups.append(threading.current_thread())
        notify_all()

    monkeypatch.setattr(changed, "notify_all", counted)
    with device.stream("hi", **wish()) as pieces:
        wakeups.clear()
        assert next(pieces).tokens
        assert next(pieces).tokens
        assert not wakeups
    assert wakeups


def test_what_needs_no_turn_answers_meanwhile(device: Device) -> None:
    whole = device.generate("hi", **wish()).text
    pieces = device.stream("hi", **wish())
    text = next(pieces).text
    assert len(device.prompt("ho")) > 0
    assert device.link_up
    assert device.link_state() is not None
    assert device.last_checked_s <= time.monotonic()
    with device.beside() as other:
        assert other.generate("hi", **wish()).text == whole  # in the same thread
    assert text + output_of(pieces) == whole


def test_a_callback_may_not_ask_its_own_device(pair: Pair, edge: EdgeServer) -> None:
    refused: list[BaseException] = []

    def ask(_: object) -> None:
        for call in (partial(device.generate, "ho"), device.close, device.probe, pieces.close):
            with pytest.raises(DeviceInUseError) as caught:
                call()
            refused.append(caught.value)

    with Device(pair.draft, edge.endpoint, threads=1, on_round=ask) as device:
        pieces = device.stream("hi", **wish(tokens=4))
        list(pieces)
    assert len(refused) >= 4


def calls(device: Device) -> list[Callable[[], object]]:
    """What needs the edge or the drafter."""
    return [
        partial(device.generate, "hi"), partial(device.stream, "hi"), device.probe, device.beside,
        partial(device.redirect, "tcp://127.0.0.1:9"), device.reconnect,
    ]  # fmt: skip


def test_after_close_all_is_refused(device: Device) -> None:
    device.generate("hi", **wish())
    pieces = device.stream("hi", **wish())
    next(pieces)
    device.close()
    for call in (*calls(device), partial(next, pieces)):
        with pytest.raises(DeviceClosedError):
            call()
    assert not device.link_up
    assert device.link_state() is None
    device.interrupt()
    pieces.close()
    device.close()


class Halt:
    """Holds an answer within its first round, in its own thread, until it is let go."""

    def __init__(self, device: Device) -> None:
        self._inside, self._go_on = threading.Event(), threading.Event()
        device._conversation._on_round = self._hold

    def _hold(self, _: object) -> None:
        self._inside.set()
        self._go_on.wait(20.0)

    def wait(self) -> None:
        assert self._inside.wait(20.0)

    def let_go(self) -> None:
        self._go_on.set()


def test_close_ends_what_runs_and_what_waits(device: Device) -> None:
    device.generate("hi", **wish())
    halt = Halt(device)
    with ThreadPoolExecutor(6) as pool:
        running = pool.submit(device.generate, "hi", **wish(tokens=60))
        halt.wait()
        waiting = [pool.submit(device.generate, "ho", **wish()) for _ in range(3)]
        waiting.append(pool.submit(device.probe))
        closing = pool.submit(device.close)
        for each in waiting:
            with pytest.raises(DeviceClosedError):
                each.result(20.0)
        assert not running.done()
        halt.let_go()
        with pytest.raises(DeviceClosedError):
            running.result(20.0)
        closing.result(20.0)


def test_two_threads_cannot_read_one_piece(device: Device) -> None:
    device.generate("hi", **wish())
    halt = Halt(device)
    pieces = device.stream("hi", **wish())
    thread = begun(partial(list, pieces))
    halt.wait()
    for call in (partial(next, pieces), pieces.close):
        with pytest.raises(DeviceInUseError):
            call()
    halt.let_go()
    thread.join(20.0)
    assert pieces.generation is not None


def test_a_forked_child_is_refused_at_once(pair: Pair, edge: EdgeServer) -> None:
    with Device(pair.draft, edge.endpoint, threads=1, lanes=2) as device:
        whole = device.generate("hi", **wish()).text
        pieces = device.stream("hi", **wish())
        text = next(pieces).text
        child = os.fork()
        if not child:
            signal.alarm(20)
            code = 1
            try:
                for call in (*calls(device), partial(next, pieces)):
                    with pytest.raises(DeviceClosedError, match="forked"):
                        call()
                assert not device.link_up
                assert device.link_state() is None
                device.close()
                pieces.close()
                del pieces
                gc.collect()
                with Device(pair.draft, edge.endpoint, threads=1) as ours:
                    assert ours.generate("hi", **wish()).text == whole
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert text + output_of(pieces) == whole
        assert device.generate("hi", **wish()).text == whole
