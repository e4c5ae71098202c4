"""Samples of a quantity over clock time, as arrays: percentiles, and values by span of time.

In: times (Unix seconds) and values. Out: arrays. No function loops over samples.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# name of each percentile: its level (%), and the fewest values that support it, so that at least
# one value is expected above it
PERCENTILES = {"p50": (50.0, 2), "p90": (90.0, 10), "p99": (99.0, 100), "p99.9": (99.9, 1_000)}
_CURVE = 1_000  # points of a distribution's curve, apart from its tail


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of a quantity. unix_s: times, ascending, [samples]. values: [samples]."""

    unix_s: Array
    values: Array

    def __len__(self) -> int:
        return len(self.values)


def samples(unix_s: object, values: object) -> Samples:
    """Return samples in the order of their times."""
    times, numbers = (np.asarray(column, np.float64).reshape(-1) for column in (unix_s, values))
    order = np.argsort(times, kind="stable")
    return Samples(times[order], numbers[order])


def percentiles(values: Array) -> dict[str, float | None]:
    """Compute each of `PERCENTILES`; None if there are too few values for it."""
    supported = {
        name: level for name, (level, fewest) in PERCENTILES.items() if len(values) >= fewest
    }
    known = {name: float(np.percentile(values, level)) for name, level in supported.items()}
    return {name: known.get(name) for name in PERCENTILES}


@dataclass(frozen=True, eq=False)
class Spans:
    """Samples by span of time. Each array has an entry for each span with a sample, [spans].

    first_s, last_s: times of its first and last sample. low, median, high: extremes and median of
    its values.
    """

    first_s: Array
    last_s: Array
    low: Array
    median: Array
    high: Array

    @property
    def unix_s(self) -> Array:
        """The middle between first and last sample, so that no point is in an outage."""
        return 0.5 * (self.first_s + self.last_s)


def by_span(of: Samples, begins_s: Array) -> Spans:
    """Summarise the samples by span of time.

    begins_s: the spans' begins, ascending, [spans]; a sample before the first is of the first span.
    """
    span = np.maximum(np.searchsorted(begins_s, of.unix_s, side="right") - 1, 0)
    order = np.lexsort((of.values, span))
    sorted_span, values = span[order], of.values[order]
    starts = np.flatnonzero(np.diff(sorted_span, prepend=-1))
    ends = np.append(starts[1:], len(values)) - 1
    # times are ascending, so the samples of a span are adjacent, first and last at these indices
    return Spans(
        first_s=of.unix_s[starts],
        last_s=of.unix_s[ends],
        low=values[starts],
        median=0.5 * (values[(starts + ends) // 2] + values[(starts + ends + 1) // 2]),
        high=values[ends],
    )


def breaks(first_s: Array, last_s: Array, longest_s: float, outages: Array) -> NDArray[np.bool_]:
    """Return where a line must break: before each of these points, [points]; False for the first.

    first_s, last_s: times that a point covers, [points]. longest_s: longest time between points
    that a line may join. outages: their begins, ascending, [outages].
    """
    broken = np.zeros(len(first_s), bool)
    if len(first_s) > 1:
        before, after = last_s[:-1], first_s[1:]
        began = np.searchsorted(outages, after) > np.searchsorted(outages, before)
        broken[1:] = (after - before > longest_s) | began
    return broken


def distribution(values: Array) -> tuple[Array, Array]:
    """Return the curve of a distribution: values, ascending, and the % of samples up to each."""
    ordered = np.sort(values)
    share = 100.0 * np.arange(1, len(ordered) + 1) / len(ordered)
    if len(ordered) > 2 * _CURVE:
        tail = np.arange(len(ordered) - _CURVE // 4, len(ordered))
        indices = np.unique(np.append(np.linspace(0, len(ordered) - 1, _CURVE).astype(int), tail))
        return ordered[indices], share[indices]
    return ordered, share
