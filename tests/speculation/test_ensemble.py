"""Ensembles: top-K rows, what is rebuilt of them, their average and its logits, the bounds."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.distributions import Sampling, nucleus, probabilities
from pilotfish.speculation.ensemble import (
    SCHEMES,
    Scheme,
    TopRows,
    acceptance_bound,
    acceptance_variation,
    aggregate,
    as_logits,
    bias_bound,
    rebuild,
    reconstruction_error,
    renormalised_error,
    spread_error_bound,
    top_rows,
    top_rows_by_mass,
)
from pilotfish.speculation.randomness import Purpose
from pilotfish.speculation.theory import tv
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SamplingParams, choose
from pilotfish.wire.protocols.decision_head import JudgedProtocol
from tests.conftest import VOCAB
from tests.support.examples import examples
from tests.support.hostile import drafted

ROUNDING = 2e-6  # float32's, in L1
TEMPERATURES = st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.5, 40.0])

pytestmark = pytest.mark.filterwarnings("error")  # 0/0, ∞ − ∞ and the like


@st.composite
def logits(draw: st.DrawFn, count: int, vocab: int) -> np.ndarray:
    """Rows f32 [n, V]: smooth, with ties, with tokens of probability 0, or of one token only."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = rng.normal(0.0, draw(st.sampled_from([0.1, 2.0, 30.0])), (count, vocab))
    kind = draw(st.sampled_from(["smooth", "ties", "equal", "holes", "one-hot"]))
    if kind == "ties":
        rows = np.rint(rows)
    elif kind == "equal":
        rows[:] = 1.0
    elif kind in ("holes", "one-hot"):
        missing = rng.random((count, vocab)) < (0.5 if kind == "holes" else 1.0)
        missing[np.arange(count), rng.integers(vocab, size=count)] = False
        rows[missing] = -np.inf
    return rows.astype(np.float32)


@st.composite
def federations(draw: st.DrawFn) -> tuple[list[np.ndarray], list[float], int]:
    """Logits of M workers [n, V] each, weights, K."""
    vocab, count = draw(st.integers(1, 60)), draw(st.integers(1, 4))
    workers = [draw(logits(count, vocab)) for _ in range(draw(st.integers(1, 4)))]
    weights = [draw(st.floats(0.05, 5.0)) for _ in workers]
    return workers, weights, draw(st.integers(1, vocab + 2))


def exact(rows: np.ndarray, temperature: float) -> np.ndarray:
    """p in float64, [n, V]."""
    return probabilities(rows.astype(np.float64), Sampling(temperature=temperature or 1.0))


# What a worker tells


@given(federations(), TEMPERATURES)
def test_exactly_k_are_kept_and_none_is_heavier_or_of_equals_lower(
    federation: tuple[list[np.ndarray], list[float], int], temperature: float
) -> None:
    (z, *_), _, k = federation
    vocab = z.shape[1]
    rows = top_rows(z, temperature, k)
    p = probabilities(z, Sampling(temperature=temperature or 1.0))
    assert rows.k == min(k, vocab)
    assert len(rows) == len(z)
    assert (rows.ids.dtype, rows.values.dtype) == (np.uint32, np.float32)
    for ids, values, row, whole in zip(rows.ids, rows.values, z, p, strict=True):
        best = sorted(range(vocab), key=lambda token: (-row[token], token))[:k]
        assert ids.tolist() == sorted(best)
        assert values.tobytes() == whole[ids].tobytes()
    np.testing.assert_allclose(rows.retained_mass, rows.values.sum(axis=1), rtol=1e-6)


def test_a_large_vocabulary_is_cut_like_a_small_one() -> None:
    z = np.random.default_rng(0).normal(0.0, 3.0, (3, 20_000)).astype(np.float32)
    z[1, 7:900] = z[1].max()  # more equal ones than are kept
    z[2, 50:] = -np.inf
    for k in (1, 64, 3000):
        for row, ids in zip(z, top_rows(z, 1.0, k).ids, strict=True):
            assert ids.tolist() == sorted(np.argsort(-row, kind="stable")[:k].tolist())


