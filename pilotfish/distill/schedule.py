"""Schedule training: rows and learning rate of a step depend on its number alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from pilotfish.distill.training_rows import TrainingRow

_SORTED = 8  # batches whose rows are sorted by length together, to save padding
_RISE = 0.05  # share of the steps with a rising rate
_LAST = 0.05  # the last rate, as a share of the highest


def steps_of_epoch(rows: int, batch: int) -> int:
    """Count the steps of an epoch, in which each row is read once."""
    return math.ceil(rows / batch)


def rate_at(step: int, total: int, planned: int) -> float:
    """Return the rate as a share of the highest: a linear rise, then a cosine.

    total: steps of the run. planned: steps before a time limit reduced them to ``total``; the rise
    depends on it.
    """
    rise = min(1.0, (step + 1) / max(1.0, _RISE * planned))
    fall = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / total)))
    return rise * (_LAST + (1.0 - _LAST) * fall)


def rows_at(step: int, rows: Sequence[TrainingRow], batch: int, seed: int) -> list[TrainingRow]:
    """Choose the rows of a step; each epoch reads each row once, in its own random order."""
    epoch, batch_index = divmod(step, steps_of_epoch(len(rows), batch))
    draw = random.Random(f"{seed}:{epoch}")
    order = [rows[index] for index in draw.sample(range(len(rows)), len(rows))]
    batches: list[list[TrainingRow]] = []
    for start in range(0, len(order), _SORTED * batch):
        alike = sorted(order[start : start + _SORTED * batch], key=lambda row: len(row.ids))
        batches += [alike[first : first + batch] for first in range(0, len(alike), batch)]
    draw.shuffle(batches)
    return batches[batch_index]
