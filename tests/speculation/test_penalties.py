"""Counts that grow with a text say what counting it anew says, and cost what a row costs."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pilotfish.speculation import penalties
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.logits_options import (
    MOST_BIASED,
    LogitsOptions,
    LogitsProcessor,
    node_paths,
)
from tests.support.examples import examples

V, WINDOW, LONG = 151_665, 64, 131_000
GOAL_S = 0.020  # of a window with all options; logprobs take a good half of it

penalised = st.builds(
    LogitsOptions,
    logit_bias=st.dictionaries(st.integers(0, 8), st.sampled_from([-1.5, 0.3, 100.0]), max_size=2),
    repetition_penalty=st.sampled_from([1.0, 1e-3, 0.7, 1.3, 1e3]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 0.3, 1.1]),
    presence_penalty=st.sampled_from([0.0, -0.7, 0.3, 2.0]),
)
tokens = st.integers(0, 8)


def plainly(
    row: Floats, prompt: Sequence[int], answer: Sequence[int], message: LogitsOptions
) -> Floats:
    """One row, token by token, each number of the row's own type."""
    row, kind = row.copy(), row.dtype.type
    for token in range(len(row)):
        row[token] += np.float32(message.logit_bias.get(token, 0.0))
        times = [*answer].count(token)
        if message.repetition_penalty != 1.0 and (times or token in prompt):
            factor = kind(message.repetition_penalty)
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= kind(message.frequency_penalty) * kind(times)
        row[token] -= kind(message.presence_penalty) * kind(times > 0)
    return row


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[float, list[int], list[list[int]]]]:
    """Of each call: how much of the last text is kept, what follows, and the rows' paths."""
    paths = st.lists(st.lists(tokens, max_size=4), max_size=5)
    selection = st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.0])
    call = st.tuples(selection, st.lists(tokens, max_size=5), paths)
    return draw(st.lists(call, min_size=1, max_size=6))


@pytest.mark.parametrize("vocab", [9, 200], ids=["whole rows", "by token"])
@given(penalised, st.lists(tokens, max_size=6), changes(), st.integers(0, 2**31), st.booleans())
@examples(150)
def test_a_text_that_grows_is_cut_and_goes_another_way(
    vocab: int, message: LogitsOptions, text: list[int], series: Any, seed: int, wide: bool
) -> None:
    random = np.random.default_rng(seed)
    since = int(random.integers(0, len(text) + 1))
    shaper = LogitsProcessor(message, since)
    for selection, more, paths in series:
        text = [*text[: round(selection * len(text))], *more]
        logits = random.standard_normal((len(paths), vocab)) * 3
        logits = logits.astype(np.float64 if wide and random.random() < 0.5 else np.float32)
        logits[random.random(logits.shape) < 0.1] = -np.inf
        logits[random.random(logits.shape) < 0.1] = -0.0
        wanted = [
            plainly(row, text[:since], [*text[since:], *path], message)
            for row, path in zip(logits, paths, strict=True)
        ]
        padded = np.zeros((len(paths), vocab + 3), logits.dtype)  # as a head with padding has them
        padded[:, :vocab] = logits
        shaper.process(padded[:, :vocab], np.array(text, np.uint32), paths)
        np.testing.assert_array_equal(padded[:, :vocab], np.reshape(wanted, logits.shape))
        assert not padded[:, vocab:].any()


def test_a_text_whose_array_changes_is_noticed() -> None:
    """A session's text is a view of an array that is written again."""
    shaper = LogitsProcessor(LogitsOptions(presence_penalty=1.0), 0)
    room = np.array([1, 2, 3], np.uint32)
    for changed in (1, 4, 2):
        room[0] = changed
        row = np.zeros((1, 5), np.float32)
        shaper.process(row, room, [[]])
        assert {*np.flatnonzero(row[0])} == {*room.tolist()}


def worst() -> tuple[LogitsOptions, NDArray[np.uint32], NDArray[np.float32]]:
    """All that a request may ask for, a text of different tokens, and a window's rows."""
    random = np.random.default_rng(0)
    logits_options = LogitsOptions(
        logit_bias=dict.fromkeys(random.permutation(V)[:MOST_BIASED].tolist(), 1.5),
        repetition_penalty=1.1,
        frequency_penalty=0.5,
        presence_penalty=0.5,
    )
    text = random.permutation(V)[:LONG].astype(np.uint32)
    return logits_options, text, random.standard_normal((WINDOW + 1, V), np.float32) * 3


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_the_worst_window_takes_little_time_and_memory(tree: bool) -> None:
    info, text, logits = worst()
    parents = np.maximum(np.arange(WINDOW) // 2 - 1, -1) if tree else None
    shaper, random = LogitsProcessor(info, 0), np.random.default_rng(1)
    spent_s, peaks = [], []
    for _ in range(5):
        paths = node_paths(random.integers(0, V, WINDOW).tolist(), parents)
        begun_s = time.thread_time()
        shaper.process(logits, text, paths)
        spent_s.append(time.thread_time() - begun_s)
        tracemalloc.start()
        shaper.process(logits, text, paths)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        text = np.concatenate([text, random.integers(0, V, WINDOW).astype(np.uint32)])
    assert median(spent_s) < 1.5 * GOAL_S
    assert max(peaks) < 12 * V * 4  # bytes: of 65 rows, with what the text says


def test_a_draft_is_not_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device shapes one row for each draft, behind one text; its tokens are counted once."""
    counted: list[int] = []

    class Counted(penalties.Penalties):
        def _count(self, ids: NDArray[np.uint32], times: int = 1) -> None:
            counted.append(len(ids))
            super()._count(ids, times)

    monkeypatch.setattr("pilotfish.speculation.logits_options.Penalties", Counted)
    shaper = LogitsProcessor(LogitsOptions(frequency_penalty=0.5), 10)
    text = np.arange(1000, dtype=np.uint32)
    for length in (900, 904, 904, 909, 907):
        for drafts in range(4):
            shaper.process(np.zeros((1, 1000), np.float32), text[:length], [[5] * drafts])
    assert counted == [890, 4, 5, 2]