@given(federations(), TEMPERATURES, st.floats(0.01, 0.999))
def test_a_mass_takes_the_fewest_tokens(
    federation: tuple[list[np.ndarray], list[float], int], temperature: float, mass: float
) -> None:
    (rows, *_), _, most = federation
    vocab = rows.shape[1]
    answers = top_rows_by_mass(rows, temperature, mass, most)
    assert len(answers) == len(rows)
    for row, answer in zip(rows, answers, strict=True):
        wanted = top_rows(row[None], temperature, answer.k)
        np.testing.assert_array_equal(answer.ids, wanted.ids)
        np.testing.assert_array_equal(answer.values, wanted.values)
        limit = min(most, vocab)
        assert answer.k <= limit
        if answer.k < limit:
            assert answer.retained_mass[0] >= mass - 1e-6
        if answer.k > 1:
            assert top_rows(row[None], temperature, answer.k - 1).retained_mass[0] < mass + 1e-6


def test_temperature_0_stands_for_1() -> None:
    z = np.random.default_rng(0).normal(0.0, 3.0, (3, 50)).astype(np.float32)
    cold, plain = top_rows(z, 0.0, 8), top_rows(z, 1.0, 8)
    assert cold.values.tobytes() == plain.values.tobytes()
    merged = aggregate([1.0], [cold], 50, "spread")
    assert as_logits(merged, 0.0).tobytes() == as_logits(merged, 1.0).tobytes()


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf]])
def test_what_is_no_distribution_is_not_told(bad: list[float]) -> None:
    z = np.zeros((2, 2), np.float32)
    z[1] = bad
    for k in (1, 2):
        with pytest.raises(ValueError, match="no distribution"):
            top_rows(z, 1.0, k)


# Rebuilding and averaging


@given(federations(), st.sampled_from(SCHEMES))
def test_with_all_tokens_nothing_changes_bit_by_bit(
    federation: tuple[list[np.ndarray], list[float], int], scheme: Scheme
) -> None:
    workers, weights, _ = federation
    vocab = workers[0].shape[1]
    info = [top_rows(z, 0.7, vocab + len(weights) - 1) for z in workers]
    total = np.zeros(workers[0].shape, np.float32)
    for weight, rows, z in zip(weights, info, workers, strict=True):
        p = probabilities(z, Sampling(temperature=0.7))
        assert rebuild(rows, vocab, scheme).tobytes() == p.tobytes()
        total += np.float32(weight / sum(weights)) * p
    np.testing.assert_array_equal(aggregate(weights, info, vocab, scheme), total)


@given(federations(), TEMPERATURES)
@examples(200)
def test_reconstruction_costs_what_lemma_1_says(
    federation: tuple[list[np.ndarray], list[float], int], temperature: float
) -> None:
    (z, *_), _, k = federation
    vocab, p = z.shape[1], exact(z, temperature)
    rows = top_rows(z, temperature, k)
    values = np.zeros(z.shape, bool)
    np.put_along_axis(values, rows.ids.astype(np.int64), True, axis=1)
    outside, rho = np.where(values, 0.0, p).sum(axis=1), np.where(values, p, 0.0).sum(axis=1)

    renormalised = rebuild(rows, vocab, "renormalise")
    np.testing.assert_allclose(renormalised.sum(axis=1, dtype=float), 1.0, atol=ROUNDING)
    assert not renormalised[~values].any()
    cost = reconstruction_error(renormalised, p)
    np.testing.assert_allclose(cost, renormalised_error(rho), atol=ROUNDING)

    spread = rebuild(rows, vocab, "spread")
    np.testing.assert_allclose(spread.sum(axis=1, dtype=float), 1.0, atol=ROUNDING)
    np.testing.assert_allclose(spread[values], p[values], atol=ROUNDING)
    for row, row_kept, mass in zip(spread, values, outside, strict=True):
        np.testing.assert_allclose(row[~row_kept], mass / max(1, vocab - rows.k), atol=ROUNDING)
    less = reconstruction_error(spread, p)
    assert (less <= spread_error_bound(rho, vocab - rows.k) + ROUNDING).all()
    assert (less <= cost + ROUNDING).all()


