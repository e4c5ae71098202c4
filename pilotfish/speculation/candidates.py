"""Verify the candidates that were drawn for one position (tslt Algorithms 3 and 5).

The *candidates* x⁽¹⁾…x⁽ᵏ⁾ were drawn independently from q. They are verified in the order of the
draws, also those that equal an earlier candidate. x⁽ⁱ⁾ is accepted with probability min(1,
p⁽ⁱ⁾(x)/q(x)), where p⁽¹⁾ = p and p⁽ⁱ⁺¹⁾ = norm(max(0, p⁽ⁱ⁾ − q)) is the *residual* after the i-th
rejection. If none is accepted, the token is sampled from p⁽ᵏ⁺¹⁾. The resulting token then has
exactly the law p, for every q. (The paper prints the ratio upside down. Sorting or deduplicating
the candidates would bias the law: docs/papers.md.)

A ``coin`` takes a probability and returns whether the event happened; a test's coin enumerates both
outcomes.
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
    """Outcome of the verification of one position's candidates.

    accepted: index of the accepted candidate, or None. residual: the normalised distribution to
    sample from if no candidate was accepted, f64 [V]; else None.
    """

    accepted: int | None
    residual: NDArray[np.float64] | None


def choose(candidates: Sequence[int], q: Row, p: Floats, coin: Coin) -> CandidateOutcome:
    """Verify the candidates [k] in order; the sum of p [V] is 1 up to rounding."""
    # the residual after the candidates so far, f64 [V]
    rest: NDArray[np.float64] = p / p.sum(dtype=np.float64)
    for index, token in enumerate(candidates):
        if coin(min(1.0, float(rest[token]) / q.probability(token))):
            return CandidateOutcome(index, None)
        rest = residual(rest, q)
    return CandidateOutcome(None, rest)


def residual(p: NDArray[np.float64], q: Row) -> NDArray[np.float64]:
    """Compute norm(max(0, p − q)) of a normalised p [V].

    If p ≤ q everywhere, the result is p. A candidate was then certain to be accepted, so only
    rounding can have rejected it.
    """
    rest = p.copy()
    rest[q.support] -= q.probabilities()
    np.maximum(rest, 0.0, out=rest)
    mass = rest.sum()
    if mass > 0.0:
        normalised: NDArray[np.float64] = rest / mass
        return normalised
    return p
