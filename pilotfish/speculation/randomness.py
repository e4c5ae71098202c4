"""Counter-based randomness: every draw depends only on its name, not on earlier draws.

A draw is named by (seed, purpose, round start, position or tree node, candidate index), as in
docs/wire.md: no draw is used for two purposes, and a retry or a resumption repeats it. The bits
are raw Philox-4x64 words, whose stream NumPy promises to keep; their transformation is ours, since
NumPy does not promise to keep its distributions.

Counter words, low to high: block, position, round start, candidate · 2³² + purpose. Names therefore
never share a block: a race uses as many low blocks as the vocabulary needs, and the uniforms of one
window use one block per candidate.
"""

import math
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.floating] | NDArray[np.integer]

_KEY = 0x50696C6F74666973  # "Pilotfis": sets our streams apart from other users of the same seed
_WORDS_PER_BLOCK = 4


class Purpose(IntEnum):
    """Purpose of a draw. The numbers are part of the wire protocol: both ends use them."""

    TARGET = 1  # the target's sample at a position: `stream` and `coupled`
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4
    BONUS = 5
    LOCAL = 6
    DITHER = 7  # the rounding of P̃ in `dssd`
    CHOICE = 8  # seeds of further answers to one prompt


def _words(
    count: int, seed: int, purpose: Purpose, position: int, round_start: int, candidate: int
) -> NDArray[np.uint64]:
    counter = np.array(
        [0, position, round_start, (candidate << 32) | int(purpose)], dtype=np.uint64
    )
    key = np.array([seed, _KEY], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def derive_seed(seed: int, choice: int) -> int:
    """Derive the seed of one of several answers to a prompt, in [0, 2⁶³).

    seed: the request's, which the first answer uses itself.
    """
    if not choice:
        return seed
    return int(_words(1, seed, Purpose.CHOICE, choice, 0, 0)[0] >> np.uint64(1))


def noise(
    count: int,
    seed: int,
    purpose: Purpose,
    position: int,
    *,
    round_start: int = 0,
    candidate: int = 0,
) -> NDArray[np.uint32]:
    """Generate raw noise for one race: a word per runner, u32 [count]."""
    words = _words((count + 1) // 2, seed, purpose, position, round_start, candidate)
    # "<u4" whatever the byte order of the machine, so that the two ends agree
    return words.astype("<u8", copy=False).view("<u4")[:count]


def exponentials(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Compute exponential variates of raw noise, float64 of the same shape, all > 0."""
    variates = words.astype(np.float64)
    variates += 0.5
    variates *= -(2.0**-32)
    np.log1p(variates, out=variates)
    np.negative(variates, out=variates)
    return variates


def sample(weights: Weights, words: NDArray[np.uint32]) -> int:
    """Return the index that wins the race, argmax(weights / exponentials(words)), both [V].

    It is distributed as the weights normalised: the Gumbel-max trick without the logarithm of the
    weights. 10⁻⁵ of noise in the logits almost never changes its outcome, unlike inverse-CDF
    sampling. Logarithms are taken only of runners that can win: e ≥ (w + ½)/2³², so a runner that
    is below the best so far even with that bound is out.
    """
    bounds = _bounds(weights, words)
    leader = int(bounds.argmax())
    least = _scores(weights, words, np.array([leader]))[0]
    runners = _runners(bounds, least)
    if len(runners) <= 1:
        return leader
    return int(runners[_scores(weights, words, runners).argmax()])


def race(weights: Weights, words: NDArray[np.uint32]) -> tuple[int, float]:
    """Return the winner of the race, as `sample` does, and its lead over the next runner.

    The lead is in log(weight) + Gumbel noise, 0 to infinity.
    """
    bounds = _bounds(weights, words)
    leader = int(bounds.argmax())
    highest, bounds[leader] = bounds[leader], -1.0
    second = int(bounds.argmax())
    if not bounds[second] > 0.0:  # no other can win
        return leader, math.inf
    bounds[leader] = highest
    runners = _runners(bounds, _scores(weights, words, np.array([leader, second])).min())
    scores = _scores(weights, words, runners)
    winner = int(scores.argmax())
    best, scores[winner] = scores[winner], 0.0
    next_best = scores.max()
    return int(runners[winner]), math.log(best / next_best) if next_best > 0.0 else math.inf


def _bounds(weights: Weights, words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Return upper bounds of each runner's score · 2⁻³², up to float32 rounding; [V]."""
    bounds: NDArray[np.float32] = weights.astype(np.float32, copy=False) / (
        words.astype(np.float32) + np.float32(0.5)
    )
    return bounds


def _runners(bounds: NDArray[np.float32], least: float) -> NDArray[np.integer]:
    """Return the runners that may have a score of at least ``least``, ascending."""
    return np.flatnonzero(bounds >= least * 2.0**-32 * (1.0 - 1e-6))


def _scores(
    weights: Weights, words: NDArray[np.uint32], runners: NDArray[np.integer]
) -> NDArray[np.float64]:
    scores: NDArray[np.float64] = weights[runners] / exponentials(words[runners])
    return scores


def uniforms(
    count: int, seed: int, purpose: Purpose, first_position: int, *, round_start: int
) -> NDArray[np.float64]:
    """Generate uniform variates in (0, 1), float64 [count], one per candidate of a window.

    The block number is the candidate's, counted over the window in the order drawn (in a chain its
    offset), so the whole window costs one call.
    """
    words = _words(count * _WORDS_PER_BLOCK, seed, purpose, first_position, round_start, 0)
    mantissas: NDArray[np.float64] = (words[::_WORDS_PER_BLOCK] >> np.uint64(11)).astype(np.float64)
    mantissas += 0.5
    mantissas *= 2.0**-53
    np.minimum(mantissas, 1.0 - 2.0**-53, out=mantissas)  # the highest would round to 1
    return mantissas
