"""Counter-based randomness: every draw depends only on its name, not on earlier draws.

The name of a draw is (seed, purpose, round start, position or tree node, candidate index), as in
docs/wire.md. No draw is used for two purposes, and a retry or a resumption repeats the same draws.
The bits are raw words of Philox-4x64, a stream that NumPy promises never to change. NumPy makes no
promise for its distributions, so the code here transforms the words itself.

The counter's four words, low to high: block, position, round start, candidate · 2³² + purpose. So
different names never share a block. A race uses as many blocks as the vocabulary needs; the
uniform variates of a window use one block per candidate.
"""

import math
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.floating] | NDArray[np.integer]

_KEY = 0x50696C6F74666973  # "Pilotfis": other programs with the same seed get other streams
_WORDS_PER_BLOCK = 4


class Purpose(IntEnum):
    """Purpose of a draw. The numbers are part of the wire protocol, since both ends use them."""

    TARGET = 1  # the target's sample at a position: `stream` and `coupled`
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4
    BONUS = 5
    LOCAL = 6
    DITHER = 7  # rounding of P̃ in protocol `dssd`
    CHOICE = 8  # seeds of the second and further answers to one prompt


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

    seed: the request's seed; the first answer (choice 0) uses it unchanged.
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
    """Generate raw noise for one race: one 32-bit word per token, u32 [count]."""
    words = _words((count + 1) // 2, seed, purpose, position, round_start, candidate)
    # little-endian on every machine, so that the two ends agree
    return words.astype("<u8", copy=False).view("<u4")[:count]


def exponentials(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Convert raw noise to exponential variates, f64 of the same shape, all > 0."""
    variates = words.astype(np.float64)
    variates += 0.5
    variates *= -(2.0**-32)
    np.log1p(variates, out=variates)
    np.negative(variates, out=variates)
    return variates


def sample(weights: Weights, words: NDArray[np.uint32]) -> int:
    """Sample a token from ``weights`` [V]: return argmax(weights / exponentials(words)).

    This race is the Gumbel-max trick without the weights' logarithms: a token wins with probability
    weight / Σ weights. An error of 10⁻⁵ in the logits almost never changes the winner, whereas
    it would change a sample by inverse CDF. words: raw noise, u32 [V]. The exponential variate e of
    a word w is at least (w + ½)/2³²; the exact variates are computed only for tokens that could
    still win by this bound.
    """
    bounds = _bounds(weights, words)
    leader = int(bounds.argmax())
    least = _scores(weights, words, np.array([leader]))[0]
    runners = _runners(bounds, least)
    if len(runners) <= 1:
        return leader
    return int(runners[_scores(weights, words, runners).argmax()])


def race(weights: Weights, words: NDArray[np.uint32]) -> tuple[int, float]:
    """Return the winner of the race, as `sample` does, and its lead over the second token.

    The lead is the difference of their log(weight) + Gumbel noise, 0 to infinity.
    """
    bounds = _bounds(weights, words)
    leader = int(bounds.argmax())
    highest, bounds[leader] = bounds[leader], -1.0
    second = int(bounds.argmax())
    if not bounds[second] > 0.0:  # no second token can have a score above 0
        return leader, math.inf
    bounds[leader] = highest
    runners = _runners(bounds, _scores(weights, words, np.array([leader, second])).min())
    scores = _scores(weights, words, runners)
    winner = int(scores.argmax())
    best, scores[winner] = scores[winner], 0.0
    next_best = scores.max()
    return int(runners[winner]), math.log(best / next_best) if next_best > 0.0 else math.inf


def _bounds(weights: Weights, words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Return an upper bound of each token's score · 2⁻³², up to float32 rounding; [V]."""
    bounds: NDArray[np.float32] = weights.astype(np.float32, copy=False) / (
        words.astype(np.float32) + np.float32(0.5)
    )
    return bounds


def _runners(bounds: NDArray[np.float32], least: float) -> NDArray[np.integer]:
    """Return the tokens that may have a score of at least ``least``, ascending."""
    return np.flatnonzero(bounds >= least * 2.0**-32 * (1.0 - 1e-6))


def _scores(
    weights: Weights, words: NDArray[np.uint32], runners: NDArray[np.integer]
) -> NDArray[np.float64]:
    scores: NDArray[np.float64] = weights[runners] / exponentials(words[runners])
    return scores


def uniforms(
    count: int, seed: int, purpose: Purpose, first_position: int, *, round_start: int
) -> NDArray[np.float64]:
    """Generate uniform variates in (0, 1), f64 [count], one per candidate of a window.

    The number of a candidate's block is its number in the window, in the order of the draws (in a
    chain, its offset). So one call generates the variates of the whole window.
    """
    words = _words(count * _WORDS_PER_BLOCK, seed, purpose, first_position, round_start, 0)
    mantissas: NDArray[np.float64] = (words[::_WORDS_PER_BLOCK] >> np.uint64(11)).astype(np.float64)
    mantissas += 0.5
    mantissas *= 2.0**-53
    np.minimum(mantissas, 1.0 - 2.0**-53, out=mantissas)  # the highest value would round to 1
    return mantissas
