"""specfed: workers upload the top K of distributions; the server rebuilds and averages these.

In:  distributions p: f64 [V] of a worker, [M, V] of M workers. weights: f64 [M] with sum 1. top
     ids: [K], the ids with the largest p. ρ: mass of p on the top ids. Out: distributions, L1
     distances (each is twice the total variation) and bounds.
From: specfed §II–§IV. The paper's text lacks its formulas; docs/papers.md has them. Equation 2, the
     acceptance Σ min(p_agg, q), is `speculation.theory.beta`. `speculation.ensemble` has all
     equations that are not here.
"""

import math

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.ensemble import (
    Scheme,
    TopRows,
    acceptance_bound,
    acceptance_variation,
    bias_bound,
    rebuild,
    reconstruction_error,
    renormalised_error,
    spread_error_bound,
)
from pilotfish.speculation.theory import Values


def upload_bits(positions: int, top_k: int, vocabulary: int, probability_bits: int) -> float:
    """Compute the bits that a worker uploads per window (§III).

    For each position it uploads K probabilities and K ids; no ids if K is the whole vocabulary.
    positions: L + 1 for a window of L drafts, because the bonus position is averaged, too.
    """
    index_bits = math.ceil(math.log2(vocabulary)) if top_k < vocabulary else 0
    return float(positions * top_k * (probability_bits + index_bits))


def eq_1_aggregate(weights: Values, p: Values) -> Values:
    """Compute the aggregate p_agg = Σ w_m p_m, [V] (1); from rebuilt distributions, equation 7."""
    aggregate: Values = weights @ p
    return aggregate


def eq_4_retained(p: Values, top_ids: NDArray[np.integer]) -> float:
    """Compute ρ, the mass of p on the top ids (4); the residual mass is 1 − ρ."""
    return float(p[top_ids].sum())


def eq_5_renormalised(p: Values, top_ids: NDArray[np.integer]) -> Values:
    """Rebuild a distribution by renormalising: p/ρ on the top ids, 0 on all others (5)."""
    return _rebuild(p, top_ids, "renormalise")


def eq_6_spread(p: Values, top_ids: NDArray[np.integer]) -> Values:
    """Rebuild a distribution by spreading: p on the top ids, 1 − ρ evenly on all others (6)."""
    return _rebuild(p, top_ids, "spread")


def _rebuild(p: Values, top_ids: NDArray[np.integer], scheme: Scheme) -> Values:
    rows = TopRows(top_ids[None].astype(np.uint32), p[None, top_ids])
    rebuilt: Values = rebuild(rows, len(p), scheme)[0].astype(np.float64, copy=False)
    return rebuilt


def eq_8_error(rebuilt: Floats, p: Floats) -> float:
    """Compute the error ‖p̃ − p‖₁ of a worker's rebuilt distribution (8), or of an aggregate (9)."""
    return float(reconstruction_error(rebuilt, p))


def eq_10_acceptance_variation(rebuilt: Floats, p: Floats, q: Floats) -> float:
    """Compute |β̃ − β|: how far the rebuilt aggregate changes the acceptance of drafter q (10)."""
    return float(acceptance_variation(rebuilt, p, q))


def eq_11_renormalised_error(retained: float) -> float:
    """Compute the error of renormalising, ‖p̃ − p‖₁ = 2(1 − ρ), the same for every p (Lemma 1)."""
    return float(renormalised_error(np.float64(retained)))


def eq_12_spread_error_bound(retained: float, others: int) -> float:
    """Compute the bound of spreading's error, 2(1 − ρ)(1 − 1/(V − K)) (Lemma 1, tightened).

    The paper's bound is 2(1 − ρ). The error equals our bound if one token has all the residual
    mass.
    """
    return float(spread_error_bound(np.float64(retained), others))


def eq_17_bias_bound(weights: Values, retained: Values) -> float:
    """Compute the bound of the aggregate's L1 error, 2·Σ w_m(1 − ρ_m) (Theorem 2, 17)."""
    return float(bias_bound(weights, retained))


def eq_19_acceptance_bound(weights: Values, retained: Values) -> float:
    """Compute the bound of the change in acceptance, Σ w_m(1 − ρ_m) (Theorem 3, 19)."""
    return float(acceptance_bound(weights, retained))