@given(federations(), st.sampled_from(SCHEMES), TEMPERATURES)
def test_the_average_is_that_of_the_rebuilt_distributions(
    federation: tuple[list[np.ndarray], list[float], int], scheme: Scheme, temperature: float
) -> None:
    workers, weights, k = federation
    vocab = workers[0].shape[1]
    info = [top_rows(z, temperature, k + m) for m, z in enumerate(workers)]  # each its own K
    shares = np.array(weights) / sum(weights)
    dense = sum(
        share * rebuild(rows, vocab, scheme).astype(float)
        for share, rows in zip(shares, info, strict=True)
    )
    merged = aggregate(weights, info, vocab, scheme)
    assert merged.dtype == np.float32
    assert merged.min() >= 0.0
    np.testing.assert_allclose(merged, dense, atol=1e-6)
    np.testing.assert_allclose(merged.sum(axis=1, dtype=float), 1.0, atol=ROUNDING)
    assert aggregate([8.0 * w for w in weights], info, vocab, scheme).tobytes() == merged.tobytes()


def test_leaving_a_worker_out_renormalises_the_others() -> None:
    rng = np.random.default_rng(1)
    info = [top_rows(rng.normal(0.0, 2.0, (2, 30)).astype(np.float32), 1.0, 5) for _ in range(3)]
    left = aggregate([0.5, 0.3], [info[0], info[2]], 30, "spread")
    np.testing.assert_allclose(left, aggregate([0.625, 0.375], info[::2], 30, "spread"), rtol=1e-6)


def test_one_rows_average_written_out() -> None:
    item = TopRows(np.array([[0, 3]], np.uint32), np.array([[0.5, 0.25]]))
    other = TopRows(np.array([[1, 3]], np.uint32), np.array([[0.25, 0.25]]))
    weights = [0.75, 0.25]
    np.testing.assert_allclose(
        aggregate(weights, [item, other], 4, "renormalise"),
        [[0.75 * 2 / 3, 0.25 / 2, 0.0, 0.75 / 3 + 0.25 / 2]],
    )
    np.testing.assert_allclose(
        aggregate(weights, [item, other], 4, "spread"),
        [[0.375 + 0.0625, 0.75 / 8 + 0.0625, 0.75 / 8 + 0.0625, 0.25]],
    )


def test_values_that_no_top_k_has_give_no_negative_probability() -> None:
    """A kept token that weighs nothing: less than each of the others, and rounding has its say."""
    rng = np.random.default_rng(0)
    ids = np.array([[1, 3]], np.uint32)
    for _ in range(300):
        info = [TopRows(ids, np.array([[0.0, rng.random()]], np.float32)) for _ in range(3)]
        merged = aggregate(rng.random(3), info, 7, "spread")
        assert merged.min() >= 0.0
        assert merged[0, 1] < 1e-7
        np.testing.assert_allclose(merged.sum(), 1.0, atol=ROUNDING)


def test_no_worker_has_a_dense_array_of_its_own() -> None:
    rows, vocab = 9, 50_000
    rng = np.random.default_rng(0)
    info = [
        top_rows(rng.normal(0.0, 3.0, (rows, vocab)).astype(np.float32), 1.0, 64) for _ in range(3)
    ]
    for scheme in SCHEMES:
        tracemalloc.start()
        merged = aggregate([1.0, 1.0, 1.0], info, vocab, scheme)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.1 * merged.nbytes


# The bounds


