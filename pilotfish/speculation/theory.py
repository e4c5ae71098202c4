"""Predictions of the papers: acceptance, and tokens of a round.

In:  the target's distribution p and the drafter's q, normalised, f64 [V] ([..., V] where noted).
Out: predicted values to compare with measurements. Symbols and equation numbers follow the paper
`tslt`; docs/papers.md corrects its misprints.

One candidate is accepted with probability β = 1 − TV(p, q). If q is truncated to q̂, β changes by at
most σ, the mass that truncation removes. Of k candidates, the j-th is verified against p⁽ʲ⁾, the
residual of p after j − 1 rejections (`speculation.candidates`). It is accepted with probability
β⁽ʲ⁾ = 1 − TV(p⁽ʲ⁾, q).
"""

import math

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.candidates import residual
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.rows import Row

Values = NDArray[np.float64]


def tv(p: Floats, q: Floats) -> Values:
    """Compute the total variation distance ½ Σ|p − q|, [..., V] → f64 [...] (tslt (16))."""
    distance: Values = np.abs(p - q).sum(axis=-1, dtype=np.float64) / 2
    return distance


def beta(p: Floats, q: Floats) -> Values:
    """Compute the acceptance of one candidate, β = Σ min(p, q) = 1 − TV (tslt (15))."""
    accepted: Values = np.minimum(p, q).sum(axis=-1, dtype=np.float64)
    return accepted


def sigma(q: Floats, ids: NDArray[np.integer] | slice) -> float:
    """Compute σ, the mass of q [V] outside ``ids`` [K]; TV(q̂, q) = σ (tslt (21))."""
    outside = np.ones(len(q), dtype=np.bool_)
    outside[ids] = False
    return float(q[outside].sum(dtype=np.float64))


def residuals(p: Floats, q: Floats, k: int) -> list[Values]:
    """Compute p⁽¹⁾…p⁽ᵏ⁾, f64 [V] each: p⁽¹⁾ = p, p⁽ⁱ⁺¹⁾ = norm(max(0, p⁽ⁱ⁾ − q)) (tslt (25))."""
    chain: list[Values] = [p / p.sum(dtype=np.float64)]
    row = Row(q)
    while len(chain) < k:
        chain.append(residual(chain[-1], row))
    return chain


def betas(p: Floats, q: Floats, k: int) -> Values:
    """Compute β⁽¹⁾…β⁽ᵏ⁾, f64 [k], the acceptance of each candidate (tslt (29)–(31)).

    A value after a β of 1 has no meaning: its candidate is never verified.
    """
    return np.array([float(beta(rest, q)) for rest in residuals(p, q, k)])


def theta(betas: Floats) -> Values:
    """Compute θ, f64 [...]: the probability that one of k candidates is accepted (tslt (39)).

    betas: β⁽¹⁾…β⁽ᵏ⁾, [..., k]. θ = β⁽¹⁾ + Σ β⁽ⁱ⁾ Π_{j<i} (1 − β⁽ʲ⁾) = 1 − Π (1 − β⁽ⁱ⁾).
    """
    rejected: Values = np.prod(1.0 - np.asarray(betas, dtype=np.float64), axis=-1)
    return 1.0 - rejected


def alpha(betas: Floats) -> float:
    """Compute α, the exact mean of θ over n positions, from each position's β⁽¹⁾…β⁽ᵏ⁾ [n, k].

    tslt (7). The paper's (40) only approximates α, by ``theta(betas.mean(0))``.
    """
    return float(theta(betas).mean())


def tokens_per_round(alpha: float, length: int) -> float:
    """Compute the expected tokens of a round with L levels, (1 − α^{L+1}) / (1 − α) (tslt (8)).

    This is 1 + α + … + α^L, so L + 1 at α = 1; it includes the correction or bonus token. The
    formula assumes that each token is accepted with the same α, independently of earlier tokens.
    """
    return math.fsum(alpha**i for i in range(length + 1))
