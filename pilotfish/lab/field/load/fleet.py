"""The devices of one point of a load, in a few processes, and the time in which they are measured.

In:  the devices of each process. Out: the answers to the questions of the measured time.

After a warm-up the measured time lasts as long as asked for, and until enough of its answers have
ended. Then the devices go on until every question of this time is answered. So long answers count
like short ones, and all of them see the same load.

A process that dies, stops or hangs ends the point with an error that names its devices. So does an
edge that refuses everything, or that answers no more.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
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
_SILENCE_S = 60.0  # longest time without a sign of life of a process
_CONNECT_S = 300.0  # longest time until all devices are connected
_CHECK_EVERY_S = 0.2  # longest wait for a message between two looks at the clock
_MOST_ERRORS = 10  # failed answers after which a point ends
_LOST_S = 30.0  # shortest time without a good answer after which the edge counts as lost
_FEW_ERRORS = 3  # with so few failed answers, it counts as lost after `_SLOW` times this time
_SLOW = 10.0
_LEAD_S = 0.05  # time between the request to begin and the load

Progress = Callable[[float], None]
Cpu = Callable[[], "float | None"]  # CPU seconds of the edge so far; None if they are unknown


@dataclass(frozen=True, kw_only=True)
class Period:
    """How long a point is measured. answers: minimum number of questions that were answered."""

    warm_up_s: float
    for_s: float
    answers: int


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured. begin_s, end_s: of the measured time, on the monotonic clock.

    answers: the answers to the questions of this time. tokens: number of tokens that arrived in it.
    edge_cpu_s: CPU seconds of the edge in it; None if they are unknown. warm_up_errors: number of
    failed answers before it. first_error: why the first answer failed; "": none did.
    """

    begin_s: float
    end_s: float
    answers: list[TimedAnswer]
    tokens: int
    edge_cpu_s: float | None
    warm_up_errors: int = 0
    first_error: str = ""


