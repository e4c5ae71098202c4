"""Drafts from a prediction: acceptance is learnt, and the law of every protocol stays.

By enumeration of every outcome of a round, as in `tests/wire/test_protocol_outcomes.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pilotfish.drafting.window
from pilotfish.drafting.prediction import PredictionHints
from pilotfish.wire.protocols import SamplingParams
from tests.drafting.test_text_drafter import START, text_drafter, texts, windows_of
from tests.support.bridged import ids
from tests.support.examples import examples
from tests.support.rounds import EXACT, ONE, SAMPLED
from tests.wire.test_protocol_outcomes import assert_exact, small_settings

OLD = np.arange(100, 400, dtype=np.uint32)


def run(hints: PredictionHints, answer: list[int], step: int = 1) -> list[int]:
    """Follow an answer; return the number of proposed drafts with acceptance above ½ each time."""
    likely = []
    for at in range(0, len(answer), step):
        proposal = hints.propose(16)
        assert len(proposal.ids) == len(proposal.acceptance) <= 16
        likely.append(int((np.cumprod(proposal.acceptance) > 0.5).sum()))
        hints.record_tokens(answer[at : at + step])
    return likely


def test_windows_begin_small_and_grow_while_the_prediction_is_right() -> None:
    likely = run(PredictionHints(OLD), OLD[:80].tolist(), 4)
    assert likely[0] <= 2
    assert min(likely[4:]) == 16


def test_a_wrong_prediction_is_soon_not_likely_at_all() -> None:
    likely = run(PredictionHints(OLD), [7, 8, 9] * 60)
    assert max(likely[3:]) == 0
    # neither where single tokens of it happen to be in the answer
    likely = run(PredictionHints(OLD), [int(id) for id in OLD[::-1]])
    assert max(likely[20:]) == 0


def test_after_an_edit_the_prediction_is_trusted_again_within_a_few_tokens() -> None:
    answer = [*OLD[:100].tolist(), 7, 8, 9, *OLD[100:200].tolist()]
    likely = run(PredictionHints(OLD), answer)
    assert max(likely[104:108]) == 16


@pytest.mark.parametrize("name", SAMPLED)
@given(st.data(), st.integers(1, 4), texts(3), st.lists(st.integers(0, 2), max_size=12))
@examples(40)
def test_a_round_is_exact_over_all_its_outcomes(name, data, bits, earlier, predicted) -> None:
    setting = data.draw(small_settings(name))
    start = (*START, *data.draw(st.lists(st.integers(0, 2), max_size=9)))
    drafter = text_drafter(3, earlier)
    least = data.draw(st.sampled_from([0.0, 0.5, 0.6]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pilotfish.drafting.window, "_LEAST_ACCEPTANCE", least)
        drafter.predict_answer(ids(predicted), 0)
        assert_exact(setting, bits, windows_of(drafter, auto=None), start)


def test_a_window_takes_what_is_predicted_where_it_is_likely() -> None:
    drafter = text_drafter(3, [])
    text = [1, 2, 0, 0, 1, 0, 2, 2]
    drafter.predict_answer(ids([*text, 1, 1, 0]), 0)
    law = SamplingParams(sampling=ONE, seed=1)
    assert drafter.count_predicted(ids(text), 3) == 3
    draft = drafter.draft(ids(text), (1, 1, 1), EXACT["coupled"], law, ())
    assert draft.ids.tolist() == [1, 1, 0]
    drafter.predict_answer(ids([]), 0)
    assert drafter.count_predicted(ids(text), 3) == 0