@given(federations(), st.sampled_from(SCHEMES), TEMPERATURES, st.integers(0, 2**32))
@examples(200)
def test_bias_and_acceptance_stay_within_theorems_2_and_3(
    federation: tuple[list[np.ndarray], list[float], int],
    scheme: Scheme,
    temperature: float,
    seed: int,
) -> None:
    workers, weights, k = federation
    vocab = workers[0].shape[1]
    info = [top_rows(z, temperature, k) for z in workers]
    p = np.stack([exact(z, temperature) for z in workers])
    # ρ of the exact p, [M, n]
    masses = [
        np.take_along_axis(whole, rows.ids.astype(np.int64), 1).sum(axis=1)
        for whole, rows in zip(p, info, strict=True)
    ]
    whole = np.tensordot(np.array(weights) / sum(weights), p, 1)
    merged = aggregate(weights, info, vocab, scheme)
    limit = bias_bound(weights, np.stack(masses))
    assert (reconstruction_error(merged, whole) <= limit + ROUNDING).all()
    q = np.random.default_rng(seed).dirichlet(np.full(vocab, 0.2), len(whole))
    varied = acceptance_variation(merged, whole, q)
    assert (varied <= acceptance_bound(weights, np.stack(masses)) + ROUNDING).all()


def test_only_spread_samples_tokens_that_no_worker_sent() -> None:
    """Over the whole vocabulary: with bound (19) as probability, and nearly all improbable."""
    vocab, k, weights = 4000, 64, [0.7, 0.3]
    rng = np.random.default_rng(1)
    steep = -1.3 * np.log(np.arange(1, vocab + 1))
    rows = [(steep + rng.normal(0.0, 0.4, (5, vocab))).astype(np.float32) for _ in weights]
    models = [top_rows(row, 1.0, k) for row in rows]
    p = 0.7 * exact(rows[0], 1.0) + 0.3 * exact(rows[1], 1.0)
    bound = acceptance_bound(weights, np.stack([model.retained_mass for model in models]))
    assert (bound > 0.1).all()
    sent = np.zeros(p.shape, bool)
    for model in models:
        np.put_along_axis(sent, model.ids.astype(np.int64), True, axis=1)
    for scheme in SCHEMES:
        rebuilt = aggregate(weights, models, vocab, scheme).astype(np.float64)
        unsent = np.where(sent, 0.0, rebuilt).sum(axis=1)
        improbable = np.where(p < 1e-5, rebuilt, 0.0).sum(axis=1)
        if scheme == "renormalise":
            assert not unsent.any()
            assert not improbable.any()
        else:
            # a token that one worker sent can still come from the other worker's equal shares
            np.testing.assert_allclose(unsent, bound * (~sent).sum(axis=1) / (vocab - k), rtol=1e-4)
            assert (improbable > 1e-3).all()


def test_the_bounds_are_reached() -> None:
    """Nothing smaller would hold: two workers that agree, and a drafter on what they left out."""
    p = np.array([[0.5, 0.3, 0.2, 0.0]])
    info = [TopRows(np.array([[0]], np.uint32), np.array([[0.5]]))] * 2
    merged = aggregate([0.5, 0.5], info, 4, "renormalise")
    retained = np.array([[0.5], [0.5]])
    assert reconstruction_error(merged, p) == pytest.approx(bias_bound([0.5, 0.5], retained))
    q = np.array([[0.0, 0.3, 0.2, 0.5]])
    varied = acceptance_variation(merged, p, q)
    assert varied == pytest.approx(acceptance_bound([0.5, 0.5], retained))
    lone = np.array([[0.5, 0.5, 0.0, 0.0]])
    error = reconstruction_error(rebuild(info[0], 4, "spread"), lone)
    assert error == pytest.approx(spread_error_bound(np.array([0.5]), 3))


# As a target's logits


