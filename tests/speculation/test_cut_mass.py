"""Cut masses, and the acceptance at another K that follows from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.cut_mass import (
    CUT_SIZES,
    acceptance_at,
    acceptance_change,
    cut_masses,
    pair_spread,
)
from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.theory import beta
from tests.support.examples import examples

VOCAB = 20_000
POPULARITY = -1.2 * np.log(np.arange(VOCAB) + 300.0)


def row(seed: int, sharpness: float) -> np.ndarray:
    normal = np.random.default_rng(seed).normal(0.0, 2.5, VOCAB)
    return (sharpness * (normal + POPULARITY)).astype(np.float32)


def exact(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    q = np.sort(probabilities(logits[None].astype(float), sampling)[0])[::-1]
    return np.array([1.0 - q[:size].sum() for size in CUT_SIZES])


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize("min_p", [0.0, 0.01])
def test_the_cut_mass_is_that_of_sorted_tokens(
    sharpness: float, temperature: float, min_p: float
) -> None:
    sampling = Sampling(temperature=temperature, min_p=min_p)
    logits = row(1, sharpness)
    logits[::3] = -np.inf  # a grammar forbids these
    np.testing.assert_allclose(cut_masses(logits, sampling), exact(logits, sampling), atol=0.015)


def test_few_tokens_and_equal_tokens() -> None:
    few = np.full(VOCAB, -np.inf, np.float32)
    few[[5, 900]] = 1.0
    assert cut_masses(few, Sampling(temperature=1.0)).tolist() == [0.0] * len(CUT_SIZES)
    equal = cut_masses(np.zeros(VOCAB, np.float32), Sampling(temperature=1.0))
    np.testing.assert_allclose(equal, 1.0 - np.array(CUT_SIZES) / VOCAB, rtol=1e-9)


@given(st.floats(0.0, 0.9), st.floats(0.001, 2.0))
@examples(50)
def test_the_acceptance_is_the_mean_of_the_models_ratios(sigma: float, spread: float) -> None:
    """E min(1, W) for a normal W of mean 1 − σ, by sums over its density."""
    steps = np.linspace(-8.0, 8.0, 20_001)
    density = np.exp(-0.5 * steps**2)
    ratios = 1.0 - sigma + spread * steps
    mean = (np.minimum(1.0, ratios) * density).sum() / density.sum()
    assert acceptance_at(sigma, spread) == pytest.approx(mean, abs=1e-6)


@given(st.floats(0.01, 1.0), st.floats(0.0, 0.9), st.floats(0.0, 0.9))
@examples(100)
def test_no_forecast_leaves_lemma_1(acceptance: float, sigma: float, other: float) -> None:
    change = acceptance_change(acceptance, sigma, other)
    assert abs(change) <= abs(other - sigma) + 1e-9
    assert change * (sigma - other) >= 0.0
    spread = pair_spread(acceptance, sigma)
    if 0.0 < spread < 7.9:
        assert acceptance_at(sigma, spread) == pytest.approx(acceptance, abs=1e-6)


@pytest.mark.parametrize(("sharpness", "noise"), [(2.0, 0.1), (2.0, 0.4), (1.5, 0.2), (1.5, 0.8)])
def test_the_forecast_is_near_the_acceptance_of_pairs(sharpness: float, noise: float) -> None:
    """From K = 64 to other K, over rows of two models; without the forecast the error is larger."""
    rng = np.random.default_rng(3)
    accepted, cut = [], []
    for seed in range(40):
        target = row(seed, sharpness).astype(float)
        drafter = target + rng.normal(0.0, noise, VOCAB)
        p, q = (probabilities(z[None], Sampling(temperature=1.0))[0] for z in (target, drafter))
        order = np.argsort(-q)
        p, q = p[order], q[order]
        accepted.append([float(beta(p[:k], q[:k] / q[:k].sum())) for k in CUT_SIZES])
        cut.append(cut_masses(drafter, Sampling(temperature=1.0)))
    alphas, sigmas = np.mean(accepted, axis=0), np.mean(cut, axis=0)
    known = CUT_SIZES.index(64)
    for alpha, sigma in zip(alphas, sigmas, strict=True):
        forecast = alphas[known] + acceptance_change(alphas[known], sigmas[known], sigma)
        assert abs(forecast - alpha) <= 0.015 + 0.1 * abs(alphas[known] - alpha)
