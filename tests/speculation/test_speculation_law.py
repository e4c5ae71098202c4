"""The output law of speculation equals the target's, by enumeration of every outcome.

`tests/enumeration.py` replays drafting and the rules of `speculation` in all ways that they can go.
The mutants of `tests/wire/test_mutants.py` show that these tests see small mistakes.
"""

from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.acceptance import predicted_acceptance
from pilotfish.speculation.agreement import count_agreed
from pilotfish.speculation.candidates import choose, residual
from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.rows import Row
from pilotfish.speculation.split import systematic
from pilotfish.speculation.tree import Tree, chain, nodes_at_most, verify
from pilotfish.speculation.truncation import LEVEL_WEIGHTS, SparseRows, largest, truncate
from tests.support.enumeration import (
    KINDS,
    Model,
    distribution_of,
    dither,
    kinds,
    law_of,
    output_law,
    play_round,
    play_split_round,
    samplings,
    target_law,
    ways,
)
from tests.support.examples import examples

EXACT = 1e-12
CHAINS = ((1,), (1, 1), (1, 1, 1))
TREES = ((2,), (3,), (2, 2), (2, 1), (1, 2))
LARGE_TREES = ((2, 2), (1, 1, 1))  # these only over few tokens


@st.composite
def pairs(draw):
    """A target and a drafter, their samplings, and the shape of a window."""
    expansion = draw(st.sampled_from(CHAINS + TREES))
    vocab = draw(st.integers(3, 3 if expansion in LARGE_TREES else 5))
    seed, kind = draw(st.integers(0, 2**31)), draw(kinds)
    target, drafter = (Model(vocab, seed, side, kind) for side in (0, 1))
    return target, draw(samplings), drafter, draw(samplings), expansion


def dense(model, sampling):
    """q as `dsd` ships it: float32 numbers that sum to 1 only roughly."""
    q = law_of(model, sampling)
    return cache(lambda prefix: Row(q(prefix)))


def truncated(model, sampling):
    """q̂ as `tslt` and `tree` ship it."""
    return cache(lambda prefix: truncate(model.logits(prefix), sampling).row(0))


def rounded(model, sampling, bits):
    """q as `dssd` samples from it: whole numbers."""
    q = law_of(model, sampling)
    return cache(lambda prefix: Row(systematic(q(prefix), bits, 0.5)))


def assert_exact(play, p, length):
    law = output_law(play, p, length)
    np.testing.assert_allclose(law, target_law(p, length), rtol=0, atol=EXACT)


# What really runs


@given(pairs(), st.sampled_from([dense, truncated, partial(rounded, bits=3)]))
@examples(150)
def test_output_law_equals_target(pair, shipped):
    target, sampling, drafter, drafting, expansion = pair
    p, q = law_of(target, sampling), shipped(drafter, drafting)
    assert_exact(partial(play_round, expansion, q, p), p, len(expansion) + 1)


@pytest.mark.parametrize("expansion", [*CHAINS, *TREES])
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_meets_every_kind_of_pair(expansion, kind):
    vocab = 3 if expansion in LARGE_TREES else 4
    target, drafter = (Model(vocab, 5, side, kind) for side in (0, 1))
    p = law_of(target, Sampling(temperature=1.0))
    for drafting in ({"top_k": 1}, {"top_p": 0.05}, {"top_k": 2}, {"top_p": 0.8}, {}):
        q = truncated(drafter, Sampling(temperature=1.0, **drafting))
        assert_exact(partial(play_round, expansion, q, p), p, len(expansion) + 1)


@pytest.mark.parametrize("expansion", [(2, 2, 1), (3, 2), (4,)])
def test_larger_trees(expansion):
    target, drafter = (Model(3, 11, side) for side in (0, 1))
    p = law_of(target, Sampling(temperature=1.0))
    q = truncated(drafter, Sampling(temperature=1.0, top_k=2))
    assert_exact(partial(play_round, expansion, q, p), p, len(expansion) + 1)


@given(pairs(), st.floats(0.2, 1.0))
@examples(80)
def test_a_window_that_ends_early_by_confidence_keeps_the_law(pair, enough):
    target, sampling, drafter, drafting, expansion = pair
    p, q = law_of(target, sampling), truncated(drafter, drafting)
    play = early(drafter, expansion, q, p, enough)
    assert_exact(play, p, len(expansion) + 1)


def early(drafter, expansion, q, p, enough):
    def predicted(prefix):
        return predicted_acceptance(drafter.logits(prefix), expansion[len(prefix)])

    return partial(play_round, expansion, q, p, predicted=predicted, enough=enough)