@given(federations(), st.sampled_from(SCHEMES), st.sampled_from([1e-6, 0.1, 0.5, 1.0, 1.5, 100.0]))
def test_the_logits_have_the_average_as_their_distribution(
    federation: tuple[list[np.ndarray], list[float], int], scheme: Scheme, temperature: float
) -> None:
    workers, weights, k = federation
    vocab = workers[0].shape[1]
    info = [top_rows(z, temperature, k) for z in workers]
    merged = aggregate(weights, info, vocab, scheme)
    z = as_logits(merged, temperature)
    assert z.dtype == np.float32
    assert np.array_equal(np.isneginf(z), merged == 0.0)
    p = probabilities(z, Sampling(temperature=temperature))
    wanted = merged / merged.sum(axis=1, keepdims=True, dtype=np.float64)
    np.testing.assert_allclose(p, wanted, rtol=2e-5, atol=1e-38)
    for row, choice in zip(merged, z.argmax(axis=1), strict=True):
        assert row[choice] >= row.max() * (1.0 - 2e-6)


@given(st.integers(0, 2**32), st.sampled_from([{"top_k": 3}, {"top_p": 0.7}]))
def test_top_k_and_top_p_of_a_request_cut_the_average(seed: int, cut: dict[str, Any]) -> None:
    rng = np.random.default_rng(seed)
    info = [top_rows(rng.normal(0.0, 2.0, (2, 40)).astype(np.float32), 0.8, 6) for _ in range(2)]
    merged = aggregate([0.6, 0.4], info, 40, "renormalise")
    p = probabilities(as_logits(merged, 0.8), Sampling(temperature=0.8, **cut))
    for row, whole in zip(p, merged, strict=True):
        values = np.zeros(40, bool)
        values[np.argsort(-whole)[:3]] = True
        values = values if "top_k" in cut else nucleus(whole, 0.7)
        np.testing.assert_allclose(
            row, np.where(values, whole, 0.0) / whole[values].sum(), rtol=1e-5
        )


@pytest.mark.parametrize(
    "protocol", [n for n, x in PROTOCOL_REGISTRY.items() if not isinstance(x, JudgedProtocol)]
)
@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.8}])
def test_rules_take_minus_infinity_for_probability_0(protocol: str, cut: dict[str, float]) -> None:
    """What a rule decides on an average is what it decides on logits that are merely very low."""
    exchange = PROTOCOL_REGISTRY[protocol]
    temperature = 0.0 if protocol == "greedy" else 1.0
    law = SamplingParams(sampling=Sampling(temperature=temperature, **cut), seed=3)
    decided = set()
    for seed in range(40):
        draft = drafted(protocol, (1,) * 4, seed)
        rng = np.random.default_rng(seed)
        info = [
            top_rows(rng.normal(0.0, 2.0, (5, VOCAB)).astype(np.float32), temperature, 8)
            for _ in range(2)
        ]
        for ids, token in zip(info[0].ids, draft.ids, strict=False):
            if rng.random() < 0.7 and token not in ids:  # else most of it would have probability 0
                ids[0] = token
                ids.sort()
        z = as_logits(aggregate([0.5, 0.5], info, VOCAB, "renormalise"), temperature)
        assert np.isneginf(z).any()
        rulings = [
            exchange.verify(draft, rows, law, round_start=10)
            for rows in (z, np.maximum(z, np.float32(-1e30)))
        ]
        assert repr(rulings[0]) == repr(rulings[1])
        decided.add(rulings[0].accepted)
    assert len(decided) > 1


def test_a_stream_samples_the_average() -> None:
    rng = np.random.default_rng(0)
    info = [top_rows(rng.normal(0.0, 2.0, (1, 40)).astype(np.float32), 1.2, 6) for _ in range(2)]
    merged = aggregate([0.5, 0.5], info, 40, "renormalise")
    z = as_logits(merged, 1.2)[0]
    law = SamplingParams(sampling=Sampling(temperature=1.2), seed=11)
    drawn = [choose(z, law, position, Purpose.TARGET) for position in range(20_000)]
    shares = np.bincount(drawn, minlength=40) / len(drawn)
    assert float(tv(shares, merged[0] / merged[0].sum())) < 0.02
    assert not shares[merged[0] == 0.0].any()
