"""Evaluate a head's logits: area under the ROC curve, thresholds, a recommended threshold."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pilotfish.edge_runtime.head_file import CurvePoint

POINTS = 26  # number of a curve's thresholds, the same as in AutoJudge


def auc(scores: NDArray[np.floating], labels: NDArray[np.bool_]) -> float | None:
    """Compute the area under the ROC curve; None if all labels are equal.

    The area is the probability that a label of 1 has a higher score than a label of 0; a tie counts
    as one half. scores: [n]. labels: [n].
    """
    ones = int(labels.sum())
    zeros = len(labels) - ones
    if not ones or not zeros:
        return None
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(sizes) - (sizes - 1) / 2)[group]
    return float((ranks[labels].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def curve(logits: NDArray[np.floating]) -> list[CurvePoint]:
    """Compute a curve of thresholds: `POINTS` quantiles of the head's probabilities, ascending."""
    bounds = np.quantile(logits.astype(np.float64), np.linspace(0.0, 1.0, POINTS))
    # Clip, so that no threshold rounds to 0 (forgive nothing) or 1 (forgive everything).
    bounds = np.clip(bounds, -30.0, 30.0)
    return [
        CurvePoint(
            threshold=1.0 / (1.0 + math.exp(-bound)),
            logit=bound,
            forgiven=share(logits <= bound),
        )
        for bound in bounds.tolist()
    ]


def recommend_threshold(
    points: list[CurvePoint], harmful: NDArray[np.floating], risk: float
) -> CurvePoint | None:
    """Find the largest threshold that forgives at most the share ``risk`` of harmful mismatches.

    harmful: logits of the harmful mismatches under a good channel, [m]. Returns None if every
    threshold forgives a larger share; then the head should reject every mismatch.
    """
    allowed = [point for point in points if share(harmful <= (point.logit or 0.0)) <= risk]
    return max(allowed, key=lambda point: point.threshold, default=None)


def share(mask: NDArray[np.bool_]) -> float:
    """Compute the share of elements that are true; 0 for an empty mask."""
    return float(mask.mean()) if mask.size else 0.0