@pytest.mark.parametrize("expansion", [(1, 1, 1), (1, 2, 1)])
def test_windows_of_two_lengths_in_one_round_keep_the_law(expansion):
    """What is drafted first decides on the third level."""
    target, drafter = (Model(3, 8, side) for side in (0, 1))
    p = law_of(target, Sampling(temperature=1.0))
    q = truncated(drafter, Sampling(temperature=1.0))
    first = predicted_acceptance(drafter.logits(()), expansion[0])
    seconds = [predicted_acceptance(drafter.logits((x,)), expansion[1]) for x in range(3)]
    enough = first * sorted(seconds)[1]
    requests = []
    play = early(drafter, expansion, lambda prefix: requests.append(prefix) or q(prefix), p, enough)
    levels = set()
    for _ in ways(play):
        levels.add(max(map(len, requests)) + 1)
        requests.clear()
    assert levels == {2, 3}
    assert_exact(play, p, len(expansion) + 1)


@given(pairs(), st.integers(1, 5))
@examples(80)
def test_rounding_p_with_an_independent_uniform_keeps_the_law(pair, bits):
    target, sampling, drafter, drafting, expansion = pair
    length = min(len(expansion), 2)
    p, q = law_of(target, sampling), rounded(drafter, drafting, 4)
    assert_exact(partial(play_split_round, length, q, p, bits=bits), p, length + 1)


# The rules' parts


def test_the_float32_numbers_that_are_shipped_are_the_law():
    """q as shipped sums to 1 only roughly; the ratio is over q divided by its float64 sum."""
    p = law_of(Model(4, 3, 0), Sampling(temperature=1.0))
    weights = (p((1,)) * 1.0004).astype(np.float32)
    row = Row(weights)
    assert row.total != 1.0
    assert row.probabilities().sum() == pytest.approx(1.0, abs=1e-15)
    assert_exact(partial(play_round, (1, 1), lambda _: row, p), p, 3)


@given(pairs())
def test_identical_distributions_are_always_accepted(pair):
    target, sampling, _, _, expansion = pair
    q = dense(target, sampling)
    for ended, probability in ways(partial(play_round, expansion, q, law_of(target, sampling))):
        assert len(ended.tokens) == len(expansion) or probability < 1e-15


def test_the_residual_of_equal_distributions_is_guarded():
    p = probabilities(np.array([[0.3, 2.0, -1.0, 0.5]]), Sampling(temperature=1.0))[0]
    np.testing.assert_array_equal(residual(p, Row(p)), p)  # 0/0


def test_a_certain_acceptance_asks_no_further():
    tossed = []

    def coin(probability):
        tossed.append(probability)
        return probability >= 1.0

    choice = choose([2, 0, 1], Row(np.array([0.5, 0.2, 0.3])), np.array([0.2, 0.4, 0.4]), coin)
    assert choice.accepted == 0
    assert choice.residual is None
    assert tossed == [1.0]


@given(pairs(), st.integers(1, 24), st.floats(0.0, 1.0, exclude_max=True))
def test_systematic_rounding_is_off_by_less_than_one(pair, bits, offset):
    target, sampling, *_ = pair
    p = law_of(target, sampling)(())
    counts = systematic(p, bits, offset)
    exact = p / p.sum(dtype=np.float64) * 2**bits
    assert counts.sum() == 2**bits
    assert counts.min() >= 0
    assert np.abs(counts - exact).max() < 1 + 1e-7
    assert not counts[p == 0].any()


@given(pairs(), st.integers(1, 16))
def test_systematic_rounding_is_unbiased(pair, bits):
    target, sampling, *_ = pair
    p = law_of(target, sampling)(())
    mean = np.zeros(len(p))
    for offset, probability in ways(partial(dither, p, bits)):
        mean += probability * systematic(p, bits, offset)
    np.testing.assert_allclose(mean * 2.0**-bits, p / p.sum(dtype=np.float64), atol=EXACT)


def test_tokens_of_probability_zero_get_no_weight_however_the_sum_rounds():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        p = np.append(rng.random(5).astype(np.float32), np.zeros(2, np.float32))
        for offset in (2.0**-54, 0.5, 1 - 2.0**-53):
            assert not systematic(p, 16, offset)[5:].any()