def split_devices(devices: Devices, count: int, processes: int) -> list[Devices]:
    """Give ``count`` devices to at most so many processes, as evenly as possible."""
    used = min(count, processes)
    ends = [count * (process + 1) // used for process in range(used)]
    return [
        structs.replace(devices, numbers=list(range(begin, end)))
        for begin, end in zip([0, *ends], ends, strict=False)
    ]


class Fleet:
    """Connected devices, inside a ``with`` block.

    silence_s: longest time without a sign of life of a process. lost_s: the edge is lost if its
    answers fail for this time. Raises `EdgeLostError` if a process is lost or silent, and the
    errors of devices.
    """

    def __init__(
        self,
        groups: Sequence[Devices],
        *,
        silence_s: float = _SILENCE_S,
        lost_s: float = _LOST_S,
    ) -> None:
        self._silence_s, self._lost_s = silence_s, lost_s
        self._messages: queue.Queue[dict[str, Any] | PilotfishError] = queue.Queue()
        self._children: list[ChildProcess] = []
        self._answers: list[TimedAnswer] = []
        self._begin_s = float("inf")  # the measured time begins
        self._ended_well = self._failed = 0  # answers to its questions
        self._errors_in_row: list[tuple[float, str]] = []  # times and reasons; none was good since
        try:
            for devices in groups:
                self._start(devices)
            self._wait_for("ready", limit_s=_CONNECT_S)
        except BaseException:
            self.close()
            raise

    def _start(self, devices: Devices) -> None:
        child = ChildProcess(_COMMAND, self._silence_s)
        self._children.append(child)
        with suppress(OSError):  # it has ended; its reader says how
            child.pipe.send(structs.asdict(devices))
        threading.Thread(target=self._read, args=(child, devices.numbers), daemon=True).start()

    def _read(self, child: ChildProcess, numbers: Sequence[int]) -> None:
        """Pass a process's messages on, and at last the error by which it ended."""
        problem = ""
        try:
            while (message := child.receive()) is not None:
                self._messages.put(message)
        except PilotfishError as error:
            self._messages.put(error)
            return
        except TimeoutError:
            problem = f"gave no sign of life for {self._silence_s:g} s"
        except (OSError, ValueError):  # its pipe was closed
            pass
        self._messages.put(
            EdgeLostError(
                f"The process of {_names(numbers)} {problem or _ending(child)}; it may have said "
                "why on stderr."
            )
        )

    def measure(
        self,
        period: Period,
        progress: Progress = lambda seconds: None,
        edge_cpu_s: Cpu = lambda: None,
    ) -> Measurement:
        """Let the devices ask, and measure. progress: gets the seconds that are measured so far.

        Raises `EdgeLostError` with the first reason if the edge answers nothing or no longer.
        """
        begin_s = time.monotonic() + _LEAD_S
        self._send({"begin": begin_s})
        while time.monotonic() < begin_s + period.warm_up_s:
            self._take(_CHECK_EVERY_S)
        begin_s = self._begin_s = time.monotonic()
        cpu_before_s = edge_cpu_s()
        while not self._is_over(period):
            self._take(_CHECK_EVERY_S)
            progress(time.monotonic() - begin_s)
        end_s, cpu_after_s = time.monotonic(), edge_cpu_s()
        self._send({"until": end_s})
        self._wait_for("answered", lambda: progress(time.monotonic() - begin_s))
        self._expect_edge(lambda: progress(time.monotonic() - begin_s))
        errors = [each.error for each in self._answers if each.error]
        return Measurement(
            begin_s=begin_s,
            end_s=end_s,
            answers=[each for each in self._answers if begin_s <= each.asked_s < end_s],
            tokens=_tokens_between(self._answers, begin_s, end_s),
            edge_cpu_s=(
                None if cpu_before_s is None or cpu_after_s is None else cpu_after_s - cpu_before_s
            ),
            warm_up_errors=sum(
                bool(each.error) and each.asked_s < begin_s for each in self._answers
            ),
            first_error=errors[0] if errors else "",
        )

    def _is_over(self, period: Period) -> bool:
        if self._failed >= _MOST_ERRORS or self._is_lost():
            return True
        is_late = time.monotonic() >= self._begin_s + period.for_s
        return is_late and self._ended_well >= period.answers

    def _is_lost(self) -> bool:
        """Whether the last answers have failed, and are so many or so long ago that none helps."""
        if not self._errors_in_row:
            return False
        lasted_s = time.monotonic() - self._errors_in_row[0][0]
        if self._failed >= _MOST_ERRORS:
            return not self._ended_well or lasted_s > self._lost_s
        # few devices, whose answers fail slowly
        return len(self._errors_in_row) >= _FEW_ERRORS and lasted_s > _SLOW * self._lost_s

    def _expect_edge(self, on_check: Callable[[], None]) -> None:
        """After an error, wait for a good answer; raise `EdgeLostError` if none comes.

        An edge that dies is no edge that is too slow, so its point must not be kept.
        """
        while self._errors_in_row:
            if self._is_lost():
                raise EdgeLostError(
                    f"{len(self._errors_in_row)} answers have failed, and none has ended well "
                    f"since; the first: {self._errors_in_row[0][1]}"
                )
            self._take(_CHECK_EVERY_S)
            on_check()

    def _wait_for(
        self,
        name: str,
        on_check: Callable[[], None] = lambda: None,
        *,
        limit_s: float = float("inf"),
    ) -> None:
        """Wait until every process has sent this message; keep the answers that come meanwhile."""
        missing = len(self._children)
        end_s = time.monotonic() + limit_s
        while missing:
            message = self._take(_CHECK_EVERY_S)
            missing -= message is not None and name in message
            if time.monotonic() > end_s:
                raise EdgeLostError(f"Not all devices were connected within {limit_s:g} s.")
            on_check()

    def _take(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message, if it comes in time; raise an error that a process sent."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(message, PilotfishError):
            raise message
        if "answer" in message:
            answer = msgspec.convert(message["answer"], TimedAnswer)
            self._answers.append(answer)
            if answer.asked_s >= self._begin_s:
                self._count(answer)
        return message

    def _count(self, answer: TimedAnswer) -> None:
        """Count an answer to a question of the measured time."""
        if answer.error:
            self._failed += 1
            self._errors_in_row.append((time.monotonic(), answer.error))
        else:
            self._ended_well += 1
            self._errors_in_row.clear()

    def _send(self, message: dict[str, Any]) -> None:
        for child in self._children:
            with suppress(OSError):  # it has ended; its reader says how
                child.pipe.send(message)

    def close(self) -> None:
        """End the processes; all begin to end at once."""
        for child in self._children:
            child.pipe.close()
        for child in self._children:
            child.stop()
        self._children = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _names(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"device {numbers[0]}"
    return f"devices {numbers[0]} to {numbers[-1]}"


def _ending(child: ChildProcess) -> str:
    """Say how a process ended."""
    try:
        status = child.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    with suppress(ValueError):  # a status of its own, or a signal without a name
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _tokens_between(answers: Iterable[TimedAnswer], begin_s: float, end_s: float) -> int:
    return sum(
        count for answer in answers for at_s, count in answer.arrivals if begin_s <= at_s < end_s
    )
