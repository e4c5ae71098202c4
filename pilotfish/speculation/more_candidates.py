"""Forecast the acceptance of k candidates per node from the acceptance of one (tslt §4).

In:  the acceptance α of one candidate, and σ, the mass of q that truncation cuts off.
Out: a forecast of θ, the probability that one of k candidates is accepted.

**Law.** Let the *surplus* E(t) = Σ max(0, p − t·q̂) be the mass of p above t·q̂. The first candidate
is rejected with probability E(1). After i − 1 rejections the residual is p⁽ⁱ⁾ = max(0, p − tᵢ·q̂)
over its sum cᵢ = E(tᵢ), with t₁ = 0 and tᵢ₊₁ = tᵢ + cᵢ. So k candidates are all rejected with
probability 1 − θ = cₖ₊₁ (`theory.theta`, exactly).

**Model.** Candidates never have the tokens that q̂ lacks, so σ of the rejections remain however many
candidates there are. The others shrink as a power of k:

    1 − θ = σ + (1 − α − σ)·k^(−γ),   γ = 0.79·(α/(1 − σ))³

If p/q̂ has a normal distribution with a small deviation, the law gives γ = 0.79 for two candidates.
Pairs that are less alike gain less: where the drafter is wrong, it is wrong with several tokens.
The third power was fitted to pairs of α from 0.4 to 0.97 (docs/link.md, K and expansion).
"""

from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

Value = TypeVar("Value", float, NDArray[np.float64])

_ALIKE: Final = 0.79  # γ of two models that are nearly alike


def acceptance_of(candidates: int, acceptance: Value, sigma: float) -> Value:
    """Forecast θ of this number of candidates; acceptance: α of one, a number or f64 [n].

    θ lies between α and the larger of α and 1 − σ, and rises with the number of candidates.
    """
    if candidates == 1 or sigma >= 1.0:
        return acceptance
    excess = 1.0 - sigma - acceptance  # rejections of tokens that q̂ has
    exponent = -_ALIKE * (acceptance / (1.0 - sigma)) ** 3
    gain: Value = excess * (1.0 - candidates**exponent) * (excess > 0.0)
    return acceptance + gain
