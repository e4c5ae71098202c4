"""Adaptive verification: relax the target's law except at key tokens (decentralized-dsd §2.3).

In:  a chain's tokens, the distribution q̂ that each was drawn from, the target's distribution p at
     each position, and a `Relaxation`.
Out: the number of accepted tokens, the distribution of the next token, the sum of the positions'
     deviations from p, and which of the tokens were key.

A token is *key* if the drafter is much less certain than the target (λ₁), if the two disagree about
this token (λ₂), or if they disagree about the likely tokens (λ₃). A key token is accepted with
probability min(1, p/q̂). Any other token is accepted with probability min(1, p̃/q̂), where p̃ ∝
p^(1−τ)·q̂^τ. After a rejection the next token is sampled from norm(max(0, p − q̂)); after a fully
accepted window, from p. (The paper's line 16 samples p after a rejection, too, which is biased even
at τ = 0.)

The *deviation* of a position is Σ (min(q̂, p̃) − p) over the tokens that are not key and have q̂ >
p. This is the mass accepted beyond p; the residual has less by the same mass. So the deviation is
the total variation between the position's law and p, and acceptance rises by the same amount
(docs/adaptive.md). τ alone does not bound it. The law of a text is a product of conditional laws,
so the expected sum of the deviations bounds the total variation between the laws of whole texts.

q̂ gives mass to few tokens. Over these tokens p̃ is as above, and their total mass P = Σp becomes
P^(1−τ). Equation (8) instead normalises p̃ over these tokens alone. Then p̃ would differ from p by
p's mass on all other tokens, even for a tiny τ (by 0.045 per position on the default pair with 64
tokens). Here p̃ moves from p at τ = 0, the rule of `speculation.candidates`, to q̂ at τ = 1, and a
higher τ accepts no token less often. A token that p excludes, for example by top-k, stays excluded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.candidates import residual
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.rows import Row
from pilotfish.speculation.tree import NumberedCoin, Walk
from pilotfish.speculation.truncation import largest

TOP = 10  # k of NormMatch: number of likeliest tokens of each end that are compared
CERTAIN = 0.01  # ε, nats: lower bound of the target's entropy
HIGHEST_RATIO = 1e6  # highest λ₁; at this value the entropy ratio makes no token key


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """Degree of relaxation, and the thresholds of key tokens (decentralized-dsd (7), (8)).

    tau: τ in [0, 1]; 0 is the strict rule. lambda1, 0 to 10⁶: a token is key if H_d/H_t is higher.
    lambda2, 0 to 1: a token is key if its |p − q̂| is higher. lambda3, 0 to 1: a token is key if
    NormMatch is lower. With λ = 0, 0, 1 nearly all tokens are key; with λ = 10⁶, 1, 0 none is.
    Raises ValueError for values beyond these bounds, or NaN.
    """

    tau: float
    lambda1: float
    lambda2: float
    lambda3: float

    def __post_init__(self) -> None:
        limits = {"tau": 1.0, "lambda1": HIGHEST_RATIO, "lambda2": 1.0, "lambda3": 1.0}
        for name, most in limits.items():
            value = getattr(self, name)
            if not 0.0 <= value <= most:  # false for NaN
                raise ValueError(f"{name} must be between 0 and {most:g}, not {value}")


class TokenRule(NamedTuple):
    """The rule for one drafted token.

    acceptance: probability of accepting it. deviation: the position's total variation from p. key:
    whether it is a key token.
    """

    acceptance: float
    deviation: float
    key: bool


class RelaxedWalk(NamedTuple):
    """The result of `verify`.

    deviation: sum over the verified positions. key: whether each verified token is key.
    """

    walk: Walk
    deviation: float
    key: list[bool]


@dataclass(frozen=True, eq=False)
class DistributionComparison:
    """Comparison of target and drafter at one position, over the tokens [K] of q̂.

    p: the target's distribution [V]; its sum is 1 up to rounding. row: the drafter's q̂.
    """

    p: Floats
    row: Row

    @cached_property
    def drafter(self) -> NDArray[np.float64]:
        """q̂ of each of its tokens, f64 [K]."""
        return self.row.probabilities()

    @cached_property
    def target(self) -> NDArray[np.float64]:
        """p of the tokens of q̂, f64 [K], normalised by the float64 sum over all V tokens."""
        shares: NDArray[np.float64] = self.p[self.row.support] / self.p.sum(dtype=np.float64)
        return shares

    @cached_property
    def entropy_ratio(self) -> float:
        """H_d/H_t, drafter's entropy over target's entropy; H_t is at least `CERTAIN`."""
        return entropy(self.drafter) / max(entropy(self.p), CERTAIN)

    @cached_property
    def norm_match(self) -> float:
        """Share of likeliest tokens that both ends have, in [0, 1].

        Each end has its `TOP` likeliest tokens and any that tie with the last of them; an end with
        fewer tokens has all of them. The share is relative to the end with fewer.
        """
        ours, theirs = likeliest(self.p), likeliest(self.drafter)
        if self.row.ids is not None:
            theirs = self.row.ids[theirs]
        common = np.intersect1d(ours, theirs, assume_unique=True)
        return len(common) / min(len(ours), len(theirs))

    @cached_property
    def gap(self) -> NDArray[np.float64]:
        """|p − q̂| of each token of q̂, f64 [K]."""
        gaps: NDArray[np.float64] = np.abs(self.target - self.drafter)
        return gaps

    def strict_mass(self) -> NDArray[np.float64]:
        """Return each token's accepted mass under the strict rule: min(q̂, p), f64 [K]."""
        mass: NDArray[np.float64] = np.minimum(self.drafter, self.target)
        return mass

    def softened_mass(self, tau: float) -> NDArray[np.float64]:
        """Return each token's accepted mass under the relaxed rule: min(q̂, p̃), f64 [K].

        It is at least `strict_mass`: where q̂ > p, p̃ is at least p (Hölder), and max(p, p̃) keeps
        this true in spite of rounding.
        """
        if tau == 0.0:
            return self.strict_mass()
        weights = np.where(self.target > 0.0, self.target ** (1.0 - tau) * self.drafter**tau, 0.0)
        if not weights.any():  # the two have no token in common
            return self.strict_mass()
        weights *= self.target.sum() ** (1.0 - tau) / weights.sum()
        mass: NDArray[np.float64] = np.minimum(self.drafter, np.maximum(self.target, weights))
        return mass

    def key_tokens(self, relaxation: Relaxation) -> NDArray[np.bool_]:
        """Mark the key tokens, bool [K] (decentralized-dsd (7))."""
        everywhere = self.entropy_ratio > relaxation.lambda1 or self.norm_match < relaxation.lambda3
        marks: NDArray[np.bool_] = (self.gap > relaxation.lambda2) | everywhere
        return marks

    def accepted_mass(self, relaxation: Relaxation) -> NDArray[np.float64]:
        """Return each token's accepted mass, f64 [K]; mass / q̂ is its acceptance probability."""
        if relaxation.tau == 0.0:
            return self.strict_mass()
        return np.where(
            self.key_tokens(relaxation), self.strict_mass(), self.softened_mass(relaxation.tau)
        )

    def deviation(self, accepted: NDArray[np.float64]) -> float:
        """Return the total variation between the position's law and p, in [0, 1].

        accepted: the accepted mass of each token, f64 [K].
        """
        return min(1.0, float((accepted - self.strict_mass()).sum()))

    def rule(self, token: int, relaxation: Relaxation) -> TokenRule:
        """Return the rule for a token that was drawn from the row."""
        accepted = self.accepted_mass(relaxation)
        at = self.row.index(token)
        assert at is not None
        return TokenRule(
            float(accepted[at]) / float(self.drafter[at]),
            self.deviation(accepted),
            bool(self.key_tokens(relaxation)[at]),
        )

    def residual(self) -> NDArray[np.float64]:
        """Return the distribution of the next token after a rejection, f64 [V]."""
        return residual(self.p / self.p.sum(dtype=np.float64), self.row)


