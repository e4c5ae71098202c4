"""Rows hold what a device reads; agreement counts runs of agreeing tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.lab.distill.training_rows import NOWHERE, TrainingRow, agreement, make_row
from pilotfish.wire.codecs.logprobs import TokenLogprob
from tests.support.bridged import WORDS, ids, pair_of
from tests.support.rounds import PROMPT


@given(st.sampled_from(sorted(WORDS)), st.data())
def test_each_place_is_where_the_device_asks_for_the_token(words: str, data: st.DataObject) -> None:
    pair = pair_of(words)
    answer = data.draw(st.lists(st.integers(0, pair.target.vocab_size - 1), max_size=12))
    tops = data.draw(st.lists(st.integers(0, pair.target.vocab_size - 1), max_size=3, unique=True))
    prompt = pair.prompt(PROMPT)
    info = [TokenLogprob(-1.0, [(token, -1.0 - token) for token in tops]) for _ in answer]
    row = make_row(pair, prompt, answer, info)
    to_own = pair.shared.to_draft_ids
    assert row.ids[: row.prompt] == prompt.draft_ids.tolist()
    for place, token in enumerate(answer):
        bridge = pair.bridge()
        bridge.start(prompt)
        context = bridge.context(ids([*prompt.ids, *answer[:place]])).tolist()
        if context == row.ids[: len(context)]:
            assert row.at[place] == len(context) - 1
        else:
            assert row.at[place] == NOWHERE
        assert row.labels[place] == to_own[token]
        assert row.likely[place] == [to_own[top] for top in tops if to_own[top] >= 0]
        assert len(row.weights[place]) == len(row.likely[place])
    wanted = [i for i in range(len(answer)) if row.at[i] >= 0 and row.labels[i] >= 0]
    assert row.learnable.tolist() == wanted


@given(st.lists(st.lists(st.booleans(), max_size=10), max_size=5))
def test_agreement_counts_as_the_definition_says(items: list[list[bool]]) -> None:
    result = agreement([np.array(item, dtype=bool) for item in items])
    flat = [hit for item in items for hit in item]
    assert result.positions == len(flat)
    assert result.alpha == pytest.approx(sum(flat) / len(flat) if flat else 0.0)
    # runs: what stands between two misses; the last one of an answer may be cut off by its end
    ended = [len(run) for item in items for run in _text(item).split("-")[:-1]]
    cut = [len(_text(item).split("-")[-1]) for item in items]
    survival = 1.0
    for depth in range(1, 9):
        right = sum(run >= depth for run in [*ended, *cut])
        wrong = sum(run == depth - 1 for run in ended)
        survival *= right / (right + wrong) if right else 0.0
        assert result.survival[depth - 1] == pytest.approx(survival)


def _text(hits: list[bool]) -> str:
    return "".join("+" if hit else "-" for hit in hits)


def test_where_the_drafter_is_not_asked_or_has_no_such_token_it_does_not_agree() -> None:
    row = TrainingRow([7, 8, 9], 1, [0, NOWHERE, 2], [8, 9, NOWHERE], [[]] * 3, [[]] * 3)
    values = np.array([8, NOWHERE, NOWHERE])
    assert row.compare_choices(values).tolist() == [True, False, False]
    assert row.learnable.tolist() == [0]
