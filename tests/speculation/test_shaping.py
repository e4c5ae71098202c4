"""Bias and penalties change each row as the reference does; min-p keeps what it should."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.logits_options import (
    MOST_BIASED,
    LogitsOptions,
    LogitsProcessor,
    node_paths,
)
from pilotfish.speculation.truncation import truncate
from tests.support.examples import examples
from tests.support.shaped import shaped, shapings

VOCAB = 7
texts = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@st.composite
def windows(draw):
    """Tokens of a chain or a tree, and their parents."""
    ids = draw(texts)
    tree = draw(st.booleans())
    parents = [draw(st.integers(-1, at - 1)) for at in range(len(ids))] if tree else None
    return ids, parents


@given(shapings(VOCAB), texts.filter(bool), texts, windows(), st.integers(0, 2**31))
@examples(300)
def test_each_row_is_shaped_by_its_own_path(message, prompt, answer, window, seed):
    paths = node_paths(*window)
    logits = np.random.default_rng(seed).standard_normal((len(paths), VOCAB), np.float32) * 3
    wanted = [
        shaped(row, prompt, [*answer, *path], message)
        for row, path in zip(logits, paths, strict=True)
    ]
    shaper = LogitsProcessor(message, len(prompt))
    for _ in range(2):  # asked again, it says the same
        rows = logits.copy()
        shaper.process(rows, np.array([*prompt, *answer], np.uint32), paths)
        np.testing.assert_array_equal(rows, wanted)


def test_what_cannot_be_said_stays_so():
    """A drafter across a bridge has no logits for tokens of the target's alone."""
    logits = np.array([[1.0, -np.inf, 0.0]], np.float32)
    logits_options = LogitsOptions(
        logit_bias={1: 100.0}, repetition_penalty=2.0, frequency_penalty=-2.0
    )
    LogitsProcessor(logits_options, 1).process(logits, np.array([1, 1], np.uint32), [[1]])
    assert logits[0, 1] == -np.inf
    assert not np.isnan(logits).any()


def test_paths_of_a_tree():
    assert node_paths([4, 5, 6], [-1, -1, 1]) == [[], [4], [5], [5, 6]]
    assert node_paths([4, 5], None) == [[], [4], [4, 5]]


@pytest.mark.parametrize(
    "message",
    [
        {"logit_bias": {0: 100.1}},
        {"logit_bias": {0: float("nan")}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": dict.fromkeys(range(MOST_BIASED + 1), 1.0)},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"frequency_penalty": 2.1},
        {"presence_penalty": float("nan")},
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(message):
    with pytest.raises(ValueError, match=next(iter(message))):
        LogitsOptions(**message)


# min-p

floors = st.sampled_from([0.01, 0.1, 0.5, 1.0])


@given(st.integers(0, 2**31), floors, st.sampled_from([0.5, 1.0, 1.7]))
@examples(100)
def test_min_p_keeps_what_is_likely_beside_the_likeliest(seed, floor, temperature):
    logits = np.random.default_rng(seed).standard_normal((1, 40), np.float32) * 2
    whole = probabilities(logits, Sampling(temperature=temperature))[0]
    cut = Sampling(temperature=temperature, min_p=floor)
    selection = probabilities(logits, cut)[0]
    clear = np.abs(whole / whole.max() - floor) > 1e-5  # not at the border itself
    np.testing.assert_array_equal((selection > 0)[clear], (whole >= floor * whole.max())[clear])
    np.testing.assert_allclose(
        selection[selection > 0], whole[selection > 0] / whole[selection > 0].sum(), rtol=1e-5
    )
    # the drafter's q̂ is cut by the same rule, but for what is lighter than its quantisation
    np.testing.assert_array_equal(truncate(logits[0], cut).ids, np.flatnonzero(selection > 0))


@given(st.integers(0, 2**31), floors, st.integers(1, 40), st.sampled_from([0.3, 0.9, 1.0]))
@examples(60)
def test_min_p_comes_before_top_k_and_top_p(seed, floor, top_k, top_p):
    logits = np.random.default_rng(seed).standard_normal((1, 40), np.float32) * 2
    cut = probabilities(logits, Sampling(temperature=1.0, min_p=floor))[0]
    left = np.where(cut > 0, logits[0], -np.inf).astype(np.float32)[None]
    wanted = probabilities(left, Sampling(temperature=1.0, top_k=top_k, top_p=top_p))
    whole = Sampling(temperature=1.0, min_p=floor, top_k=top_k, top_p=top_p)
    np.testing.assert_allclose(probabilities(logits, whole), wanted, rtol=1e-5)
    np.testing.assert_array_equal(truncate(logits[0], whole).ids, np.flatnonzero(wanted[0]))


@pytest.mark.parametrize("min_p", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(min_p):
    with pytest.raises(ValueError, match="min_p"):
        Sampling(min_p=min_p)
