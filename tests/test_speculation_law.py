"""The output law of speculation equals the target's, by enumeration of every outcome."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculation.chain import acceptance, accepted_count, matching_prefix, residual
from speculation.distributions import Sampling, nucleus, probabilities
from speculation.randomness import Purpose, race, sample, uniforms

V = 4


def random_distribution(rng, *shape, zeros=True):
    weights = rng.random((*shape, V)) ** 3
    if zeros:
        weights *= rng.random((*shape, V)) > 0.25
        weights[..., 0] += 1e-3
    return weights / weights.sum(axis=-1, keepdims=True)


def output_law(gamma, q_of, p_of):
    """Law of the first γ+1 tokens when every outcome of one round is enumerated.

    q_of and p_of give the distributions after a prefix. What follows a short round is drawn from p,
    which is the claim for the rounds after it (induction), so all laws are over γ+1 tokens.
    """
    law = dict.fromkeys(itertools.product(range(V), repeat=gamma + 1), 0.0)

    def spread(prefix, probability):
        if len(prefix) == gamma + 1:
            law[prefix] += probability
            return
        for token, p in enumerate(p_of(prefix)):
            spread((*prefix, token), probability * p)

    for window in itertools.product(range(V), repeat=gamma):
        q = np.array([q_of(window[:i]) for i in range(gamma)])
        p = np.array([p_of(window[:i]) for i in range(gamma + 1)])
        drawn = float(np.prod(q[np.arange(gamma), window]))
        if drawn == 0.0:
            continue
        ratio = acceptance(np.array(window), q, p)
        for count in range(gamma + 1):
            reached = drawn * float(np.prod(ratio[:count]))
            if count == gamma:
                weights, probability = p[gamma], reached
            else:
                weights, probability = residual(p[count], q[count]), reached * (1 - ratio[count])
            for token, weight in enumerate(weights):
                spread((*window[:count], token), probability * weight)
    return law


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_output_law_equals_target(gamma, seed):
    rng = np.random.default_rng(seed)
    tables = {}

    def of(kind, prefix):
        return tables.setdefault((kind, prefix), random_distribution(rng))

    law = output_law(gamma, lambda x: of("q", x), lambda x: of("p", x))
    for tokens, probability in law.items():
        wanted = np.prod([of("p", tokens[:i])[token] for i, token in enumerate(tokens)])
        assert probability == pytest.approx(wanted, abs=1e-12)


def test_law_holds_for_the_float32_numbers_that_are_shipped():
    """q as shipped sums to 1 only roughly; the law is over those numbers all the same."""
    rng = np.random.default_rng(3)
    q = (random_distribution(rng) * 1.0004).astype(np.float32)
    p = random_distribution(rng)
    exact_q = q.astype(np.float64) / q.sum(dtype=np.float64)
    law = np.zeros(V)
    for x in range(V):
        if exact_q[x] > 0:
            ratio = acceptance(np.array([x]), q[None], np.stack([p, p]))[0]
            law[x] += exact_q[x] * ratio
            law += exact_q[x] * (1 - ratio) * residual(p, q)
    np.testing.assert_allclose(law, p, atol=1e-12)


def test_the_printed_ratio_is_not_lossless():
    """tslt's Algorithm 3 prints q/p: the enumeration sees that, so it would see our mistakes."""
    rng = np.random.default_rng(0)
    p, q = random_distribution(rng, zeros=False), random_distribution(rng, zeros=False)
    ratio = np.minimum(1.0, q / p)
    law = q * ratio + (q * (1 - ratio)).sum() * residual(p, q)
    assert np.abs(law - p).sum() / 2 > 0.01


def test_identical_distributions_are_always_accepted():
    p = random_distribution(np.random.default_rng(1), 2)
    assert (acceptance(np.array([0, 0]), p, np.concatenate([p, p[:1]])) == 1.0).all()
    np.testing.assert_allclose(residual(p[0], p[0]), p[0], atol=1e-15)  # 0/0 guarded


@given(st.lists(st.booleans(), max_size=8))
def test_accepted_count_is_the_length_of_the_true_prefix(accepts):
    wanted = accepts.index(False) if False in accepts else len(accepts)
    assert accepted_count(np.array(accepts, dtype=bool)) == wanted


def test_matching_prefix():
    assert matching_prefix(np.array([5, 6, 7]), np.array([5, 6, 8, 9])) == 2
    assert matching_prefix(np.array([], dtype=np.uint32), np.array([5])) == 0


