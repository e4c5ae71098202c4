"""What followed the last time: found as by a naive search, and quickly in a long text."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.acceptance import REPEAT_PRIOR, AcceptanceEstimator
from pilotfish.speculation.prompt_lookup import LookupMatch, find_match
from tests.support.examples import examples

texts = st.one_of(
    st.lists(st.integers(0, 3), max_size=90),
    st.lists(st.integers(0, 60), max_size=90),
    st.builds(
        lambda loop, times: loop * times, st.lists(st.integers(0, 5), max_size=9), st.just(9)
    ),
)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.uint32)


def naive(text: list[int], least: int) -> tuple[int, int] | None:
    """Start and length, by trying every place."""
    results = []
    for start in range(least, len(text)):
        length = 0
        while length < min(start, 16) and text[start - 1 - length] == text[-1 - length]:
            length += 1
        if length >= least:
            results.append((length, start))
    return max(results[-32:])[::-1] if results else None


@given(texts, st.integers(1, 4))
@examples(500)
def test_it_finds_what_a_naive_search_finds(text, least):
    match = find_match(ids(*text), least)
    assert (match and (match.start, match.length)) == naive(text, least)


@given(texts, st.integers(1, 20))
@examples(200)
def test_a_continuation_is_what_followed_and_goes_round_in_loops(text, most):
    match = find_match(ids(*text))
    if match is None:
        return
    expected = list(text)
    for _ in range(most):  # token by token, each from as far back as the first
        expected.append(expected[match.start - match.end])
    assert match.continuation(ids(*text), most).tolist() == expected[len(text) :]


@given(texts, st.integers(1, 12), st.data())
@examples(300)
def test_it_goes_on_along_the_same_place_while_the_text_does(text, more, data):
    before = ids(*text)
    match = find_match(before)
    if match is None:
        return
    foretold = match.continuation(before, more + 4)
    followed = match.extend(np.concatenate([before, foretold[:more]]))
    assert followed == LookupMatch(match.start + more, len(text) + more, match.length + more)
    after = np.concatenate([before, foretold[:more]])
    np.testing.assert_array_equal(followed.continuation(after, 4), foretold[more:])
    astray = data.draw(st.integers(0, more - 1))
    after[len(text) + astray] += 1
    assert match.extend(after) is None
    assert match.extend(before) == match


def test_the_longest_match_wins_and_of_equals_the_latest():
    match = find_match(ids(1, 2, 3, 7, 0, 2, 3, 8, 0, 2, 3, 9, 1, 2, 3))
    assert match == LookupMatch(start=3, end=15, length=3)
    match = find_match(ids(5, 2, 3, 7, 0, 2, 3, 8, 0, 2, 3, 9, 1, 2, 3))
    assert match == LookupMatch(start=11, end=15, length=2)
    assert find_match(ids(4, 2, 3, 7, 3), least=2) is None


@pytest.mark.parametrize("kind", ["words", "one token", "a loop"])
def test_a_long_text_is_searched_in_a_millisecond(kind):
    made = {
        "words": np.random.default_rng(0).zipf(1.2, 131_072) % 49_152,
        "one token": np.zeros(131_072),
        "a loop": np.arange(131_072) % 7,
    }
    text = made[kind].astype(np.uint32)
    taken = []
    for _ in range(20):
        begun = time.perf_counter()
        find_match(text)
        taken.append(time.perf_counter() - begun)
    assert min(taken) < 1e-3


def test_odds_of_repeats_are_learnt_by_their_length():
    """Three of ten short matches go on, and nine of ten long ones."""
    rng = np.random.default_rng(5)
    odds = AcceptanceEstimator(REPEAT_PRIOR)
    assert odds.estimate(1) < 0.5
    for _ in range(150):
        odds.update(1, bool(rng.random() < 0.3))
        odds.update(16, bool(rng.random() < 0.95))
    assert odds.estimate(1) == pytest.approx(0.3, abs=0.1)
    assert odds.estimate(16) == pytest.approx(0.95, abs=0.06)
