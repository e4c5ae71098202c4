"""Adaptive verification: relax the target's law except at key tokens (decentralized-dsd §2.3).

In: a chain's tokens, each with the q̂ that it was drawn from; the target's p there; a `Relaxation`.
Out: the number of accepted tokens, the distribution of the next one, and the distance of each
checked position's law from p.

A token is *key* if the drafter is much less certain than the target (λ₁), if the two disagree about
the token itself (λ₂), or about the likely tokens (λ₃). Key tokens are accepted by min(1, p/q̂),
others by min(1, p̃/q̂) with p̃ ∝ p^(1−τ)·q̂^τ. After any rejection norm(max(0, p − q̂)) is sampled,
after a whole window p (the paper's line 16, p after a rejection too, is biased even at τ = 0).

The *deviation* of a position is Σ (min(q̂, p̃) − p) over the tokens that are not key and have q̂ >
p. That is the mass accepted beyond p, and the residual lacks as much: it is the total variation
between the position's law and p, and acceptance rises by just as much (docs/adaptive.md). τ alone
does not bound it. The expected sum over a text's positions bounds the total variation between the
laws of whole texts, since these are products of conditional laws.

q̂ has few tokens. Over these p̃ is as above, and their total mass is softened likewise, to
p(those)^(1−τ). Normalised over them alone, as (8) reads, p̃ would leave p by all of p's mass
elsewhere as soon as τ is not 0, by 0.045 a position on the default pair with 64 tokens. So p̃ moves
from p at τ = 0, the rule of `speculation.candidates`, to q̂ at τ = 1, and no token is accepted less
often as τ rises. A token that p excludes, as by top-k, stays excluded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.candidates import residual
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.rows import Row
from pilotfish.speculation.tree import NumberedCoin, Walk
from pilotfish.speculation.truncation import largest

TOP = 10  # k of NormMatch: likeliest tokens of each end that are compared
CERTAIN = 0.01  # ε, nats: lower bound of the target's entropy
HIGHEST_RATIO = 1e6  # λ₁ at which its clause has no effect


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """How much the rule is relaxed, and which tokens are key (decentralized-dsd (7), (8)).

    tau: τ in [0, 1]; 0 is strict. lambda1: a token is key above this H_d/H_t, 0 to 10⁶. lambda2:
    above this |p − q̂| of the token, 0 to 1. lambda3: below this NormMatch, 0 to 1. So 0, 0, 1 make
    nearly all tokens key, and 10⁶, 1, 0 none. Raises ValueError for values beyond these bounds, or
    NaN.
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
                raise ValueError(f"{name} must be within 0 and {most:g}, not {value}")


@dataclass(frozen=True, eq=False)
class DistributionComparison:
    """Target and drafter at one position, compared over the tokens [K] of q̂.

    p: [V], sums to 1 up to rounding. row: q̂.
    """

    p: Floats
    row: Row

    @cached_property
    def drafter(self) -> NDArray[np.float64]:
        """q̂ of its tokens, f64 [K]."""
        return self.row.probabilities()

    @cached_property
    def target(self) -> NDArray[np.float64]:
        """p of the same tokens, f64 [K], divided by the float64 sum over all tokens."""
        shares: NDArray[np.float64] = self.p[self.row.support] / self.p.sum(dtype=np.float64)
        return shares

    @cached_property
    def entropy_ratio(self) -> float:
        """H_d/H_t of the two predictive distributions, H_t being at least `CERTAIN`."""
        return entropy(self.drafter) / max(entropy(self.p), CERTAIN)

    @cached_property
    def norm_match(self) -> float:
        """Overlap of both ends' `TOP` likeliest tokens, over the fewer of both; [0, 1].

        Ties with the last one count, too; an end with fewer tokens uses all of them.
        """
        ours, theirs = likeliest(self.p), likeliest(self.drafter)
        if self.row.ids is not None:
            theirs = self.row.ids[theirs]
        common = np.intersect1d(ours, theirs, assume_unique=True)
        return len(common) / min(len(ours), len(theirs))

    @cached_property
    def gap(self) -> NDArray[np.float64]:
        """|p − q̂| of each token, f64 [K]."""
        gaps: NDArray[np.float64] = np.abs(self.target - self.drafter)
        return gaps

    def strict_mass(self) -> NDArray[np.float64]:
        """Accepted mass of each token against p: min(q̂, p), f64 [K]."""
        mass: NDArray[np.float64] = np.minimum(self.drafter, self.target)
        return mass

    def softened_mass(self, tau: float) -> NDArray[np.float64]:
        """Accepted mass of each token against p̃, f64 [K]: min(q̂, p̃), at least `strict`.

        Where q̂ > p, p̃ is no less than p (Hölder); max(p, p̃) ensures it in spite of rounding.
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
        """Accepted mass of each token, f64 [K]; divided by q̂ it is the probability."""
        if relaxation.tau == 0.0:
            return self.strict_mass()
        return np.where(
            self.key_tokens(relaxation), self.strict_mass(), self.softened_mass(relaxation.tau)
        )

    def deviation(self, accepted: NDArray[np.float64]) -> float:
        """Total variation of the position's law from p for this accepted mass, in [0, 1]."""
        return min(1.0, float((accepted - self.strict_mass()).sum()))


def verify(
    ids: Sequence[int] | NDArray[np.uint32],
    q: Callable[[int], Row],
    p: Callable[[int], Floats],
    coin: NumberedCoin,
    relaxation: Relaxation,
) -> tuple[Walk, float]:
    """Accept tokens [γ] of a chain up to the first rejection; sum the positions' deviations.

    q, p: functions of the position, p also of the one after the last, [V]; called only as far as
    needed. coin: returns whether an event of given probability happened at a position.
    """
    deviation = 0.0
    for index, token in enumerate(ids):
        comparison = DistributionComparison(p(index), q(index))
        accepted = comparison.accepted_mass(relaxation)
        deviation += comparison.deviation(accepted)
        at = comparison.row.index(int(token))
        assert at is not None  # the token was drawn from this row
        if not coin(index, float(accepted[at]) / float(comparison.drafter[at])):
            rest = residual(comparison.p / comparison.p.sum(dtype=np.float64), comparison.row)
            return Walk(index, rest, rejected=True), deviation
    return Walk(len(ids), p(len(ids)), rejected=False), deviation


def entropy(p: Floats) -> float:
    """Compute −Σ p·ln p of a distribution, in nats; at least 0."""
    # in place: a second array of vocabulary size costs more than the logarithms
    terms = np.maximum(p, np.finfo(p.dtype).tiny)
    np.log(terms, out=terms)
    terms *= p
    return max(0.0, -float(terms.sum(dtype=np.float64)))


def likeliest(weights: Floats) -> NDArray[np.integer]:
    """Return indices of the `TOP` largest ``weights`` above 0, with ties of the last."""
    return largest(weights, min(TOP, int(np.count_nonzero(weights))))
