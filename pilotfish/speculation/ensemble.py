"""Average the distributions of several targets, of which only the top K tokens are known (specfed).

In:  logits of M workers over one vocabulary, and the workers' weights w_m.
Out: `TopRows`, each worker's K most probable tokens with their probabilities p_m; and the aggregate
     p_agg = Σ w_m p̃_m, as logits in the form of any target's.
Law: p̃_m is p_m rebuilt from the K tokens, which have the retained mass ρ_m. ``renormalise`` (5)
     divides p_m by ρ_m on these tokens and is 0 elsewhere; its error is ‖p̃ − p‖₁ = 2(1 − ρ).
     ``spread`` (6) keeps p_m and gives the other V − K tokens equal shares of 1 − ρ_m; its error is
     smaller, but samples from it are with a probability of Σw_m(1 − ρ_m) tokens that no worker
     chose (`acceptance_bound`). The error of p_agg is at most 2Σw_m(1 − ρ_m) in L1 (17); the error
     of acceptance is at most half of that (19). With K = V nothing is rebuilt, and p_agg is exact
     in every bit. Under a grammar p_m is the distribution of worker m's masked logits, V the number
     of allowed tokens, and p̃_m is 0 for all others.

All values are float32, like the logits: an ensemble of float32 models has no more digits, and a
window over a large vocabulary takes megabytes. Rows of another dtype are aggregated in that dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.speculation.masks import Masks
from pilotfish.speculation.theory import Values, beta, tv
from pilotfish.speculation.truncation import largest

Scheme = Literal["renormalise", "spread"]
SCHEMES: Final[tuple[Scheme, ...]] = ("renormalise", "spread")

_PLAIN: Final = 1.0  # temperature at which an ensemble averages if sampling is greedy


@dataclass(frozen=True, eq=False)
class TopRows:
    """A worker's answer: the K most probable of V tokens in each of n distributions.

    ids: the tokens, strictly ascending within a row, u32 [n, K]. values: their probabilities in the
    distribution over all V tokens, floats [n, K]; a row's sum is its retained mass ρ.
    """

    ids: NDArray[np.uint32]
    values: Floats

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def k(self) -> int:
        """K, the number of tokens in each row."""
        columns: int = self.ids.shape[1]
        return columns

    @property
    def retained_mass(self) -> Values:
        """The retained mass ρ of each row, f64 [n] (4); at most 1 up to rounding."""
        mass: Values = self.values.sum(axis=1, dtype=np.float64)
        return mass


def top_rows(logits: Floats, temperature: float, k: int) -> TopRows:
    """Return a worker's answer: the ``k`` largest of each row of ``logits`` [n, V], all if k ≥ V.

    Each row has exactly k tokens; the lower id wins a tie. The temperature rescales each worker's
    logits before its softmax (§V-B). Temperature 0 counts as 1 here: the greedy choice of an
    ensemble is the argmax of the average distribution, whereas an average of argmaxes would be a
    vote.

    Raises:
        ValueError: if a row has a NaN, a +∞ or no finite value. A −∞ stands for probability 0.
    """
    rows, vocab = logits.shape
    if not np.isfinite(logits.max(axis=1)).all():
        raise ValueError("The logits have a NaN or an infinity: there is no distribution.")
    p = probabilities(logits, Sampling(temperature=temperature or _PLAIN))
    if k >= vocab:
        return TopRows(np.broadcast_to(np.arange(vocab, dtype=np.uint32), (rows, vocab)), p)
    # ids [n, K] by logits, since many probabilities are 0 at a low temperature
    ids = np.array([_largest_exactly(row, k) for row in logits], np.int64).reshape(rows, k)
    return TopRows(ids.astype(np.uint32), np.take_along_axis(p, ids, axis=1))


def top_rows_by_mass(logits: Floats, temperature: float, mass: float, most: int) -> list[TopRows]:
    """Return `top_rows` of each row of ``logits`` [n, V], with the smallest K that retains a mass.

    mass: smallest ρ, below 1. most: upper limit of K; a row that needs more tokens has K = most.
    Raises `ValueError` as `top_rows`.
    """
    answers = []
    for row in logits:
        whole = top_rows(row[None], temperature, most)
        sums = np.cumsum(np.sort(whole.values[0].astype(np.float64))[::-1])
        k = min(int(np.searchsorted(sums, mass)) + 1, whole.k)
        answers.append(whole if k == whole.k else top_rows(row[None], temperature, k))
    return answers


def _largest_exactly(values: Floats, count: int) -> NDArray[np.integer]:
    """Return the ids of the ``count`` largest ``values`` [V], ascending; lower ids win ties."""
    ids = largest(values, count)
    surplus = len(ids) - count
    if surplus:
        chosen = values[ids]
        ids = np.delete(ids, np.flatnonzero(chosen == chosen.min())[-surplus:])
    return ids


def restrict(rows: TopRows, masks: Masks) -> TopRows:
    """Set the values of forbidden tokens to 0: a format may round 0 up, and a worker may lie."""
    values: Floats = rows.values * masks.allows(rows.ids)
    return TopRows(rows.ids, values)


def rebuild(rows: TopRows, vocab: int, scheme: Scheme) -> Floats:
    """Compute one worker's rebuilt distributions p̃, [n, V], by equation (5) or (6)."""
    return aggregate([1.0], [rows], vocab, scheme)


