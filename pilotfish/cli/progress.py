"""Progress bars on stderr, one per stage of a long command; a line each where nobody looks."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

FETCHING = "fetching the target's vocabulary"


class Bars:
    """``show(label, done, total)`` draws; a new label starts a new bar."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._over = False

    def show(self, label: str, done: int, total: int | None) -> None:
        """Move the bar called ``label`` to ``done`` of ``total``."""
        task = self._tasks.get(label)
        if task is None:
            task = self._tasks[label] = self._progress.add_task(label, total=total)
            if self._over or not self._console.is_terminal:
                self._console.print(f"{label} …", highlight=False)
            else:
                self._progress.start()  # not before there is something to show
        self._progress.update(task, completed=done, total=total)

    def __enter__(self) -> "Bars":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True  # what comes later is told in a line, for others draw now
        if self._tasks:
            self._progress.stop()


def duration(seconds: float) -> str:
    """In words, as exact as one wants to know how long something takes."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
