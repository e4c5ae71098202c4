"""Schedule training: a step's number alone determines its rows and its learning rate."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from pilotfish.lab.distill.training_rows import TrainingRow

_SORTED = 8  # number of batches that are sorted together by row length, which saves padding
_RISE = 0.05  # share of the steps during which the learning rate rises
_LAST = 0.05  # learning rate at the last step, as a share of the highest rate


def steps_of_epoch(rows: int, batch: int) -> int:
    """Compute the number of steps in an epoch; an epoch reads each row once."""
    return math.ceil(rows / batch)


def rate_at(step: int, total: int, planned: int) -> float:
    """Compute a step's learning rate, as a share of the highest: a linear rise, then a cosine.

    total: number of the run's steps. planned: number of steps before a time limit reduced it to
    ``total``; it determines the length of the rise.
    """
    rise = min(1.0, (step + 1) / max(1.0, _RISE * planned))
    fall = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / total)))
    return rise * (_LAST + (1.0 - _LAST) * fall)


def rows_at(step: int, rows: Sequence[TrainingRow], batch: int, seed: int) -> list[TrainingRow]:
    """Return a step's rows. Each epoch has its own random order, and reads each row once."""
    epoch, batch_index = divmod(step, steps_of_epoch(len(rows), batch))
    draw = random.Random(f"{seed}:{epoch}")
    order = [rows[index] for index in draw.sample(range(len(rows)), len(rows))]
    batches: list[list[TrainingRow]] = []
    for start in range(0, len(order), _SORTED * batch):
        alike = sorted(order[start : start + _SORTED * batch], key=lambda row: len(row.ids))
        batches += [alike[first : first + batch] for first in range(0, len(alike), batch)]
    draw.shuffle(batches)
    return batches[batch_index]
