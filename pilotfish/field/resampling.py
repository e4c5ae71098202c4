"""Intervals of figures over prompts, by drawing the prompts again.

In:  a number of prompts; figures of every draw. Out: how often each prompt counts in a draw; the
     figure with its 95 % interval, a percentile bootstrap (Efron 1979).

The tokens of one answer depend on each other, answers to different prompts do not: so whole prompts
are drawn, and what is compared is drawn with the same ones.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.field.report.statistics import LEVEL

Floats = NDArray[np.float64]

RESAMPLES = 1000
FEWEST = 3  # prompts; fewer say nothing of others
_SEED = 0  # the same answers give the same figures


class Estimate(NamedTuple):
    """A figure and its interval, None without one; value None: nothing was seen of it."""

    value: float | None
    low: float | None = None
    high: float | None = None


def resampled(prompts: int) -> Floats:
    """How often each prompt counts, f64 [1 + resamples, prompts]; the first row: each once."""
    every = np.ones((1, prompts))
    if prompts < FEWEST:
        return every
    rng = np.random.default_rng(_SEED)
    drawn = rng.multinomial(prompts, np.full(prompts, 1.0 / prompts), RESAMPLES)
    return np.concatenate([every, drawn.astype(np.float64)])


def estimate(values: Floats) -> Estimate:
    """Of a figure, f64 [1 + resamples], the first of all prompts; NaN where nothing was seen."""
    first = float(values[0])
    if np.isnan(first):
        return Estimate(None)
    others = values[1:][~np.isnan(values[1:])]
    if len(others) == 0:
        return Estimate(first)
    tail = 50.0 * (1.0 - LEVEL)
    low, high = np.percentile(others, [tail, 100.0 - tail]).tolist()
    return Estimate(first, low, high)
