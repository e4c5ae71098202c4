"""specfed: workers upload the top K of their distributions; the server rebuilds and averages them.

In:  distributions p, f64 [V] for a worker, [M, V] for M workers; weights f64 [M] with sum 1; top
     ids [K]; ρ, their mass. Out: distributions, L1 distances (each 2·TV) and bounds.
From: specfed §II–§IV. The paper's text lacks its formulas; docs/papers.md has them. (2), the
     acceptance Σ min(p_agg, q), is `speculation.theory.beta`; `speculation.ensemble` has the rest.
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
    """Bits of a worker's upload a window: K probabilities and ids for each position (§III).

    There are L + 1 positions, since the bonus position is averaged too. A full vocabulary needs no
    ids.
    """
    index_bits = math.ceil(math.log2(vocabulary)) if top_k < vocabulary else 0
    return float(positions * top_k * (probability_bits + index_bits))


def eq_1_aggregate(weights: Values, p: Values) -> Values:
    """p_agg = Σ w_m p_m, [V] (1); of rebuilt distributions (7)."""
    aggregate: Values = weights @ p
    return aggregate


def eq_4_retained(p: Values, top_ids: NDArray[np.integer]) -> float:
    """ρ, the mass on the kept ids (4); the residual mass is 1 − ρ."""
    return float(p[top_ids].sum())


def eq_5_renormalised(p: Values, top_ids: NDArray[np.integer]) -> Values:
    """p/ρ on the kept ids, 0 elsewhere (5)."""
    return _rebuild(p, top_ids, "renormalise")


def eq_6_spread(p: Values, top_ids: NDArray[np.integer]) -> Values:
    """p on the kept ids, 1 − ρ spread evenly over the others (6)."""
    return _rebuild(p, top_ids, "spread")


def _rebuild(p: Values, top_ids: NDArray[np.integer], scheme: Scheme) -> Values:
    rows = TopRows(top_ids[None].astype(np.uint32), p[None, top_ids])
    rebuilt: Values = rebuild(rows, len(p), scheme)[0].astype(np.float64, copy=False)
    return rebuilt


def eq_8_error(rebuilt: Floats, p: Floats) -> float:
    """‖p̃ − p‖₁ of a worker (8); of aggregates (9)."""
    return float(reconstruction_error(rebuilt, p))


def eq_10_acceptance_variation(rebuilt: Floats, p: Floats, q: Floats) -> float:
    """|β̃ − β|: acceptance of drafter q by the rebuilt and by the true aggregate (10)."""
    return float(acceptance_variation(rebuilt, p, q))


def eq_11_renormalised_error(retained: float) -> float:
    """Lemma 1: renormalising costs ‖p̃ − p‖₁ = 2(1 − ρ), whatever p is."""
    return float(renormalised_error(np.float64(retained)))


def eq_12_spread_error_bound(retained: float, others: int) -> float:
    """Lemma 1: spreading costs less, at most 2(1 − ρ)(1 − 1/(V − K)).

    The paper's bound is 2(1 − ρ); the factor is reached where one token has all the residual mass.
    """
    return float(spread_error_bound(np.float64(retained), others))


def eq_17_bias_bound(weights: Values, retained: Values) -> float:
    """Theorem 2: the aggregate's L1 error is at most 2·Σ w_m(1 − ρ_m) (17)."""
    return float(bias_bound(weights, retained))


def eq_19_acceptance_bound(weights: Values, retained: Values) -> float:
    """Theorem 3: acceptance varies by at most Σ w_m(1 − ρ_m) (19), half of (17)."""
    return float(acceptance_bound(weights, retained))
