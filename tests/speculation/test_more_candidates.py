"""The acceptance of several candidates: the law by enumeration, and the forecast of it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.candidates import choose
from pilotfish.speculation.more_candidates import acceptance_of
from pilotfish.speculation.rows import Row
from pilotfish.speculation.theory import beta, betas, theta
from tests.support.examples import examples


def surplus_law(p: np.ndarray, q: np.ndarray, most: int) -> list[float]:
    """θ of 1…most candidates by the surplus of p above t·q, as the module states the law."""
    level, left, accepted = 0.0, 1.0, []
    for _ in range(most):
        level += left
        left = float(np.maximum(p - level * q, 0.0).sum())
        accepted.append(1.0 - left)
    return accepted


def enumerated(p: np.ndarray, q: np.ndarray, candidates: int) -> float:
    """θ over every draw and every coin of the edge's own rule."""
    total = 0.0
    for drawn in itertools.product(np.flatnonzero(q), repeat=candidates):
        ratios: list[float] = []

        def reject(ratio: float, ratios: list[float] = ratios) -> bool:
            ratios.append(ratio)
            return False

        choose(drawn, Row(q), p, reject)
        total += math.prod(q[list(drawn)]) * (1.0 - math.prod(1.0 - ratio for ratio in ratios))
    return total


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("truncated", [False, True])
def test_the_law_is_that_of_the_edges_rule(seed: int, truncated: bool) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(4, 0.7), size=2)
    if truncated:
        q[q.argmin()] = 0.0
        q /= q.sum()
    law = surplus_law(p, q, 3)
    for candidates in (1, 2, 3):
        assert law[candidates - 1] == pytest.approx(enumerated(p, q, candidates), abs=1e-12)
        assert law[candidates - 1] == pytest.approx(theta(betas(p, q, candidates)), abs=1e-12)


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
@examples(100)
def test_a_forecast_is_a_possible_one(alpha: float, sigma: float) -> None:
    forecasts = [acceptance_of(candidates, alpha, sigma) for candidates in range(1, 9)]
    assert forecasts[0] == alpha
    assert all(more >= less - 1e-12 for less, more in itertools.pairwise(forecasts))
    assert forecasts[-1] <= max(alpha, 1.0 - sigma) + 1e-12
    np.testing.assert_allclose(acceptance_of(4, np.full(3, alpha), sigma), forecasts[3])


def test_two_models_that_are_nearly_alike() -> None:
    """Of a normal p/q with a small deviation, the second candidate leaves 0.578 of rejections."""
    steps = np.linspace(-9.0, 9.0, 200_001)
    density = np.exp(-0.5 * steps**2) / np.exp(-0.5 * steps**2).sum()
    spread = 1e-4
    ratios = 1.0 + spread * steps
    once = (np.maximum(0.0, ratios - 1.0) * density).sum()
    twice = (np.maximum(0.0, ratios - 1.0 - once) * density).sum()
    forecast = 1.0 - acceptance_of(2, 1.0 - once, 0.0)
    assert forecast / once == pytest.approx(twice / once, abs=0.003)


@pytest.mark.parametrize("top_k", [8, 40, 200])
@pytest.mark.parametrize("noise", [0.1, 0.3, 1.0, 2.0])
def test_the_forecast_is_near_the_law(noise: float, top_k: int) -> None:
    """Mean over 60 rows of two models with 200 tokens; α is 0.46 to 0.97.

    Pairs that differ by noise alone gain more than those to which the model was fitted: there the
    forecast has at least a third of the gain.
    """
    rng = np.random.default_rng(5)
    popularity = -1.2 * np.log(np.arange(200) + 3.0)
    rows, cut = [], []
    for _ in range(60):
        target = 2.0 * (rng.normal(0.0, 1.5, 200) + popularity)
        p, q = np.exp(target), np.exp(target + rng.normal(0.0, noise, 200))
        q[np.argsort(-q)[top_k:]] *= -1.0
        cut.append(-q[q < 0.0].sum() / np.abs(q).sum())
        q = np.maximum(q, 0.0)
        rows.append(surplus_law(p / p.sum(), q / q.sum(), 4))
        assert rows[-1][0] == pytest.approx(float(beta(p / p.sum(), q / q.sum())), abs=1e-12)
    exact, sigma = np.mean(rows, axis=0), float(np.mean(cut))
    for candidates in (2, 3, 4):
        forecast = acceptance_of(candidates, float(exact[0]), sigma)
        gain = exact[candidates - 1] - exact[0]
        tolerance = 0.012 if noise < 0.5 else 2.0 / 3.0 * gain
        assert forecast == pytest.approx(exact[candidates - 1], abs=tolerance)
