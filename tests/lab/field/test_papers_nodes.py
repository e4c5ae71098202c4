"""specfed and decentralized: several nodes for one target. Bounds against brute force; limits."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.lab.field.papers import decentralized, specfed
from pilotfish.lab.field.papers.decentralized_tables import claims, node_scaling
from pilotfish.lab.field.papers.specfed_tables import KEPT, distortion
from pilotfish.speculation.truncation import largest


@st.composite
def distributions(draw, vocab):
    weights = np.array(draw(st.lists(st.integers(0, 50), min_size=vocab, max_size=vocab)), float)
    weights[draw(st.integers(0, vocab - 1))] += 1
    return weights / weights.sum()


@st.composite
def federations(draw):
    """Workers' distributions [M, V], their weights [M], a drafter's [V], and K."""
    vocab, workers = draw(st.integers(3, 8)), draw(st.integers(1, 4))
    p = np.stack([draw(distributions(vocab)) for _ in range(workers)])
    return p, draw(distributions(workers)), draw(distributions(vocab)), draw(st.integers(1, vocab))


# specfed


@given(federations(), st.sampled_from([specfed.eq_5_renormalised, specfed.eq_6_spread]))
def test_specfed_bounds_hold_for_both_reconstructions(federation, rebuild):
    p, weights, q, count = federation
    selection = [largest(worker, count) for worker in p]
    retained = np.array([specfed.eq_4_retained(w, k) for w, k in zip(p, selection, strict=True)])
    rebuilt = np.stack([rebuild(worker, k) for worker, k in zip(p, selection, strict=True)])
    np.testing.assert_allclose(rebuilt.sum(axis=1), 1.0)
    for worker, other, mass in zip(p, rebuilt, retained, strict=True):
        error = specfed.eq_8_error(other, worker)
        if rebuild is specfed.eq_5_renormalised:
            assert error == pytest.approx(specfed.eq_11_renormalised_error(mass), abs=1e-12)
        else:
            others = len(worker) - count
            assert error <= specfed.eq_12_spread_error_bound(mass, others) + 1e-12
    merged = specfed.eq_1_aggregate(weights, rebuilt)
    whole = specfed.eq_1_aggregate(weights, p)
    assert specfed.eq_8_error(merged, whole) <= specfed.eq_17_bias_bound(weights, retained) + 1e-12
    variation = specfed.eq_10_acceptance_variation(merged, whole, q)
    assert variation <= specfed.eq_19_acceptance_bound(weights, retained) + 1e-12


def test_specfed_reconstructions_written_out():
    p, selection = np.array([0.5, 0.3, 0.1, 0.1]), np.array([0, 1])
    np.testing.assert_allclose(specfed.eq_5_renormalised(p, selection), [0.625, 0.375, 0, 0])
    np.testing.assert_allclose(specfed.eq_6_spread(p, selection), [0.5, 0.3, 0.1, 0.1])
    everything = np.arange(4)
    for rebuild in (specfed.eq_5_renormalised, specfed.eq_6_spread):
        np.testing.assert_allclose(rebuild(p, everything), p)


def test_specfed_spread_bound_is_reached_by_one_heavy_token():
    p = np.array([0.5, 0.5, 0.0, 0.0, 0.0])
    error = specfed.eq_8_error(specfed.eq_6_spread(p, np.array([0])), p)
    assert error == pytest.approx(specfed.eq_12_spread_error_bound(0.5, 4))


def test_specfed_upload_counts_ids_only_of_a_part():
    assert specfed.upload_bits(9, 32000, 32000, 16) == 9 * 32000 * 16
    assert specfed.upload_bits(9, 320, 32000, 16) == 9 * 320 * (16 + 15)


def test_specfed_distortions_fall_with_k_and_spreading_is_nearer():
    rows = [distortion(selection) for selection in KEPT]
    for row, next_row in itertools.pairwise(rows):
        assert row["bias_renormalised"] > next_row["bias_renormalised"]
    for row in rows[:-1]:
        assert row["bias_spread"] < row["bias_renormalised"] <= row["bias_bound"] + 1e-12
    assert rows[-1]["bias_bound"] == pytest.approx(0, abs=1e-12)


# decentralized

shapes = {
    "k": st.floats(1.0, 9.0),
    "nodes": st.integers(1, 16),
    "t0_s": st.floats(1e-3, 1.0),
    "t1_s": st.floats(0.0, 1.0),
}


@given(**shapes)
def test_decentralized_reduction_is_one_less_the_ratio_of_3_and_4(**shape):
    ratio = decentralized.eq_4_speculative_s(**shape) / decentralized.eq_3_standard_s(**shape)
    assert decentralized.eq_5_reduction(**shape) == pytest.approx(1 - ratio, abs=1e-12)


@given(window=st.integers(8, 16), **shapes)
def test_decentralized_eq_9_is_time_by_token_over_time_by_round(window, **shape):
    # k tokens one by one, against γ + 1 of them computed one by one and N − 1 hops
    shape_3 = decentralized.eq_3_standard_s(**shape)
    round_s = (window + 1) * shape["t0_s"] + (shape["nodes"] - 1) * shape["t1_s"]
    assert decentralized.eq_9_speed_up(window=window, **shape) == pytest.approx(shape_3 / round_s)


def test_decentralized_eq_9_runs_from_rho_to_k():
    assert decentralized.eq_9_speed_up(4.0, 7, 8, 1.0, 0.0) == pytest.approx(0.5)
    assert decentralized.eq_9_speed_up(4.0, 7, 8, 1.0, 1e9) == pytest.approx(4.0)


def test_decentralized_pipeline_written_out():
    # γ = 3, four nodes: 3 drafts, a pass over 4 tokens, 3 hops on and one back
    round_s = decentralized.pipeline_round_s(3, 4, 0.1, 2.0, lambda n: n * 0.25)
    assert round_s == pytest.approx(3 * 0.1 + 1.0 + 4 * 2.0)
    assert decentralized.hops(1) == 0
    speed_up = decentralized.pipeline_speed_up(2.5, 3, 4, 0.1, 2.0, 1.0, 0.5)
    assert speed_up == pytest.approx(2.5 * (1.0 + 8.0) / (0.3 + 2.5 + 8.0))


@given(window=st.integers(1, 16), slope=st.floats(0.0, 1.0), draft_s=st.floats(0, 0.1), **shapes)
def test_decentralized_pipeline_never_beats_the_tokens_of_a_round(window, slope, draft_s, **shape):
    k = min(shape["k"], window + 1)
    speed_up = decentralized.pipeline_speed_up(
        k, window, shape["nodes"], draft_s, shape["t1_s"], shape["t0_s"], slope
    )
    assert speed_up <= k * (1 + 1e-12)


def test_decentralized_passes_cost_from_one_to_all_tokens():
    assert decentralized.pass_s(9, 2.0, 0.0) == 2.0
    assert decentralized.pass_s(9, 2.0, 1.0) == 18.0  # the paper's own, linear


@given(st.floats(0.01, 0.9), st.integers(2, 16), st.floats(0.01, 20.0))
def test_decentralized_k_for_a_reduction_gives_it(reduction, nodes, ratio):
    k = decentralized.tokens_for_reduction(reduction, nodes, 1.0, ratio)
    if math.isfinite(k):
        assert decentralized.eq_5_reduction(k, nodes, 1.0, ratio) == pytest.approx(reduction)
    else:
        assert decentralized.eq_5_reduction(1e12, nodes, 1.0, ratio) <= reduction + 1e-9


def test_decentralized_37_percent_does_not_follow_from_its_own_parameters():
    rows = {row["t1_over_t0"]: row for row in claims().rows}
    assert rows[0.14]["reduction_at_k_3_86"] == pytest.approx(0.37, abs=0.01)
    for ratio in (3.0, 5.0, 10.0):  # the paper's range
        assert rows[ratio]["k_for_37_percent"] < 1.65
        assert rows[ratio]["reduction_at_k_3_86"] > 0.7
    assert rows[2.1]["speed_up_eq_9_at_k_3_86"] == pytest.approx(2.56, abs=0.01)


def test_decentralized_scaling_goes_to_16_nodes_and_gains_with_each():
    rows = node_scaling().rows
    assert {row["nodes"] for row in rows} == set(range(1, 17))
    for row, next_row in itertools.pairwise(rows):
        if next_row["nodes"] > row["nodes"]:
            assert row["speed_up_eq_9"] < next_row["speed_up_eq_9"]
            assert row["speed_up_pipeline"] < next_row["speed_up_pipeline"]
