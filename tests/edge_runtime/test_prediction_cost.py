"""What a prediction gains and costs at an edge whose passes take as long as they were measured.

Sources, budgets and price are the edge's; only the target's time is a table: Qwen2.5-Coder-1.5B in
int8 on one core. Texts are random words, of which a few are frequent, as in a file.
"""

from __future__ import annotations

import numpy as np
import pytest

from pilotfish.edge_runtime.draft_cost import DraftCost
from pilotfish.edge_runtime.hint_sources import HintSources, create_hint_sources
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.protocols import Ahead
from pilotfish.wire.protocols.ahead import AheadOptions

PASS_S = {1: 0.070, 2: 0.089, 4: 0.123, 8: 0.186, 12: 0.252, 16: 0.305}
PROMPT = [3, 1, 4]


def words(seed: int, count: int = 1500) -> list[int]:
    ids: list[int] = np.minimum(np.random.default_rng(seed).zipf(1.3, count), 49_000).tolist()
    return ids


def answer_s(
    answer: list[int], prediction: list[int], previous: HintSources | None = None
) -> tuple[float, HintSources]:
    """Seconds that the target takes for an answer, and the sources at its end."""
    cost, committed = DraftCost(PASS_S), CommittedTokens()
    committed.extend(PROMPT)
    hints = create_hint_sources(
        Ahead(AheadOptions(hints="edge")), committed, 64, None, previous,
        np.array(prediction, np.uint32),
    )  # fmt: skip
    assert hints is not None
    spent_s = 0.0
    while (at := len(committed) - len(PROMPT)) < len(answer):
        proposed = hints.propose(len(answer) - at - 1, cost.tokens_per_draft)
        drafts = [*hints.attach(len(proposed))]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == answer[at + accepted]:
            accepted += 1
        ids = answer[at : at + accepted + 1]
        pass_s = float(np.interp(1 + len(drafts), [*PASS_S], [*PASS_S.values()]))
        spent_s += pass_s
        cost.record_pass(1 + len(drafts), pass_s)
        cost.record_tokens(len(ids))
        committed.extend(ids)
        hints.record_pass(ids, accepted)
    return spent_s, hints


@pytest.mark.parametrize("seed", range(3))
def test_an_edit_is_two_and_a_half_times_as_fast(seed: int) -> None:
    old = words(seed)
    renamed = [[id, 7777, 8888][: 1 + 2 * (id == 40)] for id in old]  # two words more
    edited = [id for ids in renamed for id in ids]
    edited[400:400] = words(seed + 10, 20)
    del edited[900:1000]
    plain_s, _ = answer_s(edited, [])
    guided_s, _ = answer_s(edited, old)
    assert plain_s / guided_s > 2.5


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_prediction_costs_less_than_a_fiftieth(seed: int) -> None:
    answer, wrong = words(seed, 600), words(seed + 100)
    plain_s, _ = answer_s(answer, [])
    guided_s, _ = answer_s(answer, wrong)
    assert guided_s < 1.02 * plain_s


def test_after_wrong_predictions_in_a_session_a_right_one_still_helps() -> None:
    """Budgets are the session's, so that new generations refill none; a right one earns."""
    previous = None
    for seed in range(3):
        _, previous = answer_s(words(seed, 300), words(seed + 100), previous)
    answer = words(7, 900)
    plain_s, _ = answer_s(answer, [])
    guided_s, _ = answer_s(answer, answer, previous)
    assert plain_s / guided_s > 2.5
