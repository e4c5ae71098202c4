"""Counter-based randomness: every draw is a function of its name, never of what was drawn before.

A draw is named by (seed, purpose, round start, position or tree node, candidate index), as DESIGN
§7 asks: one draw is never used for two purposes, and a retry or a resumption repeats it. The bits
are raw Philox-4x64 words, whose stream NumPy promises to keep; their transformation is ours, since
NumPy does not promise to keep its distributions.

Counter words, low to high: block, position, round start, candidate · 2³² + purpose. Names therefore
never share a block: a race uses as many low blocks as the vocabulary needs, and the uniforms of one
window use one block per position.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from speculation.distributions import Floats

_KEY = 0x50696C6F74666973  # "Pilotfis": sets our streams apart from other users of the same seed
_WORDS_PER_BLOCK = 4


class Purpose(IntEnum):
    """What a draw is for. The numbers are part of the wire's law: both ends use the same draws."""

    TARGET = 1  # the target's own sample at a position: `stream` and `coupled`
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4
    BONUS = 5
    LOCAL = 6


def _words(
    count: int, seed: int, purpose: Purpose, position: int, round_start: int, candidate: int
) -> NDArray[np.uint64]:
    counter = np.array(
        [0, position, round_start, (candidate << 32) | int(purpose)], dtype=np.uint64
    )
    key = np.array([seed, _KEY], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def race(
    vocab: int,
    seed: int,
    purpose: Purpose,
    position: int,
    *,
    round_start: int = 0,
    candidate: int = 0,
) -> NDArray[np.float64]:
    """One exponential variate per token, float64 [V], all > 0.

    ``argmax(p / race)`` is a sample of p: the Gumbel-max trick without the logarithm of p. 10⁻⁵ of
    noise in the logits almost never changes its outcome, unlike inverse-CDF sampling.
    """
    words = _words((vocab + 1) // 2, seed, purpose, position, round_start, candidate)
    # [V]; "<u4" on both kinds of machine, so that the two ends agree
    halves = words.astype("<u8", copy=False).view("<u4")[:vocab]
    variates = halves.astype(np.float64)
    variates += 0.5
    variates *= -(2.0**-32)
    np.log1p(variates, out=variates)
    np.negative(variates, out=variates)
    return variates


def sample(weights: Floats, variates: NDArray[np.float64]) -> int:
    """The token that wins the race: distributed as ``weights`` [V] normalised."""
    return int(np.argmax(weights / variates))


def uniforms(
    count: int, seed: int, purpose: Purpose, first_position: int, *, round_start: int
) -> NDArray[np.float64]:
    """Uniform variates in the open interval (0, 1), float64 [count], one per window position.

    The block number is the offset in the window, so the whole window costs one call.
    """
    words = _words(count * _WORDS_PER_BLOCK, seed, purpose, first_position, round_start, 0)
    mantissas: NDArray[np.float64] = (words[::_WORDS_PER_BLOCK] >> np.uint64(11)).astype(np.float64)
    mantissas += 0.5
    mantissas *= 2.0**-53
    return mantissas
