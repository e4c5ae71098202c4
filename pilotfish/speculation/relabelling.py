"""Wireless relabelling: relax labels for a channel that is not good (wisv §V-B).

In:  an episode's mismatches with labels y (1: critical, letting it pass changes the task's outcome)
     and positions in tokens, and the quality of a sampled channel (`Channel.quality`).
Out: labels for that channel: 1 to repair, 0 to let pass.

The printed paper lost the formulas (28)–(31); this is our reconstruction (docs/papers.md), and κ,
the floor and T are ours. Importance s_i = Σ_j y_j e^{−|i−j|/κ}. A channel has the budget B = b·Σy,
where b rises with its quality, from a floor to 1. A mismatch is repaired with probability
π_i = y_i·σ((s_i − λ)/T), with the smallest λ such that Σπ ≤ B. So only critical labels are relaxed,
the more important ones less, and under a good channel (b = 1) all stay.
"""

import math

import numpy as np
from numpy.typing import NDArray

KAPPA = 8.0  # tokens
FLOOR = 0.8  # at 0.5 a head forgave most under a poor link (docs/wisv.md, Results)
TEMPERATURE = 0.5
LEAST_TEMPERATURE = 1e-6  # below it (s − λ)/T leaves the floats


def importance(
    labels: NDArray[np.bool_], positions: NDArray[np.int64], kappa: float = KAPPA
) -> NDArray[np.float64]:
    """Compute s, f64 [n]: the number of critical mismatches nearby, by distance (wisv (28)).

    labels [n]; positions [n], in tokens. kappa: the distance in tokens at which a mismatch counts
    e⁻¹. Raises ValueError for a kappa that is not positive, or for unequal lengths.
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
    """Compute B, the most repairs to expect: b·Σy, b = floor + (1 − floor)·quality (wisv (29)).

    Raises ValueError for a quality or a floor outside [0, 1].
    """
    for name, value in (("quality", quality), ("floor", floor)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"The {name} must be within 0 and 1, not {value}.")
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
    """Compute π, f64 [n]: the probability that each mismatch keeps the label 1 (wisv (31)).

    Σπ is B to float precision; labels of 0 stay 0, and if B ≥ Σy, π is y. temperature: T, how
    gradually repair follows importance; a low one repairs only the most important, a high one all
    alike. Raises ValueError for a temperature that is too small or not finite, and as `importance`
    and `budget` do.
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
    """Draw labels for a channel of this quality, bool [n]: each with probability π.

    uniforms: f64 [n] in [0, 1); the same ones relax no label that a worse channel keeps. For the
    other arguments, and errors, see `repair_probabilities`.
    """
    if uniforms.shape != labels.shape:
        raise ValueError(f"{labels.shape} labels need as many uniforms, not {uniforms.shape}.")
    repaired: NDArray[np.bool_] = uniforms < repair_probabilities(
        labels, positions, quality, kappa=kappa, floor=floor, temperature=temperature
    )
    return repaired


def _share(scores: NDArray[np.float64], allowed: float) -> NDArray[np.float64]:
    """Compute σ(s − λ), f64 [k], for s [k] in units of T and the least λ with sum ≤ allowed.

    allowed < k. λ is sought as an offset from the greatest s, so that equal scores share equally
    however small T is.
    """
    if allowed <= 0.0:
        return np.zeros(len(scores))
    below = scores - scores.max()
    # bounds: the offsets if all scores were the greatest, or the least
    log_odds = math.log(allowed) - math.log(len(scores) - allowed)
    low, high = log_odds, log_odds - float(below.min())
    while low < (middle := (low + high) / 2.0) < high:
        if _sigmoid(below + middle).sum() <= allowed:
            low = middle
        else:
            high = middle
    return _sigmoid(below + low)


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute σ(x) without overflow, and without losing values close to 0."""
    values: NDArray[np.float64] = np.exp(-np.logaddexp(0.0, -x))
    return values
