"""Estimate the time of the remaining answers from earlier ones of the same configuration."""

import time
from collections import Counter
from collections.abc import Sequence

from pilotfish.cli.countdown import Countdown
from pilotfish.field.run import Cell, Configuration


class AnswerCountdown(Countdown):
    """A countdown of answers; call `advance` after each answer."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        super().__init__("measuring, answers", len(cells))
        self._left = Counter(cell.configuration for cell in cells)
        self._taken: dict[Configuration, list[float]] = {}
        self._last_s = time.monotonic()

    def advance(self, configuration: Configuration) -> None:
        """Count a finished answer of this configuration."""
        now_s = time.monotonic()
        self._taken.setdefault(configuration, []).append(now_s - self._last_s)
        self._last_s = now_s
        self._left[configuration] -= 1
        self.update(self.total - self._left.total(), self.left_s())

    def left_s(self) -> float:
        """Estimate the seconds of the remaining answers.

        Configurations without answers count as mean.
        """
        means = {kind: sum(taken) / len(taken) for kind, taken in self._taken.items()}
        usual = sum(means.values()) / len(means) if means else 0.0
        return sum(count * means.get(kind, usual) for kind, count in self._left.items())
