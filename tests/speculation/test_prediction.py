"""A cursor in a prediction: it moves with the answer, and finds its way back after an edit."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.prediction import PredictionCursor, count_taken, remaining
from tests.support.examples import examples

texts = st.one_of(
    st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 99), max_size=60)
)
OLD = [*range(100, 200)]


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.uint32)


def expected_after(old: list[int], answer: list[int], most: int = 4) -> list[int]:
    cursor = PredictionCursor(ids(old))
    for token in answer:
        cursor.follow([token])
    return cursor.expected(most).tolist()


def test_it_begins_at_the_beginning_and_moves_with_the_answer() -> None:
    cursor = PredictionCursor(ids(OLD))
    assert cursor.expected(3).tolist() == OLD[:3]
    assert cursor.follow(OLD[:5]) == 5
    assert cursor.expected(2).tolist() == OLD[5:7]
    assert cursor.margins(2) == [5.0, 6.0]
    assert cursor.follow(OLD[5:]) == 95
    assert cursor.expected(9).tolist() == []
    assert cursor.taken == 100


def test_after_each_kind_of_edit_it_goes_on_behind_the_edit() -> None:
    before, after = OLD[:40], OLD[40:60]
    assert expected_after(OLD, [*before, 7, 8, 9, *after]) == OLD[60:64]  # inserted
    assert expected_after(OLD, [*before, *after[10:]]) == OLD[60:64]  # removed
    assert expected_after(OLD, [*before, 7, 8, *after[2:]]) == OLD[60:64]  # replaced
    assert expected_after(OLD, [7, 7, *before]) == OLD[40:44]  # before all
    assert expected_after(OLD, [*OLD[50:70], *before]) == OLD[40:44]  # moved


def test_a_token_that_replaces_another_is_followed_by_what_followed_the_other() -> None:
    assert expected_after(OLD, [*OLD[:10], 7]) == OLD[11:15]


def test_of_equal_matches_the_nearest_is_taken_and_a_long_one_wins_over_a_near_one() -> None:
    line = [1, 2, 3]
    old = [*line, 10, *range(200, 240), *line, 11, *range(300, 340), *line, 12]
    at = old.index(11)
    assert expected_after(old, [*old[: at - 5], 9, 9, *line], 1) == [11]
    moved = [50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60]
    old = [60, 1, *range(100, 200), *moved, 2]
    assert expected_after(old, [5, *moved], 1) == [2]


@given(texts, texts, st.integers(1, 7))
@examples(300)
def test_whatever_the_texts_counts_and_places_are_possible(old, answer, step) -> None:
    cursor = PredictionCursor(ids(old))
    for at in range(0, len(answer), step):
        tokens = answer[at : at + step]
        guess = cursor.expected(len(tokens)).tolist()
        agreed = cursor.follow(tokens)
        assert tokens[:agreed] == guess[:agreed]
        assert agreed == len(tokens) or tokens[agreed : agreed + 1] != guess[agreed : agreed + 1]
        assert all(margin >= 0 for margin in cursor.margins(3))
    assert 0 <= cursor.taken <= min(len(old), len(answer))
    assert count_taken(ids(old), answer) <= min(len(old), len(answer))
    left = remaining(ids(old), answer).tolist()
    assert left == old[len(old) - len(left) :]


@given(texts)
@examples(60)
def test_a_text_takes_all_of_itself(text) -> None:
    assert count_taken(ids(text), text) == len(text)
    assert remaining(ids(text), text).tolist() == []
    assert remaining(ids(text), []).tolist() == text


def test_a_search_takes_little_time_whatever_the_prediction() -> None:
    for old in ([5] * 131_072, [*range(256)] * 512):
        cursor = PredictionCursor(ids(old))
        began_s = time.thread_time()
        for token in [300, 5] * 100:
            cursor.follow([token])
        assert (time.thread_time() - began_s) / 200 < 2e-3
