"""Compute intervals over prompts by a percentile bootstrap (Efron 1979).

In:  a number of prompts; a figure for every resample. Out: the weight of each prompt in each
     resample; the figure with its 95 % interval.

The tokens of one answer depend on each other, answers to different prompts do not. So a resample
draws whole prompts, the same ones for all drafters that are compared.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.field.report.statistics import LEVEL

Floats = NDArray[np.float64]

RESAMPLES = 1000
FEWEST = 3  # prompts; fewer give no interval
_SEED = 0  # the same answers give the same figures


class Estimate(NamedTuple):
    """A figure and its interval. low, high: None without an interval. value: None without data."""

    value: float | None
    low: float | None = None
    high: float | None = None


def resample_weights(prompts: int) -> Floats:
    """Return the prompts' weights, f64 [1 + resamples, prompts]; the first row is all ones."""
    every = np.ones((1, prompts))
    if prompts < FEWEST:
        return every
    rng = np.random.default_rng(_SEED)
    drawn = rng.multinomial(prompts, np.full(prompts, 1.0 / prompts), RESAMPLES)
    return np.concatenate([every, drawn.astype(np.float64)])


def estimate(values: Floats) -> Estimate:
    """Estimate a figure from its values f64 [1 + resamples]; the first is over all prompts.

    NaN: the resample had no data.
    """
    first = float(values[0])
    if np.isnan(first):
        return Estimate(None)
    others = values[1:][~np.isnan(values[1:])]
    if len(others) == 0:
        return Estimate(first)
    tail = 50.0 * (1.0 - LEVEL)
    low, high = np.percentile(others, [tail, 100.0 - tail]).tolist()
    return Estimate(first, low, high)
