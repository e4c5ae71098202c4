"""Several targets as one: what each tells of its distributions, and their average (specfed).

In:  logits of M workers over one vocabulary. Out: `TopRows`, each one's K most probable tokens with
     the probabilities p_m that they have among all; of those, and the workers' weights w_m,
     p_agg = Σ w_m p̃_m, as logits that stand for any target's.
Law: p̃_m rebuilds p_m from its retained mass ρ_m = Σ p_m over the kept tokens. ``renormalise`` (5)
     divides by ρ and leaves 0 elsewhere, ‖p̃ − p‖₁ = 2(1 − ρ); ``spread`` (6) keeps p and gives the
     V − K others equal shares of 1 − ρ, which is nearer. The aggregate is off by at most
     2Σw_m(1 − ρ_m) in L1 (17), acceptance by half of that (19). With K = V nothing is rebuilt: what
     went in comes out, bit by bit.

Everything is float32 like the logits that it comes from and becomes: an ensemble of float32 models
has no more digits, and a window over a large vocabulary fills megabytes. Rows of another dtype are
aggregated in theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.speculation.theory import Values, beta, tv
from pilotfish.speculation.truncation import largest

Scheme = Literal["renormalise", "spread"]
SCHEMES: Final[tuple[Scheme, ...]] = ("renormalise", "spread")

_PLAIN: Final = 1.0  # the temperature of an ensemble whose argmax is asked for


@dataclass(frozen=True, eq=False)
class TopRows:
    """A worker's answer: the K most probable of V tokens in each of n distributions.

    ids: u32 [n, K], strictly ascending within a row. values: floats [n, K], their probabilities p
    in the whole distribution, so that a row's sum is its retained mass ρ.
    """

    ids: NDArray[np.uint32]
    values: Floats

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def k(self) -> int:
        """K, of every row."""
        columns: int = self.ids.shape[1]
        return columns

    @property
    def retained_mass(self) -> Values:
        """ρ of each row, f64 [n] (4); above 1 by no more than rounding."""
        mass: Values = self.values.sum(axis=1, dtype=np.float64)
        return mass


def top_rows(logits: Floats, temperature: float, k: int) -> TopRows:
    """A worker's answer: of each row of ``logits`` [n, V] the ``k`` largest, all if k ≥ V.

    Exactly k: of equal ones those of the lowest ids. The temperature rescales each worker's own
    logits before its softmax (§V-B). Temperature 0 stands for 1 here: an ensemble's greedy choice
    is the argmax of the average of its models as they are; an average of argmaxes were a vote.

    Raises:
        ValueError: if a row has a NaN, a positive infinity or nothing finite. −∞ is probability 0.
    """
    rows, vocab = logits.shape
    if not np.isfinite(logits.max(axis=1)).all():
        raise ValueError("The logits have a NaN or an infinity: there is no distribution.")
    p = probabilities(logits, Sampling(temperature=temperature or _PLAIN))
    if k >= vocab:
        return TopRows(np.broadcast_to(np.arange(vocab, dtype=np.uint32), (rows, vocab)), p)
    # [n, K]; by logits, for at low temperatures most probabilities are 0
    ids = np.array([_largest_exactly(row, k) for row in logits], np.int64).reshape(rows, k)
    return TopRows(ids.astype(np.uint32), np.take_along_axis(p, ids, axis=1))


def _largest_exactly(values: Floats, count: int) -> NDArray[np.integer]:
    """Return ids of the ``count`` largest ``values`` [V], ascending; of equal ones the lowest."""
    ids = largest(values, count)
    surplus = len(ids) - count
    if surplus:
        chosen = values[ids]
        ids = np.delete(ids, np.flatnonzero(chosen == chosen.min())[-surplus:])
    return ids


def rebuild(rows: TopRows, vocab: int, scheme: Scheme) -> Floats:
    """Compute p̃ of one worker, [n, V]: (5) or (6)."""
    return aggregate([1.0], [rows], vocab, scheme)


def aggregate(
    weights: Sequence[float] | Values, answers: Sequence[TopRows], vocab: int, scheme: Scheme
) -> Floats:
    """p_agg = Σ w_m p̃_m of M workers' answers for the same n rows, [n, ``vocab``] (7).

    weights: of these workers, above 0; they count by their share in the sum, so leaving out a
    worker renormalises the others. No p̃_m is made: each worker adds at its K tokens what
    they have above the shares that all others get. A row sums to 1 up to rounding.
    """
    shares = np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64)
    dtype = np.result_type(*(rows.values for rows in answers))
    count = len(answers[0])
    # of each worker: what its values are multiplied by, and its other tokens' share, f64 [n]
    scales, fills = zip(*(_rebuild_factors(rows, vocab, scheme) for rows in answers), strict=True)
    total = np.empty((count, vocab), dtype)
    total[:] = (shares @ np.stack(fills))[:, None]
    flat = total.reshape(-1)
    starts = vocab * np.arange(count)[:, None]
    for share, rows, scale, fill in zip(shares, answers, scales, fills, strict=True):
        # [n, K]
        more = rows.values * (share * scale)[:, None].astype(dtype)
        if rows.k == vocab:
            total += more
            continue
        more -= (share * fill)[:, None].astype(dtype)
        places = starts + rows.ids
        more += flat[places]
        # a true top-K is nowhere below its fill; what rounding or a lie puts there stays ≥ 0
        flat[places] = np.maximum(more, 0.0)
    return total


def _rebuild_factors(rows: TopRows, vocab: int, scheme: Scheme) -> tuple[Values, Values]:
    """Return the factor of p on the kept tokens, and p̃ of each other one; both f64 [n]."""
    retained, others = rows.retained_mass, vocab - rows.k
    if not others:
        return np.ones(len(rows)), np.zeros(len(rows))
    if scheme == "renormalise":
        return 1.0 / retained, np.zeros(len(rows))
    return np.ones(len(rows)), np.maximum(1.0 - retained, 0.0) / others


def as_logits(aggregated: Floats, temperature: float) -> NDArray[np.float32]:
    """T·log p_agg, f32 [n, V]; −∞ where p_agg is 0. ``temperature`` is that of `top_rows`.

    The logits of a target whose distribution at this temperature is p_agg: `probabilities` gives it
    back, rows divided by their sums, each p within 2·10⁻⁵ of itself (float32's rounding of log p
    and of its multiples); top-k and top-p of a request then cut the aggregate.
    """
    with np.errstate(divide="ignore"):
        logits = np.log(aggregated.astype(np.float32, copy=False))
    logits *= np.float32(temperature or _PLAIN)
    return logits


# How far off an aggregate is, and how far off it can be


def reconstruction_error(rebuilt: Floats, p: Floats) -> Values:
    """‖p̃ − p‖₁ of distributions [..., V], f64 [...]: of a worker (8), or of aggregates (9)."""
    return 2.0 * tv(rebuilt, p)


def acceptance_variation(rebuilt: Floats, p: Floats, q: Floats) -> Values:
    """|β̃ − β| of drafter q [..., V] against p as rebuilt and as it is, f64 [...] (10)."""
    return np.abs(beta(rebuilt, q) - beta(p, q))


def renormalised_error(retained: Values) -> Values:
    """Lemma 1: renormalising costs ‖p̃ − p‖₁ = 2(1 − ρ), whatever p is (11)."""
    return 2.0 * (1.0 - retained)


def spread_error_bound(retained: Values, others: int) -> Values:
    """Lemma 1: spreading costs less, ‖p̃ − p‖₁ ≤ 2(1 − ρ)(1 − 1/``others``) with V − K others (12).

    The paper's bound is 2(1 − ρ); the factor is reached where one token has all the residual mass.
    """
    return renormalised_error(retained) * (1.0 - 1.0 / others if others else 0.0)


def bias_bound(weights: Sequence[float] | Values, retained: Values) -> Values:
    """Theorem 2: the aggregate is off by 2·Σ w_m(1 − ρ_m) in L1 at most (17).

    weights: [M], by their share in the sum. retained: ρ, [M, ...]; f64 [...].
    """
    shares = np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64)
    bound: Values = np.tensordot(shares, renormalised_error(retained), axes=1)
    return bound


def acceptance_bound(weights: Sequence[float] | Values, retained: Values) -> Values:
    """Theorem 3: acceptance varies by Σ w_m(1 − ρ_m) at most (19), half of (17)."""
    return bias_bound(weights, retained) / 2.0
