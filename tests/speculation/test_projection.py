"""A drafter's logits on the tokens that its columns stand for, and −∞ on all others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.projection import Projection
from tests.support.examples import examples

ONE = Sampling(temperature=1.0)


@st.composite
def places(draw: st.DrawFn) -> tuple[NDArray[np.int64], int]:
    """Some tokens of a vocabulary in any order, and columns that stand for none."""
    size = draw(st.integers(1, 40))
    result = draw(st.permutations(range(size)))[: draw(st.integers(1, size))]
    columns = draw(st.permutations([*result, *[size] * draw(st.integers(0, 5))]))
    return np.array(columns, np.int64), size


@given(places(), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 2**32))
@examples(100)
def test_it_is_the_naive_scatter(
    made: tuple[NDArray[np.int64], int], rows: list[int], seed: int
) -> None:
    columns, size = made
    project, random = Projection(columns, size), np.random.default_rng(seed)
    for count in rows:  # the buffer grows, and is used again
        logits = random.standard_normal((count, len(columns))).astype(np.float32)
        wanted = np.full((count, size), -np.inf, np.float32)
        for row in range(count):
            for column, token in enumerate(columns):
                if token < size:
                    wanted[row, token] = logits[row, column]
        result = project(logits)
        assert result.dtype == np.float32
        assert np.array_equal(result, wanted)
        assert not np.shares_memory(result, logits)
        reply = columns < size
        mass = probabilities(logits.astype(float), ONE)[:, reply]
        q = probabilities(result.astype(float), ONE)[:, columns[reply]]
        np.testing.assert_allclose(q * mass.sum(axis=1, keepdims=True), mass, rtol=1e-6)


def test_it_knows_what_it_reaches() -> None:
    project = Projection(np.array([4, 6, 0, 6]), 6)
    assert [token for token in range(6) if project.reaches(token)] == [0, 4]


def test_a_whole_head_is_copied_and_reaches_every_token() -> None:
    project, logits = Projection(None, 6), np.arange(12, dtype=np.float32).reshape(2, 6)
    result = project(logits)
    assert result.dtype == np.float32
    assert np.array_equal(result, logits)
    assert not np.shares_memory(result, logits)
    assert all(project.reaches(token) for token in range(6))


@pytest.mark.parametrize("remaining", [1, 5])
def test_rows_that_another_call_left_do_not_show(remaining: int) -> None:
    project = Projection(np.arange(remaining), 8)
    project(np.full((3, remaining), 7.0, np.float32))
    assert np.isneginf(project(np.zeros((1, remaining), np.float32))[0, remaining:]).all()
