"""Statistics of repeated measurements: medians, tails, intervals, acceptance by depth.

In: one number for each of several independent answers; or recorded rounds. Out: statistics with
    intervals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pilotfish.device_runtime.record import Round

FEWEST_VALUES = 20  # minimum number of values for a picture and for the percentiles of a load
RESAMPLES = 2000
LEVEL = 0.95
_Z = 1.959963984540054  # the normal distribution has LEVEL within so many standard deviations
_MANY = 1_000  # values of which a median's interval is computed without resamples
_SEED = 0  # seed of the resamples; it is fixed, so that the same file gives the same report


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median and the 95th percentile of n values, and an interval for the median.

    low, high: 95 % interval of the median, by a percentile bootstrap; None for fewer than 3 values,
    or for values that are not independent.
    """

    n: int
    median: float
    p95: float
    low: float | None
    high: float | None


def spread(values: Sequence[float], *, independent: bool = True) -> Spread | None:
    """Compute the spread of some values; None if there are no values.

    independent: whether the values are independent; otherwise there is no interval. Values of
    rounds of the same answer are not independent.
    """
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    low, high = median_interval(values) if independent and len(values) > 2 else (None, None)
    return Spread(
        n=len(array),
        median=float(np.median(array)),
        p95=float(np.percentile(array, 95)),
        low=low,
        high=high,
    )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Compute a 95 % interval for the median, by a percentile bootstrap (Efron 1979).

    From n values, each resample draws n values with replacement. The interval contains the medians
    of 95 % of the resamples. Of more than `_MANY` values it is the interval that more and more
    resamples approach: a resample's median is below the value of a rank with the probability that
    half of n draws or more are from below this rank, which is nearly normal.
    """
    if len(values) > _MANY:
        ordered, half = np.sort(np.asarray(values, dtype=np.float64)), 0.5 * len(values)
        below = _Z * 0.5 * np.sqrt(len(values))
        return float(ordered[int(half - below)]), float(ordered[int(np.ceil(half + below))])
    drawn = np.random.default_rng(_SEED).choice(
        np.asarray(values, dtype=np.float64), (RESAMPLES, len(values))
    )
    tail = 50.0 * (1.0 - LEVEL)
    low, high = np.percentile(np.median(drawn, axis=1), [tail, 100.0 - tail])
    return float(low), float(high)


@dataclass(frozen=True, kw_only=True)
class PositionCounts:
    """The counts of rounds at one depth of the windows. depth: number of the draft, from 1."""

    depth: int
    drafted: int  # number of rounds that drafted a token at this depth
    reached: int  # number of these rounds that accepted all tokens before this depth
    accepted: int  # number of these rounds that also accepted the token at this depth


def positions(rounds: Sequence[Round]) -> list[PositionCounts]:
    """Count drafted, reached and accepted rounds at each depth (TSLT, definition 2.1).

    accepted/reached is the acceptance α at a depth. accepted/drafted is the share of the windows
    that are accepted up to this depth.
    """
    return [
        PositionCounts(
            depth=depth,
            drafted=sum(r.window >= depth for r in rounds),
            reached=sum(r.window >= depth and r.accepted >= depth - 1 for r in rounds),
            accepted=sum(r.accepted >= depth for r in rounds),
        )
        for depth in range(1, max((r.window for r in rounds), default=0) + 1)
    ]


def share_interval(count: int, of: int) -> tuple[float, float]:
    """Compute a 95 % interval for the share ``count`` / ``of`` (Wilson 1927)."""
    share = count / of
    centre = (share + _Z * _Z / (2 * of)) / (1 + _Z * _Z / of)
    half = _Z * np.sqrt(share * (1 - share) / of + _Z * _Z / (4 * of * of)) / (1 + _Z * _Z / of)
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))
