"""The keyed draws and the shaping of distributions: their bits, their laws, what they keep."""

import json
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.distributions import Sampling, nucleus, probabilities
from pilotfish.speculation.randomness import Purpose, exponentials, noise, race, sample, uniforms
from pilotfish.speculation.split import systematic
from pilotfish.speculation.truncation import LEVEL_WEIGHTS
from tests.support.enumeration import Model, kinds, law_of, samplings
from tests.support.examples import examples


def test_race_samples_the_distribution():
    """χ² of Gumbel-max draws over positions against the weights."""
    weights = np.array([0.5, 0.25, 0.2, 0.05, 0.0])
    draws = 20_000
    counts = np.zeros(5)
    for position in range(draws):
        counts[sample(weights, noise(5, 11, Purpose.DRAFT, position, round_start=3))] += 1
    assert counts[4] == 0
    expected = weights[:4] * draws
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 21.1  # df 3, p ≈ 1e-4


def test_draws_depend_on_every_part_of_their_name():
    base = {"seed": 1, "purpose": Purpose.DRAFT, "position": 5, "round_start": 4, "candidate": 0}
    names = [base, {**base, "seed": 2}, {**base, "purpose": Purpose.TARGET}]
    names += [{**base, "position": 6}, {**base, "round_start": 5}, {**base, "candidate": 1}]
    variates = [exponentials(noise(64, **name)) for name in names]
    pooled = np.concatenate(variates)
    assert len(np.unique(pooled)) == len(pooled)
    np.testing.assert_array_equal(exponentials(noise(64, **base)), variates[0])


def test_race_is_never_zero_and_a_longer_vocabulary_keeps_the_noise():
    assert exponentials(noise(100_001, 1, Purpose.TARGET, 0)).min() > 0.0
    extremes = exponentials(np.array([0, 2**32 - 1], np.uint32))
    assert extremes.min() > 0.0
    assert np.isfinite(extremes).all()
    np.testing.assert_array_equal(
        noise(151, 9, Purpose.TARGET, 3), noise(1000, 9, Purpose.TARGET, 3)[:151]
    )


@given(st.integers(3, 5), kinds, samplings, st.integers(0, 2**31))
@examples(200)
def test_a_race_is_won_by_the_largest_ratio(vocab, kind, sampling, seed):
    """`sample` takes few logarithms, and finds what all of them would."""
    small = law_of(Model(vocab, seed, 0, kind), sampling)(())
    large = np.random.default_rng(seed).standard_normal(3000).astype(np.float32)
    large = probabilities(3 * large[None], sampling)[0]
    for weights in (small, large, small.astype(np.float64), systematic(large, 16, 0.5)):
        words = noise(len(weights), seed, Purpose.DRAFT, 1)
        scores = weights / exponentials(words)
        assert sample(weights, words) == scores.argmax()
        second, first = np.sort(scores)[-2:]
        winner, ahead = race(weights, words)
        assert winner == scores.argmax()
        assert ahead == (pytest.approx(np.log(first / second), abs=1e-12) if second else np.inf)


VECTORS = json.loads((Path(__file__).parents[1] / "data" / "wire_vectors.json").read_text())
PINNED_RACE = [0.26066322859729607, 0.38446560991616613, 0.7303475274646487]


def test_noise_is_pinned():
    """The bits are part of the wire's law: a change of NumPy or of ours must show."""
    variates = exponentials(noise(3, 7, Purpose.TARGET, 12))
    np.testing.assert_allclose(variates, PINNED_RACE, rtol=1e-15)


@pytest.mark.parametrize("vector", VECTORS["races"], ids=lambda v: str(v["purpose"]))
def test_races_are_those_of_the_specification(vector):
    words = noise(
        5,
        vector["seed"],
        Purpose(vector["purpose"]),
        vector["position"],
        round_start=vector["round_start"],
        candidate=vector["candidate"],
    )
    assert words.tolist() == vector["words"]
    assert sample(np.array(vector["weights"], dtype=np.float64), words) == vector["sample"]


@pytest.mark.parametrize("vector", VECTORS["races"], ids=lambda v: str(v["purpose"]))
def test_a_counter_is_made_as_the_specification_says(vector):
    """Key and counter by hand, from the text of docs/wire.md."""
    counter = [0, vector["position"], vector["round_start"]]
    counter.append(vector["candidate"] * 2**32 + vector["purpose"])
    key = np.array([vector["seed"], 0x50696C6F74666973], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=np.array(counter, dtype=np.uint64)).random_raw(3)
    halves = [half for word in raw.tolist() for half in (word % 2**32, word >> 32)]
    assert halves[:5] == vector["words"]


@pytest.mark.parametrize("vector", VECTORS["uniforms"], ids=lambda v: str(v["purpose"]))
def test_uniforms_are_those_of_the_specification(vector):
    start = vector["round_start"]
    got = uniforms(3, vector["seed"], Purpose(vector["purpose"]), start, round_start=start)
    assert got.tolist() == vector["uniforms"]


@pytest.mark.parametrize("vector", VECTORS["systematic"])
def test_rounding_is_that_of_the_specification(vector):
    counts = systematic(np.array(vector["p"]), vector["bits"], vector["offset"])
    assert counts.tolist() == vector["counts"]


def test_weights_of_levels_are_those_of_the_specification():
    assert LEVEL_WEIGHTS.tolist() == VECTORS["level_weights"]
    depths = [0]  # in eighths of an octave
    for step, levels in ((1, 32), (2, 16), (4, 8), (8, 19)):
        depths += [depths[-1] + step * (count + 1) for count in range(levels)]
    assert depths[-1] == 8 * 31
    with localcontext() as context:
        context.prec = 60
        eighth = Decimal(2).sqrt().sqrt().sqrt()
        for depth, weight in zip(depths, LEVEL_WEIGHTS, strict=True):
            assert weight == int(Decimal(2) ** 31 / eighth**depth + Decimal("0.5"))


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
@examples(200)
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


def test_a_nucleus_that_is_met_exactly_takes_no_further_token():
    weights = np.array([0.125, 0.5, 0.25, 0.125])  # sums of them are exact
    assert nucleus(weights, 0.5).tolist() == [False, True, False, False]
    assert nucleus(weights, 0.75).tolist() == [False, True, True, False]
    assert nucleus(weights, 0.875).tolist() == [True, True, True, False]
    assert nucleus(weights, np.nextafter(0.75, 1)).tolist() == [True, True, True, False]


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
