"""What a step of training does, by its number alone: which rows it reads, and at which rate."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from pilotfish.distill.training_rows import TrainingRow

_SORTED = 8  # batches whose rows are sorted by length together, so that little is padding
_RISE = 0.05  # of the steps
_LAST = 0.05  # of the highest rate, at the end


def steps_of_epoch(rows: int, batch: int) -> int:
    """Count the steps in which each of the rows is read once."""
    return math.ceil(rows / batch)


def rate_at(step: int, total: int, planned: int) -> float:
    """Return the rate as a share of the highest: a rise, then a cosine.

    planned: the steps before a limit of time made them ``total``; the rise is over by then.
    """
    rise = min(1.0, (step + 1) / max(1.0, _RISE * planned))
    fall = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / total)))
    return rise * (_LAST + (1.0 - _LAST) * fall)


def rows_at(step: int, rows: Sequence[TrainingRow], batch: int, seed: int) -> list[TrainingRow]:
    """Choose the rows of a step; each epoch reads each row once, in an order of its own."""
    epoch, at = divmod(step, steps_of_epoch(len(rows), batch))
    draw = random.Random(f"{seed}:{epoch}")
    order = [rows[index] for index in draw.sample(range(len(rows)), len(rows))]
    batches: list[list[TrainingRow]] = []
    for start in range(0, len(order), _SORTED * batch):
        alike = sorted(order[start : start + _SORTED * batch], key=lambda row: len(row.ids))
        batches += [alike[first : first + batch] for first in range(0, len(alike), batch)]
    draw.shuffle(batches)
    return batches[at]
