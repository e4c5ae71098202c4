"""Compute confidence intervals by a percentile bootstrap over prompts (Efron 1979).

In:  a number of prompts; a statistic's value for every resample. Out: the weight of each prompt in
    each resample; the statistic with its 95 % interval.

The tokens of one answer depend on each other, but answers to different prompts do not. So a
resample draws whole prompts, and the same prompts for all drafters that are compared.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.lab.statistics import LEVEL

Floats = NDArray[np.float64]

RESAMPLES = 1000
FEWEST = 3  # minimum number of prompts for which an interval is computed
_SEED = 0  # seed of the resamples; it is fixed, so that the same answers give the same results


class Estimate(NamedTuple):
    """A statistic and its 95 % interval from ``low`` to ``high``.

    value: None if there were no data. low, high: None if there is no interval.
    """

    value: float | None
    low: float | None = None
    high: float | None = None


def resample_weights(prompts: int) -> Floats:
    """Draw the prompts' weights in each resample, f64 [1 + resamples, prompts].

    A weight is how often the resample contains the prompt. The first row, all ones, stands for the
    original sample.
    """
    every = np.ones((1, prompts))
    if prompts < FEWEST:
        return every
    rng = np.random.default_rng(_SEED)
    drawn = rng.multinomial(prompts, np.full(prompts, 1.0 / prompts), RESAMPLES)
    return np.concatenate([every, drawn.astype(np.float64)])


def estimate(values: Floats) -> Estimate:
    """Estimate a statistic from its values in all resamples.

    values: f64 [1 + resamples]; the first is over all prompts; NaN if the resample had no data.
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
