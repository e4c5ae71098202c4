"""Sparsify, then sample: the truncated, quantised and renormalised q̂ (tslt §3, corrected).

In:  the drafter's logits and sampling parameters (temperature, min-p, top-k, top-p).
Out: `SparseRows`, the distributions that the drafter samples from and sends. The edge verifies
     with exactly these distributions, so no truncation or quantisation changes the output's law
     (docs/papers.md). They only change acceptance: |β̂ − β| ≤ σ + TV of the quantisation.

Weights are quantised to levels. The row's heaviest token has level 0; a token of level c, at the
depth d(c) octaves below it, has the weight w(c) = ⌊2³¹ · 2^(−d(c)) + ½⌋. The distance between
neighbouring levels is ⅛ octave at the top and doubles every four octaves, up to 1 octave: the
heavy tokens have most of the mass, and the light tokens most of the bytes. A weight is wrong by at
most half a step, a factor of 2^(1/16) = 1.04 for the tokens of the first four octaves.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats, Sampling, nucleus
from pilotfish.speculation.rows import Row

_STEPS_PER_OCTAVE = 8  # the smallest steps
_OCTAVES = 4  # number of octaves after which the distance between levels doubles
_DOUBLINGS = 3  # number of times that it doubles
_DEEPEST = 31  # depth of the last level (octaves): its weight is 1


def _level_depths() -> list[int]:
    """Return the depth of each level in smallest steps."""
    depths, step = [0], 1
    while depths[-1] < _DEEPEST * _STEPS_PER_OCTAVE:
        depths.append(depths[-1] + step)
        step = 1 << min(depths[-1] // (_OCTAVES * _STEPS_PER_OCTAVE), _DOUBLINGS)
    return depths


def _eighth_root(number: int) -> int:
    """Return ⌊number^(1/8)⌋; integer roots are the same on every platform, exp2 might differ."""
    return math.isqrt(math.isqrt(math.isqrt(number)))


_DEPTHS = _level_depths()
MAX_LEVEL = len(_DEPTHS) - 1

# Depth (octaves) and weight of each level, f64 [MAX_LEVEL + 1]; every weight is a whole number.
LEVEL_DEPTHS: NDArray[np.float64] = np.array(_DEPTHS) / _STEPS_PER_OCTAVE
LEVEL_WEIGHTS: NDArray[np.float64] = np.array(
    [float((_eighth_root(1 << 256 - depth) + 1) >> 1) for depth in _DEPTHS]
)

# The borders between levels are multiples of half a smallest step. So the depth in half steps,
# rounded down, determines the nearest level, u8 [cells].
_CELLS_PER_OCTAVE = 2 * _STEPS_PER_OCTAVE
_BORDERS = [above + below for above, below in pairwise(_DEPTHS)]
_CELLS = 3 * _DEPTHS[-1] - _DEPTHS[-2]  # beyond, a token is nearer to a level that does not exist
_NEAREST = np.array([bisect_right(_BORDERS, cell) for cell in range(_CELLS)], np.uint8)
_CELLS_PER_NAT = _CELLS_PER_OCTAVE / math.log(2.0)

# For k < `_MOST_BY_PARTS`, top-k of a large vocabulary first takes the maxima of `_PARTS` parts.
# The k-th largest maximum is a lower bound of the k-th largest value. A part has the ids with the
# same remainder, since likely tokens often have ids close to each other.
_PARTS, _MOST_BY_PARTS = 4096, 1024


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Concatenated rows: n distributions over few tokens each, N tokens in total.

    ids: tokens, strictly ascending within a row, u32 [N]. levels: their levels, u8 [N]; each row
    has a token of level 0. ends: end index of each row, i64 [n].
    """

    ids: NDArray[np.uint32]
    levels: NDArray[np.uint8]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def row(self, index: int) -> Row:
        """Return the distribution of row ``index``."""
        begin = int(self.ends[index - 1]) if index else 0
        place = slice(begin, int(self.ends[index]))
        return Row(LEVEL_WEIGHTS[self.levels[place]], self.ids[place])

    def contains(self, rows: NDArray[np.int64], tokens: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return whether each token u32 [n] occurs in its row (row index i64 [n]), bool [n]."""
        wanted = (rows << 32) + tokens
        inner = np.arange(len(self.ends)).repeat(np.diff(self.ends, prepend=0))
        # i64 [N], ascending, since the ids within a row ascend
        held = (inner << 32) + self.ids
        at = held.searchsorted(wanted)
        present: NDArray[np.bool_] = held.take(at, mode="clip") == wanted
        return present

    @staticmethod
    def join(parts: Sequence["SparseRows"]) -> "SparseRows":
        """Concatenate the rows of all ``parts``, in order."""
        if not parts:
            return SparseRows(np.empty(0, np.uint32), np.empty(0, np.uint8), np.empty(0, np.int64))
        sizes = np.concatenate([np.diff(part.ends, prepend=0) for part in parts])
        return SparseRows(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.levels for part in parts]),
            np.cumsum(sizes),
        )


def truncate(logits: Floats, sampling: Sampling, most: int | None = None) -> SparseRows:
    """Compute q̂ of one row of ``logits`` [V]: truncated like `probabilities`, then quantised.

    most: maximum number of tokens; the likeliest tokens are kept, and lower ids win ties.
    """
    ids = _truncated_ids(logits, sampling)
    if most is not None and len(ids) > most:
        ids = np.sort(ids[np.argsort(-logits[ids], kind="stable")[:most]])
    if sampling.greedy:
        levels = np.zeros(1, np.uint8)
    else:
        # depth below the heaviest token, in cells, [K]
        depth = (logits.max() - logits[ids]).astype(np.float64)
        depth *= _CELLS_PER_NAT / sampling.temperature
        heavy = depth < _CELLS
        ids, levels = ids[heavy], _NEAREST[depth[heavy].astype(np.intp)]
    return SparseRows(ids.astype(np.uint32), levels, np.array([len(ids)]))


def nearest_levels(octaves: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the level nearest to each depth [N] below the heaviest token; at most `MAX_LEVEL`."""
    cells = np.minimum(octaves * _CELLS_PER_OCTAVE, _CELLS - 1)
    levels: NDArray[np.uint8] = _NEAREST[cells.astype(np.intp)]
    return levels


def _truncated_ids(logits: Floats, sampling: Sampling) -> NDArray[np.integer]:
    """Return the ids that truncation keeps, ascending."""
    if sampling.greedy:
        return np.array([logits.argmax()])
    ids = largest(logits, sampling.top_k) if sampling.top_k else np.arange(len(logits))
    if sampling.top_k and len(ids) > sampling.top_k:
        ids = ids[logits[ids] > -math.inf]  # a constrained row may have few finite logits
    if sampling.top_p < 1.0 or sampling.min_p:
        weights = np.exp((logits[ids] - logits.max()) / logits.dtype.type(sampling.temperature))
        heavy = weights >= sampling.min_p
        ids, weights = ids[heavy], weights[heavy]
        if sampling.top_p < 1.0:
            ids = ids[nucleus(weights, sampling.top_p)]
    return ids


def largest(values: Floats, count: int) -> NDArray[np.integer]:
    """Return ids of the ``count`` largest ``values`` [V] and of ties with the last, ascending."""
    size = len(values)
    if count >= size:
        return np.arange(size)
    ids = _candidates(values, count)
    if len(ids) < count:  # the count-th largest value is −∞, so all tokens tie with it or exceed it
        return np.arange(size)
    return _above_last(values, ids, count)


def likeliest(values: Floats, count: int) -> NDArray[np.integer]:
    """Return ids of the ``count`` largest ``values`` [V], the largest first.

    Values of −∞ do not count, so there may be fewer ids. Lower ids come first in ties.
    """
    if not count:
        return np.arange(0)
    ids = _candidates(values, count)
    if len(ids) > count:
        ids = _above_last(values, ids, count)
    return ids[np.argsort(-values[ids], kind="stable")[:count]]


def _candidates(values: Floats, count: int) -> NDArray[np.integer]:
    """Return candidates for the ``count`` largest ``values`` [V], ascending ids.

    They include the ``count`` largest values and any that tie with the last, without values of −∞.
    """
    size = len(values)
    if count >= _MOST_BY_PARTS or size < 8 * _PARTS:
        return np.flatnonzero(values > -math.inf)
    whole = size - size % _PARTS
    # maximum over all ids with the same remainder, [_PARTS]
    maxima = values[:whole].reshape(-1, _PARTS).max(axis=0)
    bound = np.partition(maxima, _PARTS - count)[_PARTS - count]
    places = np.flatnonzero((maxima >= bound) & (maxima > -math.inf))
    if len(places) > _PARTS // 8:
        return np.flatnonzero((values >= bound) & (values > -math.inf))
    inner = (np.arange(0, whole, _PARTS)[:, None] + places).ravel()
    ids = np.concatenate([inner, np.arange(whole, size)])
    candidates = values[ids]
    chosen: NDArray[np.integer] = ids[(candidates >= bound) & (candidates > -math.inf)]
    return chosen


def _above_last(values: Floats, ids: NDArray[np.integer], count: int) -> NDArray[np.integer]:
    """Return the ``ids`` with values of at least the count-th largest; ids: at least ``count``."""
    candidates = values[ids]
    last = np.partition(candidates, len(ids) - count)[len(ids) - count]
    chosen: NDArray[np.integer] = ids[candidates >= last]
    return chosen
