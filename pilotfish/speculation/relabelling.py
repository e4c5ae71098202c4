"""Wireless relabelling: relax a decision head's training labels for a poor channel (wisv §V-B).

In:  an episode's mismatches with labels y (1: critical, since forgiving the mismatch changes the
     task's outcome) and positions in tokens; the quality of a sampled channel (`Channel.quality`).
Out: labels for this channel: 1 to repair the mismatch, 0 to forgive it.

The printed paper lacks the formulas (28)–(31). The formulas here are a reconstruction
(docs/papers.md); the paper gives no values for κ, the floor and T. The importance of mismatch i is
s_i = Σ_j y_j e^{−|i−j|/κ}. A channel has the budget B = b·Σy, where b rises with its quality from
the floor to 1. A mismatch keeps the label 1 with probability π_i = y_i·σ((s_i − λ)/T), with the
smallest λ such that Σπ ≤ B. So only labels of 1 change, important ones less often, and a good
channel (b = 1) changes none.
"""

import math

import numpy as np
from numpy.typing import NDArray

KAPPA = 8.0  # κ (tokens): distance at which a mismatch's importance falls to 1/e
FLOOR = 0.8  # b at quality 0; at 0.5 a head forgave most mismatches (docs/wisv.md, Results)
TEMPERATURE = 0.5  # T, in units of importance
LEAST_TEMPERATURE = 1e-6  # lower limit of T: (s − λ)/T could overflow below it


def importance(
    labels: NDArray[np.bool_], positions: NDArray[np.int64], kappa: float = KAPPA
) -> NDArray[np.float64]:
    """Compute the importance s, f64 [n]: critical mismatches, weighted by nearness (wisv (28)).

    labels [n]; positions [n], in tokens. kappa: the distance in tokens at which a mismatch counts
    1/e. Raises ValueError for a kappa that is not positive and finite, or for unequal lengths.
    """
    if labels.shape != positions.shape or labels.ndim != 1:
        raise ValueError(f"Labels {labels.shape} and positions {positions.shape} differ in shape.")
    if not 0.0 < kappa < math.inf:
        raise ValueError(f"kappa must be positive and finite, not {kappa}.")
    at = positions.astype(np.float64)
    # [n, Σy]
    distances = np.abs(at[:, None] - at[labels.astype(np.bool_)])
    scores: NDArray[np.float64] = np.exp(-distances / kappa).sum(axis=1)
    return scores


def budget(labels: NDArray[np.bool_], quality: float, floor: float = FLOOR) -> float:
    """Compute the budget B, the expected number of labels that stay 1 (wisv (29)).

    B = b·Σy with b = floor + (1 − floor)·quality. Raises ValueError for a quality or a floor
    outside [0, 1].
    """
    for name, value in (("quality", quality), ("floor", floor)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"The {name} must be between 0 and 1, not {value}.")
    return (floor + (1.0 - floor) * quality) * int(np.count_nonzero(labels))


def repair_probabilities(
    labels: NDArray[np.bool_],
    positions: NDArray[np.int64],
    quality: float,
    *,
    kappa: float = KAPPA,
    floor: float = FLOOR,
    temperature: float = TEMPERATURE,
) -> NDArray[np.float64]:
    """Compute π, f64 [n]: the probability that each mismatch's label is 1 (wisv (31)).

    π is 0 where the label y is 0. Σπ equals the `budget` B up to rounding; if B ≥ Σy, π = y.
    temperature: T; at a low T only the most important mismatches keep the label 1, at a high T all
    critical ones have nearly equal π. Raises ValueError for a T below `LEAST_TEMPERATURE` or not
    finite, and for the errors of `importance` and `budget`.
    """
    if not LEAST_TEMPERATURE <= temperature < math.inf:
        raise ValueError(f"T must be at least {LEAST_TEMPERATURE} and finite, not {temperature}.")
    critical = labels.astype(np.bool_)
    scores = importance(labels, positions, kappa)[critical]
    allowed = budget(labels, quality, floor)
    probabilities = critical.astype(np.float64)
    if allowed < len(scores):
        probabilities[critical] = _share(scores / temperature, allowed)
    return probabilities


def relabel(
    labels: NDArray[np.bool_],
    positions: NDArray[np.int64],
    quality: float,
    uniforms: NDArray[np.float64],
    *,
    kappa: float = KAPPA,
    floor: float = FLOOR,
    temperature: float = TEMPERATURE,
) -> NDArray[np.bool_]:
    """Draw labels for a channel of this quality, bool [n]: label i is 1 with probability π_i.

    uniforms: f64 [n] in [0, 1). With the same uniforms, a better channel keeps every label that a
    worse one keeps. For the other arguments, and errors, see `repair_probabilities`.
    """
    if uniforms.shape != labels.shape:
        raise ValueError(
            f"Labels of shape {labels.shape} need uniforms of this shape, not {uniforms.shape}."
        )
    repaired: NDArray[np.bool_] = uniforms < repair_probabilities(
        labels, positions, quality, kappa=kappa, floor=floor, temperature=temperature
    )
    return repaired


def _share(scores: NDArray[np.float64], allowed: float) -> NDArray[np.float64]:
    """Compute σ(s − λ), f64 [k], with the least λ for which the sum is at most ``allowed`` < k.

    scores: s in units of T, [k]. The search is for the offset of λ from the greatest s, so that
    equal scores get equal shares at any T.
    """
    if allowed <= 0.0:
        return np.zeros(len(scores))
    below = scores - scores.max()
    # bounds of the offset: its value if all scores equalled the greatest, and if all equalled the
    # least
    log_odds = math.log(allowed) - math.log(len(scores) - allowed)
    low, high = log_odds, log_odds - float(below.min())
    while low < (middle := (low + high) / 2.0) < high:
        if _sigmoid(below + middle).sum() <= allowed:
            low = middle
        else:
            high = middle
    return _sigmoid(below + low)


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the logistic function σ(x), without overflow and exact for values close to 0."""
    values: NDArray[np.float64] = np.exp(-np.logaddexp(0.0, -x))
    return values
