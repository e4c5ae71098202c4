"""Which tokens of a window pass before a decision head: the rule of `wisv`, enumerated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.agreement import accept_forgiven, count_agreed, mismatches

VOCAB = 3
LONGEST = 4

Window = Sequence[int]
Outcome = tuple[int, int, int]


def ids(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.uint32)


def argmaxes(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def every_round() -> Iterator[tuple[Window, Window]]:
    """All windows of up to four tokens out of three, with all that the target may choose."""
    for length in range(LONGEST + 1):
        for window in product(range(VOCAB), repeat=length):
            for choices in product(range(VOCAB), repeat=length + 1):
                yield window, choices


def as_the_paper_tells(window: Window, choices: Window, critical: set[int]) -> Outcome:
    """wisv §III-A: (2) locate by argmax, (3) ask the head, (4) roll back at the earliest rejected.

    critical: the positions at which the head rejects, if it is asked.
    """
    committed: list[int] = []
    forgiven = 0
    for position, token in enumerate(window):
        if token != choices[position]:
            if position in critical:
                return len(committed), choices[position], forgiven
            forgiven += 1
        committed.append(token)
    return len(committed), choices[-1], forgiven


def test_the_rule_is_the_papers_in_every_case() -> None:
    seen = 0
    for window, choices in every_round():
        x, y = ids(window), argmaxes(choices)
        result = [at for at, token in enumerate(window) if token != choices[at]]
        assert mismatches(x, y).tolist() == result
        for rejected in product((False, True), repeat=len(result)):
            critical = {at for at, reject in zip(result, rejected, strict=True) if reject}
            expected = as_the_paper_tells(window, choices, critical)
            assert accept_forgiven(x, y, np.array(rejected, dtype=np.bool_)) == expected
            seen += 1
    # at each position one token agrees and two do not, with two verdicts each
    assert seen == sum(VOCAB * (VOCAB * (1 + 2 * 2)) ** length for length in range(LONGEST + 1))


def test_all_rejected_is_greedy_in_every_case() -> None:
    for window, choices in every_round():
        x, y = ids(window), argmaxes(choices)
        accepted, token, forgiven = accept_forgiven(
            x, y, np.ones(len(mismatches(x, y)), dtype=np.bool_)
        )
        assert (accepted, token) == count_agreed(window, choices.__getitem__)
        assert forgiven == 0


def test_none_rejected_is_the_whole_window_in_every_case() -> None:
    for window, choices in every_round():
        x, y = ids(window), argmaxes(choices)
        count = len(mismatches(x, y))
        outcome = accept_forgiven(x, y, np.zeros(count, dtype=np.bool_))
        assert outcome == (len(window), choices[-1], count)


@st.composite
def scored(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A window, the target's choices, and ρ of each mismatch."""
    window = draw(st.lists(st.integers(0, VOCAB - 1), max_size=64))
    choices = draw(
        st.lists(st.integers(0, VOCAB - 1), min_size=len(window) + 1, max_size=len(window) + 1)
    )
    count = len(mismatches(ids(window), argmaxes(choices)))
    scores = draw(st.lists(st.floats(0.01, 0.99), min_size=count, max_size=count))
    return ids(window), argmaxes(choices), np.array(scores)


@given(scored(), st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2).map(sorted))
def test_a_higher_threshold_forgives_no_less(
    case: tuple[np.ndarray, np.ndarray, np.ndarray], thresholds: list[float]
) -> None:
    window, choices, scores = case
    stricter, laxer = (
        accept_forgiven(window, choices, scores > threshold) for threshold in thresholds
    )
    assert stricter[0] <= laxer[0]
    assert stricter[2] <= laxer[2]
    assert accept_forgiven(window, choices, scores > 0.0)[2] == 0
    assert accept_forgiven(window, choices, scores > 1.0)[0] == len(window)


@given(scored(), st.data())
def test_only_the_earliest_rejection_counts(
    case: tuple[np.ndarray, np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    window, choices, scores = case
    rejected = scores > 0.5
    outcome = accept_forgiven(window, choices, rejected)
    for at in range(outcome[2] + 1, len(rejected)):
        rejected[at] = data.draw(st.booleans())
    assert accept_forgiven(window, choices, rejected) == outcome


@given(scored())
def test_forgiven_tokens_are_the_accepted_ones_that_the_target_would_not_choose(
    case: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    window, choices, scores = case
    accepted, token, forgiven = accept_forgiven(window, choices, scores > 0.5)
    assert forgiven == np.count_nonzero(window[:accepted] != choices[:accepted])
    assert token == choices[accepted]
    if accepted < len(window):
        assert token != window[accepted]


def test_ids_at_the_ends_of_their_type() -> None:
    last = 2**32 - 1
    assert accept_forgiven(ids([last, 0]), argmaxes([last, last, 7]), [True]) == (1, last, 0)
    assert accept_forgiven(ids([last, 0]), argmaxes([last, 0, 7]), []) == (2, 7, 0)


@pytest.mark.parametrize(
    ("window", "choices", "rejected"),
    [
        ([1, 2], [1, 2], []),
        ([1, 2], [1, 2, 3, 4], []),
        ([1, 2], [1, 0, 3], []),
        ([1, 2], [1, 0, 3], [True, False]),
        ([1, 2], [1, 2, 3], [True]),
        ([], [], []),
    ],
)
def test_counts_that_do_not_fit(window: Window, choices: Window, rejected: list[bool]) -> None:
    with pytest.raises(ValueError, match="not an array of shape \\("):
        accept_forgiven(ids(window), argmaxes(choices), rejected)
