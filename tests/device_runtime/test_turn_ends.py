"""A turn ends whatever ends its answer: a collector at any line, an interrupt at any line."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from linecache import getline
from types import FrameType
from typing import Any

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import DeviceClosedError
from pilotfish.device_runtime import device as device_module
from pilotfish.device_runtime import turn as turn_module
from tests.conftest import Pair

WISH: dict[str, Any] = {"protocol": "greedy", "max_tokens": 6, "window": 3, "seed": 1}
SOON_S = 10.0


@pytest.fixture(scope="module")
def device(pair: Pair, edge: EdgeServer) -> Iterator[Device]:
    with Device(pair.draft, edge.endpoint, threads=1) as opened:
        yield opened


def ends(work: Callable[[], object]) -> bool:
    """Whether some work ends soon, in a thread of its own."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SOON_S)
    return not thread.is_alive()


def leave_in_a_cycle(device: Device) -> None:
    """Begin an answer, and leave its stream to the collector."""

    def begin() -> None:
        pieces = device.stream("hi", **WISH)
        next(pieces)
        cycle: list[Any] = [pieces]
        cycle.append(cycle)

    assert ends(begin)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect when asked for alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def locks(device: Device) -> dict[str, Any]:
    """What the end of an answer takes."""
    link = device._link
    assert link is not None
    return {
        "link": link._channel_lock,
        "gauge": link.estimator._lock,
        "learned": device._pair.statistics._lock,
    }


@pytest.mark.parametrize("name", ["link", "gauge", "learned"])
def test_a_collector_under_a_lock_that_ending_needs(device: Device, name: str) -> None:
    whole = device.generate("ho", **WISH).text

    def collect() -> None:
        with locks(device)[name]:
            gc.collect()

    with uncollected():
        leave_in_a_cycle(device)
        assert ends(collect)
    assert device.generate("ho", **WISH).text == whole


def test_a_collector_just_before_a_caller_waits(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told of what happened before it waited."""
    really = device._turns._changed.wait

    def wait(timeout: float | None = None) -> bool:
        gc.collect()
        return really(timeout)

    with uncollected():
        leave_in_a_cycle(device)
        monkeypatch.setattr(device._turns._changed, "wait", wait)
        assert ends(lambda: device.generate("ho", **WISH))


def interrupted_at(line: int, work: Callable[[], object]) -> bool:
    """Do some work, and press Ctrl-C before this line of a turn's; whether there is such a line.

    Not before the line of a lock, by which a block is also left, and not at a bare "try": no signal
    is handled there. Not while an answer is ended, either: a second Ctrl-C would have to be. Not in
    `__del__` and not in the callback of the garbage collector: CPython swallows what they raise.
    """
    files = {turn_module.__file__, device_module.__file__}
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        caller = frame.f_back.f_code.co_name if frame.f_back is not None else ""
        if "end" in (frame.f_code.co_name, caller):
            return None
        if frame.f_code.co_name in ("__del__", turn_module._note_collection.__name__):
            return None
        if frame.f_code.co_filename not in files:
            return trace
        text = getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and text not in ("with self._changed:", "try:"):
            seen += 1
            if seen == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            work()
    finally:
        sys.settrace(before)
    return seen >= line


def test_an_interrupt_at_any_line_frees_the_device(device: Device) -> None:
    def answer() -> None:
        device.generate("hi", **{**WISH, "max_tokens": 1})

    line = 1
    while interrupted_at(line, answer):
        turns = device._turns
        with turns._changed:
            assert turns._present is None, line
            assert not turns._waiting, line
        line += 1
    assert line > 40
    assert ends(answer)


def test_a_close_that_was_interrupted_is_made_up_for(pair: Pair, edge: EdgeServer) -> None:
    device = Device(pair.draft, edge.endpoint, threads=1)
    inside, go_on = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        inside.set()
        go_on.wait(SOON_S)

    device.generate("hi", **WISH)
    device._conversation._on_round = hold

    def answer() -> None:
        with suppress(DeviceClosedError):
            device.generate("hi", **WISH)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    assert inside.wait(SOON_S)

    def ctrl_c() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        device._turns.close(ctrl_c)
    go_on.set()
    thread.join(SOON_S)
    assert device._link is not None
    device.close()
    assert device._link is None
