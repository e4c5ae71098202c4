"""The devices of one point of a load, in a few processes, and the window in which they are timed.

In:  the devices of each process. Out: the answers to the questions of the measured window.

After a warm-up the window lasts as long as asked for, and until enough of its answers have ended.
Then the devices go on until every question of the window is answered. So long answers count like
short ones, and all of them see the same load.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from pilotfish.base.child import STOP_S, ChildProcess
from pilotfish.base.errors import EdgeLostError, PilotfishError
from pilotfish.lab.field.load.timed_answer import TimedAnswer
from pilotfish.lab.field.load.worker import Devices

if TYPE_CHECKING:
    from typing_extensions import Self

_COMMAND = (sys.executable, "-m", "pilotfish.lab.field.load.worker")
_SILENCE_S = 900.0  # longest time without any answer
_TICK_S = 0.2
_MOST_ERRORS = 10  # failed answers after which a point ends
_LEAD_S = 0.05  # time between the request to begin and the load

Progress = Callable[[float], None]
Cpu = Callable[[], "float | None"]  # CPU seconds of the edge so far; None if they are unknown


@dataclass(frozen=True, kw_only=True)
class Window:
    """How long a point is measured. answers: minimum number of questions that were answered."""

    warm_up_s: float
    for_s: float
    answers: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured window. begin_s, end_s: on the monotonic clock.

    answers: the answers to the questions of the window. tokens: number of tokens that arrived in
    the window.
    edge_cpu_s: CPU seconds of the edge in the window; None if they are unknown.
    """

    begin_s: float
    end_s: float
    answers: list[TimedAnswer]
    tokens: int
    edge_cpu_s: float | None


def share_out(devices: Devices, count: int, processes: int) -> list[Devices]:
    """Give ``count`` devices to at most so many processes, as evenly as possible."""
    used = min(count, processes)
    return [
        structs.replace(devices, numbers=list(range(process, count, used)))
        for process in range(used)
    ]


class Fleet:
    """Connected devices, inside a ``with`` block."""

    def __init__(self, shares: Sequence[Devices]) -> None:
        self._messages: queue.Queue[dict[str, Any] | PilotfishError] = queue.Queue()
        self._children: list[ChildProcess] = []
        self._answers: list[TimedAnswer] = []
        try:
            for share in shares:
                self._start(share)
            self._wait_for("ready")
        except BaseException:
            self.close()
            raise

    def _start(self, share: Devices) -> None:
        child = ChildProcess(_COMMAND, _SILENCE_S)
        self._children.append(child)
        child.pipe.send(structs.asdict(share))
        threading.Thread(target=self._read, args=(child,), daemon=True).start()

    def _read(self, child: ChildProcess) -> None:
        """Pass a process's messages on, and at last the error by which it ended."""
        try:
            while (message := child.receive()) is not None:
                self._messages.put(message)
        except PilotfishError as error:
            self._messages.put(error)
            return
        except (OSError, ValueError):  # its pipe was closed
            pass
        self._messages.put(
            EdgeLostError(
                f"A process of devices ended ({_status(child)}); see what it wrote to stderr."
            )
        )

    def measure(
        self,
        window: Window,
        progress: Progress = lambda seconds: None,
        edge_cpu_s: Cpu = lambda: None,
    ) -> Measured:
        """Let the devices ask, and return the window. progress: gets its seconds so far."""
        begin_s = time.monotonic() + _LEAD_S
        self._send({"begin": begin_s})
        while time.monotonic() < begin_s + window.warm_up_s:
            self._take(_TICK_S)
        begin_s, cpu_before_s = time.monotonic(), edge_cpu_s()
        while not self._is_over(window, begin_s):
            self._take(_TICK_S)
            progress(time.monotonic() - begin_s)
        end_s, cpu_after_s = time.monotonic(), edge_cpu_s()
        self._send({"until": end_s})
        self._wait_for("answered", lambda: progress(time.monotonic() - begin_s))
        return Measured(
            begin_s=begin_s,
            end_s=end_s,
            answers=[each for each in self._answers if begin_s <= each.asked_s < end_s],
            tokens=_tokens_between(self._answers, begin_s, end_s),
            edge_cpu_s=(
                None if cpu_before_s is None or cpu_after_s is None else cpu_after_s - cpu_before_s
            ),
        )

    def _is_over(self, window: Window, begin_s: float) -> bool:
        if sum(bool(each.error) for each in self._answers) >= _MOST_ERRORS:
            return True
        if time.monotonic() < begin_s + window.for_s:
            return False
        answered = sum(each.asked_s >= begin_s and not each.error for each in self._answers)
        return answered >= window.answers

    def _wait_for(self, name: str, each_tick: Callable[[], None] = lambda: None) -> None:
        """Wait until every process has sent this message; keep the answers that come meanwhile."""
        missing = len(self._children)
        end_s = time.monotonic() + _SILENCE_S
        while missing:
            message = self._take(_TICK_S)
            missing -= message is not None and name in message
            if message is not None:
                end_s = time.monotonic() + _SILENCE_S
            elif time.monotonic() > end_s:
                raise EdgeLostError(f"No answer ended within {_SILENCE_S:g} s.")
            each_tick()

    def _take(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message, if it comes in time; raise an error that a process sent."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(message, PilotfishError):
            raise message
        if "answer" in message:
            self._answers.append(msgspec.convert(message["answer"], TimedAnswer))
        return message

    def _send(self, message: dict[str, Any]) -> None:
        for child in self._children:
            child.pipe.send(message)

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.stop()
        self._children = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _status(child: ChildProcess) -> str:
    """Describe how a process ended."""
    try:
        return f"status {child.process.wait(STOP_S)}"
    except subprocess.TimeoutExpired:
        return "it closed its pipe"


def _tokens_between(answers: Iterable[TimedAnswer], begin_s: float, end_s: float) -> int:
    return sum(
        count for answer in answers for at_s, count in answer.arrivals if begin_s <= at_s < end_s
    )