@pytest.mark.parametrize("bits", [1, 16, 24])
def test_what_is_rounded_sums_to_its_bits_though_the_last_offset_is_lost(bits):
    """2ᵇ + (1 − 2⁻⁵³) is 2ᵇ + 1 in float64: a token too many, which no device would take."""
    for p in (np.array([0.25, 0.75]), np.array([0.5, 0.5, 0.0]), np.array([1.0])):
        counts = systematic(p, bits, 1 - 2.0**-53)
        assert counts.sum() == 2**bits
        assert counts.max() <= 2**bits


@given(pairs())
def test_truncation_keeps_the_shape_and_rounds_to_the_nearest_level(pair):
    *_, drafter, drafting, _ = pair
    logits = drafter.logits(())
    row = truncate(logits, drafting).row(0)
    full = probabilities(logits[None].astype(np.float64), drafting)[0]
    assert (np.diff(row.ids.astype(int)) > 0).all()
    assert row.weights.max() == LEVEL_WEIGHTS[0]
    selection = full[row.ids]
    # relative to the heaviest token; what is too light for the lowest level is left out
    ratio = (row.weights / row.weights.max()) / (selection / selection.max())
    octaves = np.log2(selection.max() / selection)
    steps = np.select([octaves < 4, octaves < 8, octaves < 12], [1 / 8, 1 / 4, 1 / 2], 1.0)
    assert (np.abs(np.log2(ratio)) <= steps / 2 + 1e-6).all()
    lost = np.delete(full, row.ids)
    assert (lost <= full.max() * 2.0**-31.49).all()


def test_rows_of_one_frame_are_told_apart():
    parts = [
        truncate(Model(5, i, 0).logits(()), Sampling(temperature=1.0, top_k=i + 1))
        for i in range(4)
    ]
    joined = SparseRows.join(parts)
    assert len(joined) == 4
    for index, part in enumerate(parts):
        np.testing.assert_array_equal(
            distribution_of(joined.row(index), 5), distribution_of(part.row(0), 5)
        )
    assert len(SparseRows.join([])) == 0


@given(st.integers(0, 2**31), st.integers(1, 40))
@examples(30)
def test_the_largest_are_found_by_blocks_as_by_sorting(seed, count):
    values = np.random.default_rng(seed).integers(0, 3000, 20_000).astype(np.float32)
    least = np.sort(values)[-count]
    np.testing.assert_array_equal(largest(values, count), np.flatnonzero(values >= least))


def test_equal_candidates_share_a_node_and_keep_their_order():
    tree = Tree()
    tree.grow([[4, 2, 4]])
    tree.grow([[1, 1, 0], [3, 2, 1]])
    assert tree.ids.tolist() == [4, 2, 1, 0, 3, 2, 1]
    assert tree.parents.tolist() == [-1, -1, 0, 0, 1, 1, 1]
    assert tree.candidates == [(1, 2, 1), (3, 3, 4), (5, 6, 7)]
    assert tree.expansion == (3, 3)
    assert list(tree.level) == [3, 4, 5, 6, 7]
    assert tree.tokens(tree.path(6)) == [2, 2]
    assert tree.path(0) == []


def test_coins_of_a_tree_are_numbered_as_its_candidates_were_drawn():
    """One for each candidate, also where two are equal and share a node; the wire's law."""
    tree = Tree()
    tree.grow([[1, 1]])
    tree.grow([[2, 2]])
    even = Row(np.full(3, 1 / 3))
    tossed = []

    def coin(number, probability):
        tossed.append((number, probability))
        return number in (1, 3)  # of equal candidates the second is taken

    # the target likes what is drafted less than the drafter does: no coin is certain
    rows = [np.array([0.5, 0.25, 0.25]), np.array([0.5, 0.25, 0.25]), np.array([1.0, 0.0, 0.0])]
    walk = verify(tree.candidates, tree.ids, lambda _: even, rows.__getitem__, coin)
    assert [number for number, _ in tossed] == [0, 1, 2, 3]
    assert walk.node == 2
    assert not walk.rejected


def test_the_sizes_of_trees_and_chains():
    assert [nodes_at_most(e) for e in [(), (1, 1), (2, 2, 2), (4, 2, 1)]] == [0, 2, 14, 20]
    assert chain(3) == [(1,), (2,), (3,)]


def test_agreed():
    choices = [5, 6, 8, 9]
    assert count_agreed([5, 6, 7], choices.__getitem__) == (2, 8)
    assert count_agreed(np.array([], dtype=np.uint32), choices.__getitem__) == (0, 5)
    assert count_agreed([5, 6, 8], choices.__getitem__) == (3, 9)
