"""Verify the candidates that were drawn for one position (tslt Algorithms 3 and 5).

Words: the *candidates* x⁽¹⁾…x⁽ᵏ⁾ were drawn independently from q. They are verified in the order
drawn, equal ones included: x⁽ⁱ⁾ is accepted with probability min(1, p⁽ⁱ⁾(x)/q(x)), where p⁽¹⁾ = p
and p⁽ⁱ⁺¹⁾ = norm(max(0, p⁽ⁱ⁾ − q)) is the *residual* after the i-th rejection. When none is
accepted, a sample of p⁽ᵏ⁺¹⁾ follows. The resulting token then follows p exactly, whatever q. (The
ratio as printed is upside down; sorting or deduplicating candidates biases: docs/papers.md.)

``coin`` takes a probability and returns whether the event happened, so that tests can enumerate the
production code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.rows import Row

Coin = Callable[[float], bool]


@dataclass(frozen=True, eq=False)
class CandidateOutcome:
    """The outcome for a position's candidates.

    accepted: index of the accepted candidate, or None. residual: f64 [V], normalised distribution
    to sample from if none was accepted, else None.
    """

    accepted: int | None
    residual: NDArray[np.float64] | None


def choose(candidates: Sequence[int], q: Row, p: Floats, coin: Coin) -> CandidateOutcome:
    """Verify the candidates [k] in order. p [V] sums to 1 up to rounding."""
    # f64 [V], the present residual
    rest: NDArray[np.float64] = p / p.sum(dtype=np.float64)
    for index, token in enumerate(candidates):
        if coin(min(1.0, float(rest[token]) / q.probability(token))):
            return CandidateOutcome(index, None)
        rest = residual(rest, q)
    return CandidateOutcome(None, rest)


def residual(p: NDArray[np.float64], q: Row) -> NDArray[np.float64]:
    """Compute norm(max(0, p − q)) of a normalised p [V].

    If p ≤ q everywhere, the candidate was certain to be accepted and only rounding leads here; the
    result is then p.
    """
    rest = p.copy()
    rest[q.support] -= q.probabilities()
    np.maximum(rest, 0.0, out=rest)
    mass = rest.sum()
    if mass > 0.0:
        normalised: NDArray[np.float64] = rest / mass
        return normalised
    return p
