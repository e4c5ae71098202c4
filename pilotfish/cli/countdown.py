"""The progress of a long command: a bar and the time left on stderr, or lines in a log."""

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from pilotfish.cli.progress import duration

if TYPE_CHECKING:
    from typing_extensions import Self

_LINE_EVERY_S = 20.0
_QUIET_S = 2.0  # time before the first line in a log; shorter work gets none


class Countdown:
    """The progress of ``total`` steps of one kind, and the time left at the present speed.

    Used in a ``with`` block; call `update` after each step. begun: number of steps that an earlier
    run finished; the speed is computed without them. wave: number of steps that run at the same
    time; the speed is unknown until this number of steps is done.
    """

    def __init__(self, label: str, total: int, *, begun: int = 0, wave: int = 1) -> None:
        self.total = total
        self._begun, self._wave = begun, max(1, min(wave, total - begun))
        self._label = label
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn(label),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("", total=total, left="")
        self._begun_s = time.monotonic()
        self._line_s = self._begun_s - _LINE_EVERY_S + _QUIET_S

    def update(self, done: int, left_s: float | None = None) -> None:
        """Show that ``done`` steps are finished. left_s: the caller's estimate of the time left."""
        now_s, steps = time.monotonic(), done - self._begun
        if left_s is None and steps >= self._wave:
            left_s = (now_s - self._begun_s) / steps * (self.total - done)
        left = "" if left_s is None else f"about {duration(left_s)} left"
        self._progress.update(self._task, completed=done, total=self.total, left=left)
        if not self._console.is_terminal and now_s - self._line_s > _LINE_EVERY_S:
            self._line_s = now_s
            self.print_above(
                ", ".join(filter(None, (f"{self._label}: {done} of {self.total}", left)))
            )

    def print_above(self, line: str) -> None:
        """Print a line above the bar, where it stays."""
        self._progress.console.print(line, markup=False)

    def __enter__(self) -> "Self":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
