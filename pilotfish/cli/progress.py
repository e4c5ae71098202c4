"""Draw progress bars on a terminal, one per stage of a long command; elsewhere print lines."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

FETCHING = "fetching the target's vocabulary"


class Bars:
    """Progress bars, drawn by ``show(label, done, total)``; a new label starts a new bar."""

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
                self._progress.start()  # started only now, when there is something to show
        self._progress.update(task, completed=done, total=total)

    def __enter__(self) -> "Bars":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True  # a later stage gets a line, since other bars may be drawn then
        if self._tasks:
            self._progress.stop()


def duration(seconds: float) -> str:
    """Format a duration in words, rounded for reading."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