def aggregate(
    weights: Sequence[float] | Values,
    answers: Sequence[TopRows],
    vocab: int,
    scheme: Scheme,
    masks: Masks | None = None,
) -> Floats:
    """Compute p_agg = Σ w_m p̃_m of M workers' answers for the same n rows, [n, ``vocab``] (7).

    weights: w_m > 0; the function normalises them, so a worker may be left out. Each row's sum is 1
    up to rounding. No p̃_m is built in full: all V tokens first get the share of a token outside
    the top K, and each worker then adds the difference at its K tokens. masks: the tokens that the
    n rows allow; the answers are those of masked logits (`restrict`), and only allowed tokens share
    what a worker left out.
    """
    shares = np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64)
    dtype = np.result_type(*(rows.values for rows in answers))
    count = len(answers[0])
    # for each worker, f64 [n]: the factor by which its K values are multiplied, and p̃ of each
    # token outside its top K
    scales, fills = zip(
        *(_rebuild_factors(rows, _others(rows, vocab, masks), scheme) for rows in answers),
        strict=True,
    )
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
        # a true top K has no value below ``fill``; rounding or a false answer must not fall below 0
        flat[places] = np.maximum(more, 0.0)
    if masks is not None:
        total[~masks.unpack()] = 0.0
    return total


def _others(rows: TopRows, vocab: int, masks: Masks | None) -> NDArray[np.int64]:
    """Count the allowed tokens outside each row's top K, i64 [n]."""
    if masks is None:
        return np.full(len(rows), vocab - rows.k)
    others: NDArray[np.int64] = masks.counts() - masks.allows(rows.ids).sum(axis=1)
    return others


def _rebuild_factors(
    rows: TopRows, others: NDArray[np.int64], scheme: Scheme
) -> tuple[Values, Values]:
    """Return the factor by which K values are multiplied, and p̃ of other tokens; f64 [n] each.

    A row without other tokens stays as it is.
    """
    retained, whole = rows.retained_mass, others == 0
    if scheme == "renormalise":
        return 1.0 / np.where(whole, 1.0, retained), np.zeros(len(rows))
    left_out = np.where(whole, 0.0, np.maximum(1.0 - retained, 0.0))
    return np.ones(len(rows)), left_out / np.maximum(others, 1)


def as_logits(aggregated: Floats, temperature: float) -> NDArray[np.float32]:
    """Compute T·log p_agg, f32 [n, V]; −∞ where p_agg is 0. temperature: as in `top_rows`.

    A target with these logits has the distribution p_agg at this temperature: `probabilities`
    returns each p within a relative error of 2·10⁻⁵ (float32 rounding of log p and its multiples).
    A request's top-k and top-p then truncate the aggregate.
    """
    with np.errstate(divide="ignore"):
        logits = np.log(aggregated.astype(np.float32, copy=False))
    logits *= np.float32(temperature or _PLAIN)
    return logits


# Errors of an aggregate, and their bounds


def reconstruction_error(rebuilt: Floats, p: Floats) -> Values:
    """Compute ‖p̃ − p‖₁ of distributions [..., V], f64 [...]: of a worker (8) or of p_agg (9)."""
    return 2.0 * tv(rebuilt, p)


def acceptance_variation(rebuilt: Floats, p: Floats, q: Floats) -> Values:
    """Compute |β̃ − β|, f64 [...]: a drafter q's change of acceptance by the rebuilt p̃ (10).

    rebuilt, p, q: [..., V].
    """
    return np.abs(beta(rebuilt, q) - beta(p, q))


def renormalised_error(retained: Values) -> Values:
    """Compute Lemma 1's error of ``renormalise``, ‖p̃ − p‖₁ = 2(1 − ρ), equal for all p (11)."""
    return 2.0 * (1.0 - retained)


def spread_error_bound(retained: Values, others: int) -> Values:
    """Compute Lemma 1's bound for ``spread``, ‖p̃ − p‖₁ ≤ 2(1 − ρ)(1 − 1/``others``) (12).

    others: V − K. The paper's bound is 2(1 − ρ). The error reaches the bound returned here if one
    token has all the mass outside the top K.
    """
    return renormalised_error(retained) * (1.0 - 1.0 / others if others else 0.0)


def bias_bound(weights: Sequence[float] | Values, retained: Values) -> Values:
    """Compute Theorem 2's bound on the aggregate's L1 error, 2·Σ w_m(1 − ρ_m) (17).

    weights: w [M]; the function normalises them. retained: ρ, f64 [M, ...]. Result: f64 [...].
    """
    shares = np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64)
    bound: Values = np.tensordot(shares, renormalised_error(retained), axes=1)
    return bound


def acceptance_bound(weights: Sequence[float] | Values, retained: Values) -> Values:
    """Compute Theorem 3's bound on the change of acceptance, Σ w_m(1 − ρ_m) (19)."""
    return bias_bound(weights, retained) / 2.0