def test_race_samples_the_distribution():
    """χ² of Gumbel-max draws over positions against the weights."""
    weights = np.array([0.5, 0.25, 0.2, 0.05, 0.0])
    draws = 20_000
    counts = np.zeros(5)
    for position in range(draws):
        counts[sample(weights, race(5, 11, Purpose.DRAFT, position, round_start=3))] += 1
    assert counts[4] == 0
    expected = weights[:4] * draws
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 21.1  # df 3, p ≈ 1e-4


def test_draws_depend_on_every_part_of_their_name():
    base = {"seed": 1, "purpose": Purpose.DRAFT, "position": 5, "round_start": 4, "candidate": 0}
    names = [base, {**base, "seed": 2}, {**base, "purpose": Purpose.TARGET}]
    names += [{**base, "position": 6}, {**base, "round_start": 5}, {**base, "candidate": 1}]
    variates = [race(64, **name) for name in names]
    pooled = np.concatenate(variates)
    assert len(np.unique(pooled)) == len(pooled)
    np.testing.assert_array_equal(race(64, **base), variates[0])


def test_race_is_never_zero_and_a_longer_vocabulary_keeps_the_noise():
    assert race(100_001, 1, Purpose.TARGET, 0).min() > 0.0
    np.testing.assert_array_equal(
        race(151, 9, Purpose.TARGET, 3), race(1000, 9, Purpose.TARGET, 3)[:151]
    )


PINNED_RACE = [0.26066322859729607, 0.38446560991616613, 0.7303475274646487]
PINNED_UNIFORMS = [0.8253024914499434, 0.5889941552276514]


def test_noise_is_pinned():
    """The bits are part of the wire's law: a change of NumPy or of ours must show."""
    np.testing.assert_allclose(race(3, 7, Purpose.TARGET, 12), PINNED_RACE, rtol=1e-15)
    np.testing.assert_allclose(
        uniforms(2, 7, Purpose.ACCEPT, 12, round_start=12), PINNED_UNIFORMS, rtol=1e-15
    )


def test_uniforms_are_uniform():
    draws = np.concatenate(
        [uniforms(8, 5, Purpose.ACCEPT, start, round_start=start) for start in range(0, 4000, 8)]
    )
    assert draws.min() > 0.0
    assert draws.max() < 1.0
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    expected = len(draws) / 20
    assert ((counts - expected) ** 2 / expected).sum() < 52  # df 19, p ≈ 1e-4


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40, unique=True),
    st.floats(0.1, 3.0),
    st.integers(0, 45),
    st.floats(0.05, 1.0),
)
@settings(max_examples=200)
def test_shaping_keeps_what_it_says(values, temperature, top_k, top_p):
    logits = np.array([values], dtype=np.float64)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    shaped = probabilities(logits, sampling)[0]
    assert shaped.sum() == pytest.approx(1.0)
    full = np.exp((logits[0] - logits.max()) / temperature)
    order = np.argsort(-full, kind="stable")[: top_k or None]
    running = np.cumsum(full[order] / full[order].sum())

    def nucleus_of(mass):
        return order[: int(np.searchsorted(running, mass)) + 1] if top_p < 1.0 else order

    # where a running sum falls on the border of the nucleus, rounding decides
    surely, perhaps = nucleus_of(top_p * (1 - 1e-12)), nucleus_of(top_p * (1 + 1e-12))
    positive = set(np.flatnonzero(shaped))
    assert positive <= {i for i in range(len(values)) if full[i] >= full[perhaps[-1]]}
    assert {i for i in surely if full[i] > 1e-300} <= positive
    np.testing.assert_allclose(shaped[order[0]], shaped.max())


def test_nucleus_includes_the_token_that_crosses():
    weights = np.array([0.1, 0.5, 0.3, 0.1])
    assert nucleus(weights, 0.5).tolist() == [False, True, False, False]
    assert nucleus(weights, 0.51).tolist() == [False, True, True, False]
    assert nucleus(weights, 0.85).tolist() == [True, True, True, False]  # ties by id


def test_nucleus_beyond_the_first_guess_equals_a_full_sort():
    rng = np.random.default_rng(0)
    weights = rng.random(5000)
    order = np.argsort(-weights, kind="stable")
    for mass in (0.1, 0.5, 0.99):
        count = int(np.searchsorted(np.cumsum(weights[order]), mass * weights.sum())) + 1
        assert set(np.flatnonzero(nucleus(weights, mass))) == set(order[:count])


def test_temperature_zero_is_one_hot():
    logits = np.array([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]], dtype=np.float32)
    np.testing.assert_array_equal(probabilities(logits, Sampling()), [[0, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}]
)
def test_senseless_sampling_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)
