"""The result of a check: the largest relative difference of an output row from the reference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Rows = NDArray[np.float32]
Status = Literal["passed", "differs", "failed", "left out", "not there"]


class ComparedRows(NamedTuple):
    """The outputs of a provider and of the reference for the same n tokens, f32 [n, width] each."""

    where: str
    got: Rows
    wanted: Rows


class CheckResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one check of one model on one provider.

    Attributes:
        precision: precision of the artifact.
        dialect: dialect of the artifact.
        reason: why the check failed, was left out, or does not apply to the model.
        difference: relative difference ‖Δ‖/‖wanted‖ of the worst row (the row in which it is
            largest); None if nothing was compared, or if the row has NaN or infinite numbers.
        tolerance: largest value of `difference` with which the check passes.
        largest: largest |Δ| in the worst row.
        where: the worst row, and in it the column of the largest |Δ|.
        seconds: duration of the check.
    """

    provider: str
    model: str
    precision: str
    dialect: str
    check: str
    status: Status
    reason: str = ""
    difference: float | None = None
    tolerance: float | None = None
    largest: float | None = None
    where: str = ""
    seconds: float = 0.0


class Worst(NamedTuple):
    """The row with the largest relative difference."""

    difference: float
    largest: float
    where: str


def worst_row(compared: Iterable[ComparedRows]) -> Worst:
    """Find the row with the largest difference; NaN and infinite numbers count as infinite."""
    result = Worst(0.0, 0.0, "")
    rows = 0
    for where, got, wanted in compared:
        if got.shape != wanted.shape:
            raise ValueError(f"{where}: shape {got.shape} instead of {wanted.shape}")
        delta = np.abs(got.astype(np.float64) - wanted)
        scale = np.linalg.norm(wanted.astype(np.float64), axis=1)
        for row, ratio in enumerate(np.linalg.norm(delta, axis=1) / scale):
            difference = float(ratio) if math.isfinite(ratio) else math.inf
            if not rows or difference > result.difference:
                column = int(np.argmax(delta[row]))
                largest = float(delta[row, column])
                result = Worst(difference, largest, f"{where}, row {row}, column {column}")
            rows += 1
    if not rows:
        raise ValueError("no outputs were compared")
    return result
