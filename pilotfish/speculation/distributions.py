"""Convert logits to the distribution that is sampled: temperature, min-p, top-k, then top-p.

Both ends use these functions, so they define "the target's distribution p" and "the drafter's q".
At temperature 0 the argmax has all the mass; of equal logits, the lowest id has it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]

_COLDEST = 1e-6  # lowest temperature above 0; a lower one would lead to 0/0 in float32

# Number of most probable tokens that `nucleus` sorts first; it sorts all if these are too few.
_NUCLEUS_GUESS = 1024


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of a distribution.

    temperature: 0 (greedy), or 10⁻⁶ to 100. top_k: number of likeliest tokens to keep; 0 keeps all;
    tokens that tie with the k-th are kept. top_p: mass of the nucleus in (0, 1]; the token that
    crosses this mass is kept (tslt (14)). min_p: lowest probability to keep, relative to the
    likeliest token's, in [0, 1].
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not _COLDEST <= self.temperature <= 100.0:
            raise ValueError(
                f"temperature must be 0, or between {_COLDEST:g} and 100, not {self.temperature}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be between 0 and 1, not {self.min_p}")

    @property
    def greedy(self) -> bool:
        """Whether the distribution has all its mass on the argmax."""
        return self.temperature == 0.0


def probabilities(logits: Floats, sampling: Sampling) -> Floats:
    """Compute the distributions [n, V] of ``logits`` [n, V] under ``sampling``; same dtype.

    The sum of each row is 1 up to rounding; verification divides by the sum in float64.
    """
    if sampling.greedy:
        out = np.zeros_like(logits)
        out[np.arange(len(logits)), logits.argmax(axis=1)] = 1.0
        return out
    # [n, V]
    weights: Floats = logits - logits.max(axis=1, keepdims=True)
    weights /= weights.dtype.type(sampling.temperature)
    np.exp(weights, out=weights)
    if sampling.min_p:
        weights[weights < sampling.min_p] = 0.0  # the likeliest token's weight is 1
    if sampling.top_k:
        for row in weights:
            row[row < _kth_largest(row, sampling.top_k)] = 0.0
    if sampling.top_p < 1.0:
        for row in weights:
            row[~nucleus(row, sampling.top_p)] = 0.0
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def mix_logits(logits: Floats, other: Floats) -> Floats:
    """Return logits [n, V] of the even mixture of two distributions, given their logits [n, V].

    Where a row of ``other`` is all −∞, the row of ``logits`` stays.
    """
    out: Floats = logits.copy()
    for at in np.flatnonzero(np.isfinite(other.max(axis=1))):
        out[at] = np.logaddexp(_log_probabilities(logits[at]), _log_probabilities(other[at]))
    return out


def _log_probabilities(logits: Floats) -> Floats:
    """Return the logarithms of a row's probabilities, [V]."""
    above: Floats = logits - logits.max()
    above -= np.log(np.exp(above).sum())
    return above


def _kth_largest(weights: Floats, k: int) -> float:
    """Return the k-th largest of ``weights`` [V] ≥ 0; 0 if fewer than k are above 0."""
    # Zeros are left out, since np.partition takes milliseconds if many values are equal, for
    # example when the drafter's vocabulary lacks many of the target's tokens
    values = weights[weights > 0.0]
    if k > len(values):
        return 0.0
    return float(np.partition(values, len(values) - k)[len(values) - k])


def nucleus(weights: Floats, mass: float) -> NDArray[np.bool_]:
    """Mark the nucleus, bool [V]: the fewest most probable tokens that have the share ``mass``.

    weights [V] need not be normalised. The token that crosses ``mass`` belongs to the nucleus; of
    equal weights, the lower id comes first.
    """
    wanted = mass * weights.sum(dtype=np.float64)
    for size in (_NUCLEUS_GUESS, len(weights)):
        # weight of the size-th token; all tokens of at least this weight are sorted
        edge = _kth_largest(weights, size) if size < len(weights) else 0.0
        # sort the weights alone: token ids only decide between equal weights
        values = np.sort(weights[weights >= edge if edge > 0.0 else weights > 0.0])[::-1]
        running = values.astype(np.float64)
        np.cumsum(running, out=running)
        if edge == 0.0 or running[-1] >= wanted:
            break
    if not len(values):
        return np.zeros(len(weights), np.bool_)
    count = min(int(np.searchsorted(running, wanted)) + 1, len(values))
    marks: NDArray[np.bool_] = weights > values[count - 1]
    ties = np.flatnonzero(weights == values[count - 1])
    marks[ties[: count - np.count_nonzero(marks)]] = True
    return marks
