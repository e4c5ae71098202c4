"""How far a run is: a bar with the time left on stderr; a line now and then where nobody looks."""

import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from field.run import Cell, Configuration
from pilotfish.cli.progress import duration

_LINE_EVERY_S = 20.0


class Countdown:
    """Answers that are to come, and how long they will take if they take as long as those before.

    Enter it, call `done` after each answer; `tell` writes a line that stays.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._total = len(cells)
        self._left = Counter(cell.configuration for cell in cells)
        self._taken: dict[Configuration, list[float]] = {}
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("measuring"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("", total=self._total, left="")
        self._last_s = self._line_s = time.monotonic()

    def done(self, configuration: Configuration) -> None:
        """An answer of this configuration is finished."""
        now_s = time.monotonic()
        self._taken.setdefault(configuration, []).append(now_s - self._last_s)
        self._last_s = now_s
        self._left[configuration] -= 1
        left = f"about {duration(self.left_s())} left"
        self._progress.update(self._task, advance=1, left=left)
        if not self._console.is_terminal and now_s - self._line_s > _LINE_EVERY_S:
            self._line_s = now_s
            self.tell(f"{self._total - self._left.total()} of {self._total} answers, {left}")

    def left_s(self) -> float:
        """Seconds that the answers to come will take; of an untried kind, as many as the others."""
        means = {kind: sum(taken) / len(taken) for kind, taken in self._taken.items()}
        usual = sum(means.values()) / len(means) if means else 0.0
        return sum(count * means.get(kind, usual) for kind, count in self._left.items())

    def tell(self, line: str) -> None:
        """A line above the bar."""
        self._progress.console.print(line, markup=False)

    def __enter__(self) -> "Countdown":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
