"""The likeliest tokens of large rows, by parts as by sorting, and what a window of them costs."""

from __future__ import annotations

import time
import tracemalloc
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.edge_runtime.reply_logprobs import Logprobs, PromptLogprobs
from pilotfish.speculation.truncation import largest, likeliest
from pilotfish.wire.codecs.logprobs import decode_logprobs, make_entries, unknown_entries
from pilotfish.wire.protocols import Decision, Draft
from tests.support.examples import examples

V, WINDOW, MOST = 151_665, 64, 20
CLOSE = 1e-5  # nats
GOAL_S = 0.020  # of a window with all options; penalties take a part of it


@given(st.integers(0, 2**31), st.integers(0, 60), st.sampled_from([0, 7, 60, 3000, 50_000]))
@examples(60)
def test_the_likeliest_are_found_by_parts_as_by_sorting(seed: int, count: int, finite: int) -> None:
    random = np.random.default_rng(seed)
    values = random.integers(0, random.choice([3, 3000]), 50_000).astype(np.float32)
    values[random.permutation(len(values))[finite:]] = -np.inf
    ordered = np.argsort(-values, kind="stable")[: min(count, finite)]
    np.testing.assert_array_equal(likeliest(values, count), ordered)
    if count:
        least = np.sort(values)[-count]
        np.testing.assert_array_equal(largest(values, count), np.flatnonzero(values >= least))


def rows(allowed: int = V) -> np.ndarray:
    """Rows of a window's logits, all but so many tokens of each forbidden."""
    logits = np.random.default_rng(0).standard_normal((WINDOW + 1, V), np.float32) * 4
    logits[:, : V - allowed] = -np.inf
    return logits


@pytest.mark.parametrize("allowed", [3, 700, V])
def test_a_large_row_is_told_closely(allowed: int) -> None:
    logits = rows(allowed)[:2]
    logprobs = decode_logprobs(make_entries(logits, [V - 1, V - 2], MOST).tobytes(), MOST, V, (2,))
    for row, token, result in zip(logits.astype(np.float64), [V - 1, V - 2], logprobs, strict=True):
        exact = row - row.max()
        exact -= np.log(np.exp(exact).sum())
        ids = np.argsort(-row, kind="stable")[: min(MOST, allowed)]
        assert result is not None
        assert result.logprob == pytest.approx(exact[token], abs=CLOSE)
        assert [id for id, _ in result.top] == ids.tolist()
        assert [value for _, value in result.top] == pytest.approx(exact[ids].tolist(), abs=CLOSE)


@pytest.mark.parametrize("allowed", [3, V], ids=["constrained", "free"])
def test_those_of_a_window_take_little_time_and_memory(allowed: int) -> None:
    logits, log, spent_s = rows(allowed), Logprobs(MOST, 0), []
    draft = Draft(np.arange(V - WINDOW, V, dtype=np.uint32))
    tracemalloc.start()
    log.record(draft, logits, Decision(WINDOW, V - 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for _ in range(5):
        begun_s = time.thread_time()
        log.record(draft, logits, Decision(WINDOW, V - 1))
        log.commit()
        spent_s.append(time.thread_time() - begun_s)
    assert median(spent_s) < 1.5 * GOAL_S
    assert peak < 4 * V * 4  # bytes: of 65 rows


def test_what_is_kept_is_told_again_and_not_copied_for_each_token() -> None:
    log = Logprobs(2, start=5)
    logits = np.random.default_rng(0).standard_normal((1, 9), np.float32)
    messages = []
    for token in range(9):
        log.record(Draft(np.zeros(0, np.uint32)), logits, Decision(0, token))
        messages.append(bytes(log.commit()))
    assert bytes(log.frame_of(7, 3)) == b"".join(messages[2:5])
    assert bytes(log.frame_of(5, 99)) == b"".join(messages)
    assert bytes(log.frame_of(14, 1)) == b""
    spent_s = []
    for _ in range(20_000):
        begun_s = time.thread_time()
        log.commit()
        spent_s.append(time.thread_time() - begun_s)
    assert sum(spent_s[-1000:]) < 4 * sum(spent_s[:1000]) + 0.02


def test_a_prompts_cost_no_memory_before_they_are_known_and_are_not_copied() -> None:
    ids = np.arange(131_072, dtype=np.uint32) % 9
    tracemalloc.start()
    prompt = PromptLogprobs(ids, 3)
    logits = np.random.default_rng(0).standard_normal((48, 9), np.float32)
    prompt.record(96, logits)
    frame = prompt.frame
    first = tracemalloc.get_traced_memory()[1]
    again = [prompt.frame for _ in range(9)]
    assert tracemalloc.get_traced_memory()[1] < first + 100_000
    tracemalloc.stop()
    assert all(each == frame for each in again)
    wanted = unknown_entries(131_071, 3)
    wanted[48:96] = make_entries(logits, ids[49:97].tolist(), 3)
    assert bytes(frame) == wanted.tobytes()
