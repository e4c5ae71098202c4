"""The theory as functions, held against brute force over small vocabularies."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.candidates import choose
from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.speculation.rows import Row
from pilotfish.speculation.theory import (
    Values,
    alpha,
    beta,
    betas,
    residuals,
    sigma,
    theta,
    tokens_per_round,
    tv,
)
from pilotfish.speculation.truncation import truncate
from tests.support.enumeration import Model, distribution_of, draw, play_round, ways
from tests.support.examples import examples

ROUNDING = 1e-12


def beta_bound(q: Floats, q_hat: Row) -> float:
    """Bound how much acceptance changes when q̂ is drafted from instead of q: |β̂ − β|.

    σ as in Theorem 3.2 (tslt (20)), plus the TV of the quantisation: between q̂ and q renormalised
    on the tokens of q̂. TV(q̂, q) itself, a tighter bound, is no more than this sum.
    """
    selection = q[q_hat.support]
    mass = selection.sum(dtype=np.float64)
    if mass <= 0.0:
        return 1.0
    return sigma(q, q_hat.support) + float(tv(selection / mass, q_hat.probabilities()))


def betas_bound(p: Floats, q: Floats, k: int, distance: float) -> Values:
    """Of each β⁽ʲ⁾, how much it changes at most when q moves by TV = ``distance``; f64 [k].

    Theorem 4.14, tslt (35), where ``distance`` = σ: |β̂⁽ʲ⁾ − β⁽ʲ⁾| is at most
    (1 + Σ_{i<j} Π_{i<s≤j} 2/Z⁽ˢ⁾)·σ. Here Z⁽ˢ⁾ = TV(p⁽ˢ⁻¹⁾, q), the mass of the residual that p⁽ˢ⁾
    was normalised by; with TV(p⁽ˢ⁾, q), as (56) prints, it would not hold. An
    acceptance cannot change by more than 1, which the bound soon exceeds.
    """
    moved = 0.0  # of TV(p̂⁽ʲ⁾, p⁽ʲ⁾), (33): each step doubles it and divides it by Z
    bounds = []
    for rest in residuals(p, q, k):
        bounds.append(moved + distance)
        z = float(tv(rest, q))
        if moved + distance > 0.0:
            moved = 2.0 * (moved + distance) / z if z > 0.0 else math.inf
    return np.array(bounds)


@st.composite
def distributions(draw, vocab):
    """f64 [vocab]; zeros and one-hots among them."""
    weights = np.array(draw(st.lists(st.integers(0, 50), min_size=vocab, max_size=vocab)), float)
    weights[draw(st.integers(0, vocab - 1))] += 1
    return weights / weights.sum()


@st.composite
def pairs(draw):
    vocab = draw(st.integers(2, 6))
    return draw(distributions(vocab)), draw(distributions(vocab))


def one_hot(at, vocab=4):
    return np.eye(vocab)[at]


HALVES = (np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.3, 0.7]))


# One candidate


@given(pairs())
def test_beta_is_how_often_a_candidate_is_accepted(pair):
    p, q = pair
    accepted = sum(
        probability
        for ended, probability in ways(partial(play_round, (1,), lambda _: Row(q), lambda _: p))
        if ended.tokens
    )
    assert beta(p, q) == pytest.approx(accepted, abs=ROUNDING)
    assert beta(p, q) == pytest.approx(1 - tv(p, q), abs=ROUNDING)


@given(pairs())
def test_tv_is_the_largest_difference_of_any_event(pair):
    p, q = pair
    events = [[bool(bits >> x & 1) for x in range(len(p))] for bits in range(2 ** len(p))]
    largest = max(abs(p[event].sum() - q[event].sum()) for event in np.array(events))
    assert tv(p, q) == pytest.approx(largest, abs=ROUNDING)


def test_many_rows_at_once():
    p, q = np.stack([one_hot(0), HALVES[0]]), np.stack([one_hot(0), HALVES[1]])
    np.testing.assert_array_equal(tv(p, q), [0.0, 1.0])
    np.testing.assert_array_equal(beta(p, q), [1.0, 0.0])


@given(pairs(), st.data())
def test_theorem_3_2_truncation_changes_beta_by_at_most_sigma(pair, data):
    p, q = pair
    values = np.array(sorted(data.draw(st.sets(st.integers(0, len(q) - 1), min_size=1))))
    if not q[values].sum():
        values = np.flatnonzero(q)
    q_hat = Row(q[values], values.astype(np.uint32))
    cut_off = sigma(q, values)
    assert tv(distribution_of(q_hat, len(q)), q) == pytest.approx(cut_off, abs=ROUNDING)
    assert beta_bound(q, q_hat) == pytest.approx(cut_off, abs=ROUNDING)  # nothing is quantised
    assert abs(beta(p, distribution_of(q_hat, len(q))) - beta(p, q)) <= cut_off + ROUNDING


@given(
    st.integers(0, 2**31),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.integers(0, 8),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)
@examples(200)
def test_what_is_shipped_changes_beta_by_at_most_the_bound(seed, temperature, top_k, top_p):
    """q̂ of `truncate`: cut off and quantised."""
    target, drafter = (Model(8, seed, side) for side in (0, 1))
    shaped = Sampling(temperature=temperature)
    p, q = (probabilities(m.logits(()).astype(float)[None], shaped)[0] for m in (target, drafter))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    q_hat = truncate(drafter.logits(()), sampling).row(0)
    change = abs(beta(p, distribution_of(q_hat, 8)) - beta(p, q))
    bound = beta_bound(q, q_hat)
    assert change <= tv(distribution_of(q_hat, 8), q) + ROUNDING
    assert tv(distribution_of(q_hat, 8), q) <= bound + ROUNDING
    # half a step, by the depth of each token
    shares = q[q_hat.ids] / q[q_hat.ids].sum()
    octaves = np.log2(shares.max() / shares)
    half_steps = np.select([octaves < 4, octaves < 8, octaves < 12], [1 / 16, 1 / 8, 1 / 4], 1 / 2)
    assert bound - sigma(q, q_hat.ids) <= (shares * (2**half_steps - 1)).sum() + ROUNDING


def test_the_bound_of_theorem_3_2_is_reached():
    q, p = np.array([0.6, 0.4]), np.array([0.0, 1.0])
    q_hat = Row(np.array([1.0]), np.array([0], np.uint32))
    assert beta(p, q) - beta(p, distribution_of(q_hat, 2)) == pytest.approx(beta_bound(q, q_hat))


def test_a_row_that_shares_no_token_bounds_nothing():
    q_hat = Row(np.array([1.0]), np.array([3], np.uint32))
    assert beta_bound(one_hot(0), q_hat) == 1.0


# Several candidates


@given(pairs(), st.integers(1, 4))
@examples(60)
def test_betas_are_how_often_each_candidate_is_accepted(pair, k):
    p, q = pair
    reached, accepted = np.zeros(k), np.zeros(k)

    def play(chance):
        return choose(draw(Row(q), k, chance), Row(q), p, chance.coin).accepted

    for index, probability in ways(play):
        reached[: k if index is None else index + 1] += probability
        if index is not None:
            accepted[index] += probability
    wanted = reached > 1e-9
    result = betas(p, q, k)
    np.testing.assert_allclose(result[wanted], accepted[wanted] / reached[wanted], atol=1e-6)
    assert theta(result) == pytest.approx(accepted.sum(), abs=ROUNDING)
    series = sum(b * np.prod(1 - result[:i]) for i, b in enumerate(result))  # (39) as it is printed
    assert theta(result) == pytest.approx(series, abs=ROUNDING)


@given(pairs())
def test_residuals_are_distributions_beside_q(pair):
    p, q = pair
    for before, after in zip(residuals(p, q, 4), residuals(p, q, 4)[1:], strict=False):
        assert after.sum() == pytest.approx(1.0)
        if tv(before, q) > ROUNDING:
            assert not after[before < q].any()


@given(pairs(), st.data(), st.integers(1, 4))
@examples(150)
def test_theorem_4_14_bounds_every_candidate(pair, data, k):
    p, q = pair
    values = np.array(sorted(data.draw(st.sets(st.integers(0, len(q) - 1), min_size=1))))
    if not q[values].sum():
        values = np.flatnonzero(q)
    q_hat = distribution_of(Row(q[values], values), len(q))
    bounds = betas_bound(p, q, k, sigma(q, values))
    change = np.abs(betas(p, q_hat, k) - betas(p, q, k))
    for at in range(k):
        # after a certain acceptance there is no residual, and nothing is asked
        certain = min(tv(rest, q) for rest in residuals(p, q, at + 1)) < ROUNDING
        assert certain or change[at] <= bounds[at] * (1 + 1e-9) + ROUNDING


@given(pairs(), st.integers(1, 4), st.floats(0.0, 1.0))
def test_the_bound_is_formula_35(pair, k, distance):
    p, q = pair
    z = [float("nan"), *(float(tv(rest, q)) for rest in residuals(p, q, k))]  # z[s - 1] = Z⁽ˢ⁾
    for j in range(1, k + 1):
        if min(z[1:j], default=1.0) < 1e-6:
            return
        factors = [math.prod(2 / z[s - 1] for s in range(i + 1, j + 1)) for i in range(1, j)]
        wanted = (sum(factors) + 1) * distance
        assert betas_bound(p, q, k, distance)[j - 1] == pytest.approx(wanted)


def test_with_the_printed_index_theorem_4_14_does_not_hold():
    """(56) has Z⁽ˢ⁾ = TV(p⁽ˢ⁾, q). p and q are so close that a small cut turns the residual."""
    p, q = np.array([18, 1, 17]) / 36, np.array([19, 1, 19]) / 39
    values = np.array([0, 2])
    q_hat = distribution_of(Row(q[values], values), 3)
    cut_off = sigma(q, values)
    change = abs(betas(p, q_hat, 2) - betas(p, q, 2))[1]
    first, second = residuals(p, q, 2)
    assert change <= betas_bound(p, q, 2, cut_off)[1]
    assert betas_bound(p, q, 2, cut_off)[1] == pytest.approx((2 / tv(first, q) + 1) * cut_off)
    assert change > 3 * (2 / tv(second, q) + 1) * cut_off  # as printed


def test_without_truncation_nothing_changes():
    p, q = HALVES
    np.testing.assert_array_equal(betas_bound(p, q, 3, 0.0), [0, 0, 0])
    np.testing.assert_array_equal(betas_bound(q, q, 3, 0.0), [0, 0, 0])
    np.testing.assert_array_equal(betas_bound(q, q, 3, 0.1), [0.1, math.inf, math.inf])


@pytest.mark.parametrize(
    ("p", "q", "wanted"),
    [
        (HALVES[0], HALVES[0], 1.0),  # p = q
        (*HALVES, 0.0),  # disjoint supports
        (one_hot(1), one_hot(1), 1.0),
        (one_hot(1), one_hot(2), 0.0),
        (one_hot(0), HALVES[0], 0.5),  # p one-hot
        (HALVES[0], one_hot(0), 0.5),  # q one-hot
    ],
)
def test_limits(p, q, wanted):
    assert beta(p, q) == wanted
    assert betas(p, q, 3)[0] == wanted
    assert tv(p, q) == 1 - wanted


def test_further_candidates_help_where_p_is_narrower_and_not_where_it_is_a_point_off_q():
    assert theta(betas(one_hot(0), HALVES[0], 3)) == pytest.approx(1 - 0.5**3)
    # q one-hot: what is left of p after the rejection is never drafted
    np.testing.assert_allclose(betas(HALVES[0], one_hot(0), 3), [0.5, 0.0, 0.0])
    assert theta(betas(*HALVES, 5)) == 0.0


def test_alpha_is_the_mean_of_theta_and_formula_40_approximates_it():
    values = np.array([betas(*pair, 2) for pair in [HALVES, (one_hot(0), HALVES[0])]])
    np.testing.assert_allclose(values, [[0, 0], [0.5, 0.5]])
    assert alpha(values) == pytest.approx(0.75 / 2)
    assert theta(values.mean(axis=0)) == pytest.approx(1 - 0.75**2)
    assert alpha(values[:, :1]) == pytest.approx(theta(values[:, :1].mean(axis=0)))


# A round


@given(pairs(), st.integers(1, 3))
def test_tokens_of_a_round_by_enumeration(pair, length):
    p, q = pair
    play = partial(play_round, (1,) * length, lambda _: Row(q), lambda _: p)
    mean = sum((len(ended.tokens) + 1) * probability for ended, probability in ways(play))
    assert tokens_per_round(float(beta(p, q)), length) == pytest.approx(mean, abs=1e-9)


@given(st.floats(0.0, 0.99), st.integers(0, 128))
def test_formula_8(acceptance, length):
    closed = (1 - acceptance ** (length + 1)) / (1 - acceptance)
    assert tokens_per_round(acceptance, length) == pytest.approx(closed)


def test_tokens_of_a_round_at_the_ends():
    assert tokens_per_round(1.0, 8) == 9.0
    assert tokens_per_round(0.0, 8) == 1.0
    assert tokens_per_round(0.7, 0) == 1.0