def verify(
    ids: Sequence[int] | NDArray[np.uint32],
    q: Callable[[int], Row],
    p: Callable[[int], Floats],
    coin: NumberedCoin,
    relaxation: Relaxation,
) -> RelaxedWalk:
    """Accept tokens [γ] of a chain up to the first rejection; sum the positions' deviations.

    q, p: functions of the position, 0 to γ − 1; p [V] also for position γ, after the window. They
    are called only up to the first rejection. coin: function of a position and a probability;
    returns whether the event happened.
    """
    deviation, key = 0.0, []
    for index, token in enumerate(ids):
        comparison = DistributionComparison(p(index), q(index))
        rule = comparison.rule(int(token), relaxation)
        deviation += rule.deviation
        key.append(rule.key)
        if not coin(index, rule.acceptance):
            return RelaxedWalk(Walk(index, comparison.residual(), rejected=True), deviation, key)
    return RelaxedWalk(Walk(len(ids), p(len(ids)), rejected=False), deviation, key)


def entropy(p: Floats) -> float:
    """Compute −Σ p·ln p of a distribution, in nats; at least 0."""
    # in place, since a second array [V] costs more time than the logarithms
    terms = np.maximum(p, np.finfo(p.dtype).tiny)
    np.log(terms, out=terms)
    terms *= p
    return max(0.0, -float(terms.sum(dtype=np.float64)))


def likeliest(weights: Floats) -> NDArray[np.integer]:
    """Return indices of the `TOP` largest ``weights`` above 0, and of ties with the last."""
    return largest(weights, min(TOP, int(np.count_nonzero(weights))))
