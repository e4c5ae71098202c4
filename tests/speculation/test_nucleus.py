"""The nucleus is the smallest set of the heaviest tokens, and a flat row's is soon found."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.distributions import nucleus
from tests.support.examples import examples

VOCAB = 151_665
# Maximum time, as a share of the time for sorting the ids by weight. Machines need 0.15 to 0.5.
MOST = 0.75


@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 7, 1024, 3000]),
    st.sampled_from([0.1, 0.5, 0.9, 0.999, 1 - 2**-50]),
    st.sampled_from([np.float32, np.float64]),
    st.booleans(),
)
@examples(150)
def test_it_is_what_sorting_all_tokens_says(
    seed: int, size: int, mass: float, kind: type[np.floating], coarse: bool
) -> None:
    random = np.random.default_rng(seed)
    weights = random.random(size) ** int(random.integers(1, 40))
    weights[random.random(size) < 0.3] = 0.0
    if coarse:  # most are equal to others
        weights = np.ceil(weights * 4) / 4
    weights[0] = max(weights[0], 0.1)
    weights = weights.astype(kind)
    ordered = np.argsort(-weights, kind="stable")
    running = np.cumsum(weights[ordered], dtype=np.float64)
    count = int(np.searchsorted(running, mass * weights.sum(dtype=np.float64))) + 1
    selection = ordered[:count]
    wanted = np.zeros(size, np.bool_)
    wanted[selection[weights[selection] > 0]] = True
    np.testing.assert_array_equal(nucleus(weights, mass), wanted)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_nothing_has_no_nucleus(kind: type[np.floating]) -> None:
    assert not nucleus(np.zeros(5, kind), 0.5).any()


@pytest.mark.parametrize("temperature", [1.0, 100.0])
def test_that_of_a_flat_row_is_soon_found(temperature: float) -> None:
    logits = 3 * np.random.default_rng(0).standard_normal(VOCAB, np.float32)
    weights = np.exp(logits / np.float32(temperature))

    def spent_s(work: Callable[[], object]) -> float:
        begun_s = time.thread_time()
        work()
        return time.thread_time() - begun_s

    pairs = [
        (
            spent_s(lambda: nucleus(weights, 0.95)),
            spent_s(lambda: np.argsort(-weights, kind="stable")),
        )
        for _ in range(9)
    ]
    found_s, sorted_s = map(median, zip(*pairs, strict=True))
    assert found_s < MOST * sorted_s
