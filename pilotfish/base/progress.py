"""Show the progress of a long command on stderr: a bar for each stage, or lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

FETCHING = "fetching the target's vocabulary"  # label of a stage of several commands

_LINE_EVERY_S = 20.0  # time between two lines of a stage in a log
_MOST_COUNTED = 10_000  # with more steps (bytes, for example), progress is shown in per cent


class ProgressDisplay:
    """The progress of a command's stages, with the time left; use it in a ``with`` block.

    On a terminal each stage has a bar; a stage of unknown length has it until the next stage
    begins. In a log, and after the block, a stage has a line when it begins, and then a line at
    most every 20 s. Nothing is drawn before the first `show`.

    waves: number of steps that run at the same time, by the label of the stage, if more than one.
    The time left is unknown until that number of steps is done.
    """

    def __init__(self, *, waves: Mapping[str, int] | None = None) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._draws_bars = self._console.is_terminal
        self._waves = waves or {}
        self._stages: dict[str, _Stage] = {}

    def show(self, label: str, done: int, total: int | None, left_s: float | None = None) -> None:
        """Show that ``done`` of ``total`` steps of the stage called ``label`` are finished.

        A new label begins a stage; a smaller ``done`` begins it again. The speed is computed
        without the steps that were done when the stage began. total: None if it is unknown. left_s:
        the caller's estimate of the time left.
        """
        stage = self._stages.get(label) or self._begin(label, total)
        stage.update(done)
        if left_s is None and total is not None:
            left_s = stage.left_s(total, self._waves.get(label, 1))
        count = "" if total is None else _count(done, total)
        left = "" if left_s is None else f"about {_duration(left_s)} left"
        self._progress.update(
            stage.task, completed=done, total=total, count=count, left=left, visible=True
        )
        now_s = time.monotonic()
        if count and not self._draws_bars and now_s - stage.line_s > _LINE_EVERY_S:
            stage.line_s = now_s
            self.print_above(", ".join(filter(None, (f"{label}: {count}", left))))

    def counter(self, label: str, total: int) -> Callable[[int], None]:
        """Begin a stage; return a function that takes the number of steps done so far.

        A stage without steps is not shown.
        """
        if total:
            self.show(label, 0, total)
        return lambda done: self.show(label, done, total)

    def print_above(self, line: str) -> None:
        """Print a line above the bars, where it stays."""
        self._console.print(line, markup=False)

    def _begin(self, label: str, total: int | None) -> _Stage:
        self._hide_unknown()
        task = self._progress.add_task(label, total=total, count="", left="")
        self._stages[label] = stage = _Stage(task, line_s=time.monotonic())
        if self._draws_bars:
            self._progress.start()  # started only now, when there is something to show
        else:
            self.print_above(f"{label} …")
        return stage

    def _hide_unknown(self) -> None:
        """Remove the bars of unknown length, which would never be full."""
        for task in self._progress.tasks:
            if task.total is None:
                self._progress.update(task.id, visible=False)

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stages:  # on a dumb terminal, `stop` would print an empty line without any
            self._hide_unknown()
            self._progress.stop()
        self._draws_bars = False  # a later stage gets lines, since another display may draw bars


@dataclass
class _Stage:
    """A stage. done: number of finished steps; None before `update`.

    begun: number of steps that were done when the stage began, at begun_s (s). line_s: time of its
    last line in a log.
    """

    task: TaskID
    line_s: float
    done: int | None = None
    begun: int = 0
    begun_s: float = 0.0

    def update(self, done: int) -> None:
        """Set the number of finished steps; a smaller one begins the stage again."""
        if self.done is None or done < self.done:
            self.begun, self.begun_s = done, time.monotonic()
        self.done = done

    def left_s(self, total: int, wave: int) -> float | None:
        """Estimate the time left (s) from the speed so far; None if it is unknown."""
        assert self.done is not None
        steps = self.done - self.begun
        if steps < max(1, min(wave, total - self.begun)):
            return None
        return (time.monotonic() - self.begun_s) / steps * (total - self.done)


def _count(done: int, total: int) -> str:
    return f"{done} of {total}" if total < _MOST_COUNTED else f"{100 * done / total:.0f} %"


def _duration(seconds: float) -> str:
    """Format a duration in words, rounded for reading."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
