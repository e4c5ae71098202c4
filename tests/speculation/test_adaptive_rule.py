"""The adaptive rule over all its outcomes: how far it strays, and that it says so.

`tests/enumeration.py` replays the code that ships in all ways that a round can go. The mutant is
the paper's Algorithm 1 as printed: line 16 samples from p after a rejection, too.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.adaptive import (
    CERTAIN,
    HIGHEST_RATIO,
    DistributionComparison,
    Relaxation,
    entropy,
    likeliest,
    verify,
)
from pilotfish.speculation.candidates import residual
from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.rows import Row
from pilotfish.speculation.theory import beta, tv
from pilotfish.speculation.tree import Walk, chain
from pilotfish.speculation.tree import verify as verify_tree
from pilotfish.speculation.truncation import truncate
from tests.support.enumeration import (
    Ended,
    Model,
    distribution_of,
    draw,
    kinds,
    law_of,
    output_law,
    samplings,
    target_law,
    ways,
)
from tests.support.examples import examples

EXACT = 1e-12
SEEN = 0.005
ONE = Sampling(temperature=1.0)
NONE_KEY = {"lambda1": HIGHEST_RATIO, "lambda2": 1.0, "lambda3": 0.0}

relaxations = st.builds(
    Relaxation,
    tau=st.sampled_from([0.0, 1e-6, 0.2, 0.5, 0.9, 1.0]),
    lambda1=st.sampled_from([0.0, 0.7, 1.0, 3.0, HIGHEST_RATIO]),
    lambda2=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    lambda3=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)


@st.composite
def pairs(draw, least=3, most=5):
    """p after a prefix, q̂ after a prefix, of two models."""
    vocab, seed, kind = draw(st.integers(least, most)), draw(st.integers(0, 2**31)), draw(kinds)
    target, drafter = (Model(vocab, seed, side, kind) for side in (0, 1))
    drafting = draw(samplings)
    q = cache(lambda prefix: truncate(drafter.logits(prefix), drafting).row(0))
    return law_of(target, draw(samplings)), q


def play(length, q, p, relaxation, chance):
    """A round as the device drafts it and the edge verifies it: how it ended, and its deviation."""
    window = ()
    for _ in range(length):
        window += tuple(draw(q(window), 1, chance))
    walk, deviation, _ = verify(
        window,
        lambda at: q(window[:at]),
        lambda at: p(window[:at]),
        lambda _, probability: chance.coin(probability),
        relaxation,
    )
    return Ended(window[: walk.node], walk.weights), deviation


def law_and_deviation(length, q, p, relaxation):
    """The law of the first ``length`` + 1 tokens, and the expected sum of the deviations."""
    item = partial(play, length, q, p, relaxation)
    mean = sum(deviation * probability for (_, deviation), probability in ways(item))
    return output_law(lambda chance: item(chance)[0], p, length + 1), mean


def position_law(p, row, relaxation):
    """Of one position, summed up by hand from what is accepted: f64 [V]."""
    seen = DistributionComparison(p, row)
    accepted = np.zeros(len(p))
    accepted[row.support] = seen.accepted_mass(relaxation)
    return accepted + (1.0 - accepted.sum()) * residual(p / p.sum(dtype=np.float64), row)


@given(pairs(), relaxations)
@examples(200)
def test_the_deviation_is_the_total_variation_of_a_positions_law(pair, relaxation):
    p, q = pair
    result, deviation = law_and_deviation(1, q, p, relaxation)
    exact = target_law(p, 2)
    assert tv(result.sum(1), exact.sum(1)) == pytest.approx(deviation, abs=EXACT)
    # what follows is the target's: nothing else strays
    assert np.abs(result - exact).sum() / 2 == pytest.approx(deviation, abs=EXACT)
    np.testing.assert_allclose(result.sum(1), position_law(p(()), q(()), relaxation), atol=EXACT)


@given(pairs(most=4), relaxations)
@examples(60)
def test_the_expected_sum_of_deviations_bounds_the_texts_total_variation(pair, relaxation):
    p, q = pair
    result, deviation = law_and_deviation(2, q, p, relaxation)
    assert np.abs(result - target_law(p, 3)).sum() / 2 <= deviation + EXACT


@given(pairs(), relaxations)
@examples(150)
def test_acceptance_rises_by_the_deviation_and_never_falls(pair, relaxation):
    p, q = pair[0](()), pair[1](())
    seen = DistributionComparison(p, q)
    accepted = seen.accepted_mass(relaxation)
    assert (accepted >= seen.strict_mass()).all()
    assert (accepted <= seen.drafter).all()
    strict = float(beta(p / p.sum(dtype=np.float64), distribution_of(q, len(p))))
    assert accepted.sum() == pytest.approx(strict + seen.deviation(accepted), abs=EXACT)
    assert 0.0 <= seen.deviation(accepted) <= 1.0 - strict + EXACT


@given(pairs(), st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6))
@examples(150)
def test_more_tau_accepts_no_less_of_any_token(pair, taus):
    p, q = pair[0](()), pair[1](())
    seen = DistributionComparison(p, q)
    accepted = [seen.softened_mass(tau) for tau in sorted(taus)]
    for less, more in pairwise(accepted):
        assert (more >= less - EXACT).all()


@given(pairs(), relaxations)
@examples(100)
def test_more_is_key_where_a_clause_is_stricter(pair, relaxation):
    seen = DistributionComparison(pair[0](()), pair[1](()))
    for stricter in (
        replace(relaxation, lambda1=relaxation.lambda1 / 2),
        replace(relaxation, lambda2=relaxation.lambda2 / 2),
        replace(relaxation, lambda3=min(1.0, relaxation.lambda3 + 0.3)),
    ):
        assert (seen.key_tokens(stricter) >= seen.key_tokens(relaxation)).all()


@given(pairs(), relaxations)
@examples(60)
def test_tau_0_is_the_strict_rule_coin_by_coin(pair, relaxation):
    p, q = pair
    relaxation = replace(relaxation, tau=0.0)
    window = (q(()).token(0),)
    window = (*window, q(window).token(0))

    def strict(coin):
        return verify_tree(
            chain(2), window, lambda at: q(window[:at]), lambda at: p(window[:at]), coin
        )

    def relaxed(coin):
        walk, deviation, _ = verify(
            window, lambda at: q(window[:at]), lambda at: p(window[:at]), coin, relaxation
        )
        assert deviation == 0.0
        return walk

    for outcome in (True, False):
        walks, wanted = [], []
        for rule in (strict, relaxed):
            tossed = []

            def coin(number, probability, tossed=tossed, outcome=outcome):
                tossed.append((number, probability))
                return outcome or probability == 1.0

            walks.append(rule(coin))
            wanted.append(tossed)
        assert wanted[0] == wanted[1]  # to the last bit
        assert (walks[0].node, walks[0].rejected) == (walks[1].node, walks[1].rejected)
        np.testing.assert_array_equal(walks[0].weights, walks[1].weights)


@given(pairs(most=4), st.sampled_from([1, 2]))
@examples(60)
def test_tau_0_is_exact(pair, length):
    p, q = pair
    result, deviation = law_and_deviation(length, q, p, Relaxation(tau=0.0, **NONE_KEY))
    assert deviation == 0.0
    np.testing.assert_allclose(result, target_law(p, length + 1), rtol=0, atol=EXACT)


@given(pairs(), relaxations)
@examples(80)
def test_the_residual_after_any_rejection_is_that_of_p(pair, relaxation):
    p, q = pair
    whole = residual(p(()) / p(()).sum(dtype=np.float64), q(()))
    for (ended, _), _ in ways(partial(play, 1, q, p, relaxation)):
        if not ended.tokens:
            np.testing.assert_allclose(ended.weights, whole, rtol=0, atol=EXACT)


@given(pairs(), st.floats(0.0, 1.0))
@examples(80)
def test_what_the_target_excludes_stays_excluded(pair, tau):
    p, q = pair
    result, _ = law_and_deviation(1, q, p, Relaxation(tau=tau, **NONE_KEY))
    assert not result.sum(1)[p(()) == 0.0].any()


# What makes a token key


def test_each_clause_makes_tokens_key():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    row = Row(np.array([0.2, 0.3, 0.5]), np.array([0, 1, 3], dtype=np.uint32))
    seen = DistributionComparison(p, row)
    assert seen.entropy_ratio == pytest.approx(1.0297 / 1.1421, abs=1e-4)
    assert seen.norm_match == 1.0  # all three are among the target's four
    np.testing.assert_allclose(seen.gap, [0.3, 0.0, 0.45])
    loose = {"tau": 0.5, "lambda1": 1.0, "lambda2": 0.4, "lambda3": 0.5}
    assert seen.key_tokens(Relaxation(**loose)).tolist() == [False, False, True]
    assert seen.key_tokens(Relaxation(**{**loose, "lambda2": 0.2})).tolist() == [True, False, True]
    assert seen.key_tokens(Relaxation(**{**loose, "lambda1": 0.9})).all()
    assert not seen.key_tokens(Relaxation(**{**loose, "lambda2": 0.5, "lambda3": 1.0})).any()


def test_the_overlap_is_of_the_ten_likeliest_with_their_ties():
    p = np.exp(-0.1 * np.arange(40)) / np.exp(-0.1 * np.arange(40)).sum()
    shifted = Row(np.roll(p, 4)[:36] + 0.0, np.arange(36, dtype=np.uint32))
    assert DistributionComparison(p, shifted).norm_match == 0.6
    np.testing.assert_array_equal(likeliest(p), np.arange(10))
    tied = Row(np.ones(20), np.arange(5, 25, dtype=np.uint32))
    assert (
        DistributionComparison(p, tied).norm_match == 0.5
    )  # all of q̂ are likeliest: 5 of p's 10 are there
    few = Row(np.array([1.0, 2.0]), np.array([3, 30], dtype=np.uint32))
    assert DistributionComparison(p, few).norm_match == 0.5
    one_hot = np.eye(40)[3]
    assert DistributionComparison(one_hot, few).norm_match == 1.0
    assert DistributionComparison(np.eye(40)[4], few).norm_match == 0.0


def test_entropies_are_predictive_and_the_targets_is_guarded():
    assert entropy(np.full(8, 1 / 8, dtype=np.float32)) == pytest.approx(np.log(8))
    assert entropy(np.eye(5)[2]) == 0.0
    half = Row(np.array([1.0, 1.0]), np.array([0, 1], dtype=np.uint32))
    assert DistributionComparison(np.eye(5)[0], half).entropy_ratio == pytest.approx(
        np.log(2) / CERTAIN
    )


@given(st.integers(2, 300), st.integers(0, 2**31), st.sampled_from([0, 1, 5]))
@examples(50)
def test_entropy_is_as_written(vocab, seed, top_k):
    logits = np.random.default_rng(seed).normal(0, 4, (1, vocab)).astype(np.float32)
    p = probabilities(logits, Sampling(temperature=1.0, top_k=top_k))[0]
    exact = p[p > 0].astype(np.float64)
    assert entropy(p) == pytest.approx(-(exact * np.log(exact)).sum(), abs=1e-5)


@pytest.mark.parametrize("value", [-1e-9, 1.0000001, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["tau", "lambda2", "lambda3"])
def test_what_is_no_relaxation_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        Relaxation(**{"tau": 0.2, **NONE_KEY, name: value})


@pytest.mark.parametrize("value", [-1.0, 1.1 * HIGHEST_RATIO, float("nan"), float("inf")])
def test_what_is_no_entropy_ratio_is_refused(value):
    with pytest.raises(ValueError, match="lambda1"):
        Relaxation(**{"tau": 0.2, **NONE_KEY, "lambda1": value})


# Mutants: the real rule, but for the line below the comment

PAIRS = [(Model(4, seed, 0), Model(4, seed, 1)) for seed in (0, 27, 28, 39)]


def off_by(rule, tau):
    """Of the pair where it is largest: how far the law is from what the deviation says."""
    results = []
    for target, drafter in PAIRS:
        p = law_of(target, ONE)
        q = cache(lambda prefix, drafter=drafter: Row(law_of(drafter, ONE)(prefix)))
        relaxation = Relaxation(tau=tau, **NONE_KEY)

        def single(chance, p=p, q=q, relaxation=relaxation):
            (token,) = draw(q(()), 1, chance)
            return rule(token, q(()), p, relaxation, chance)

        mean = sum(deviation * probability for (_, deviation), probability in ways(single))
        law = output_law(lambda chance, single=single: single(chance)[0], p, 2)
        results.append(abs(np.abs(law - target_law(p, 2)).sum() / 2 - mean))
    return max(results)


def real(token, row, p, relaxation, chance):
    walk, deviation, _ = verify(
        [token], lambda _: row, lambda at: p((token,)[:at]), lambda _, c: chance.coin(c), relaxation
    )
    return Ended((token,)[: walk.node], walk.weights), deviation


def line_16(token, row, p, relaxation, chance):
    ended, deviation = real(token, row, p, relaxation, chance)
    # the mutant: "sample one additional token from M_t", also after a rejection
    return Ended(ended.tokens, p(ended.tokens)), deviation


def softened_residual(token, row, p, relaxation, chance):
    ended, deviation = real(token, row, p, relaxation, chance)
    if ended.tokens:
        return ended, deviation
    seen = DistributionComparison(p(()), row)
    softened = seen.target ** (1 - relaxation.tau) * seen.drafter**relaxation.tau
    # the mutant: the residual of p̃
    return Ended((), residual(softened / softened.sum(), row)), deviation


def test_the_real_rule_deviates_as_it_says():
    for tau in (0.0, 0.3, 0.7, 1.0):
        assert off_by(real, tau) < EXACT


def test_the_papers_line_16_is_biased_even_at_tau_0():
    for tau in (0.0, 0.3, 0.7):
        assert off_by(line_16, tau) > SEEN


def test_a_residual_of_the_softened_target_is_not_what_is_told():
    assert off_by(softened_residual, 0.3) > SEEN


def test_a_window_without_tokens_is_the_target_alone():
    p = law_of(Model(4, 1, 0), ONE)
    walk, deviation, _ = verify(
        [], lambda _: None, lambda _: p(()), lambda *_: False, Relaxation(tau=0.5, **NONE_KEY)
    )
    assert isinstance(walk, Walk)
    assert (walk.node, walk.rejected, deviation) == (0, False, 0.0)
    np.testing.assert_array_equal(walk.weights, p(()))
