"""Drafting ahead: what the next draft is, and when drafting stops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pilotfish.drafting.ahead import (
    ModelAcceptance,
    NextDraft,
    PassAcceptance,
    learn_acceptance,
    next_draft,
    next_drafts,
    wants_draft,
)
from pilotfish.speculation.acceptance import AcceptanceEstimator
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.logits_options import LogitsOptions, LogitsProcessor
from pilotfish.wire.protocols import SamplingParams
from pilotfish.wire.protocols.ahead import DraftAhead

GREEDY = SamplingParams(sampling=Sampling(), seed=0)
SAMPLED = SamplingParams(sampling=Sampling(temperature=0.8), seed=5)
COMMITTED = np.array([3, 1, 2], np.uint32)


class Forbids:
    """A grammar that forbids some tokens, and has a dead end in a given row."""

    def __init__(self, *tokens: int, dead: tuple[int, ...] = ()) -> None:
        self.tokens, self.dead = list(tokens), dead

    def forbid(self, logits: Any, answer: Any, paths: Any) -> tuple[int, ...]:
        logits[:, self.tokens] = -np.inf
        return self.dead

    def forced(self, answer: Any, path: Any) -> tuple[int, ...]:
        return ()


def margin_of(draft: NextDraft | None) -> tuple[int, float | None]:
    """The token and its margin; the acceptance must be the estimate of this margin."""
    assert draft is not None
    assert draft.margin is not None
    assert draft.acceptance == AcceptanceEstimator().estimate(draft.margin)
    return draft.token, draft.margin


def processor(grammar: Forbids) -> LogitsProcessor:
    return LogitsProcessor(LogitsOptions(), 1, grammar)


def logits() -> np.ndarray:
    return np.array([[0.5, 3.0, 1.0, 2.5]], np.float32)


def test_the_draft_is_the_best_allowed_token_with_its_lead() -> None:
    odds = AcceptanceEstimator()
    free = next_draft(logits(), COMMITTED, (), None, GREEDY, odds)
    assert margin_of(free) == (1, 0.5)
    limited = next_draft(logits(), COMMITTED, (), processor(Forbids(1)), GREEDY, odds)
    assert margin_of(limited) == (3, 1.5)


def test_a_known_acceptance_is_not_estimated_and_teaches_nothing() -> None:
    odds = AcceptanceEstimator()
    assert next_draft(logits(), COMMITTED, (), None, GREEDY, odds, 0.25) == (1, 0.25, None, 0)


def test_greedy_and_sampled_answers_are_learnt_apart() -> None:
    acceptance = ModelAcceptance()
    greedy, sampled = acceptance.of(GREEDY).at(0), acceptance.of(SAMPLED).at(0)
    before = sampled.estimate(1.0)
    for _ in range(20):
        acceptance.of(GREEDY).at(0).update(1.0, agreed=False)
    assert greedy.estimate(1.0) < before == sampled.estimate(1.0)


def test_a_draws_noise_is_that_of_its_position() -> None:
    """The token depends on the position alone, and not on what of the text is committed."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        row = rng.normal(size=(1, 8)).astype(np.float32)
        text = rng.integers(0, 8, 6).astype(np.uint32)
        drafts = {
            next_draft(
                row.copy(), text[:end], text[end:].tolist(), None, SAMPLED, AcceptanceEstimator()
            )
            for end in range(7)
        }
        assert len(drafts) == 1


@pytest.mark.parametrize("grammar", [Forbids(0, 1, 2, 3), Forbids(dead=(0,))], ids=["all", "dead"])
def test_without_an_allowed_token_there_is_no_draft(grammar: Forbids) -> None:
    odds = AcceptanceEstimator()
    assert next_draft(logits(), COMMITTED, (), processor(grammar), GREEDY, odds) is None


def drafts(*acceptances: float) -> DraftAhead:
    ahead = DraftAhead()
    ahead.start(COMMITTED)
    for token, acceptance in enumerate(acceptances):
        ahead.append(token, acceptance, 1.0)
    return ahead


def test_drafting_stops_at_the_most_drafts_an_unlikely_one_and_an_end() -> None:
    assert wants_draft(drafts(), 1, 0.9, {0})
    assert not wants_draft(drafts(), 0, 0.0, ())
    assert wants_draft(drafts(0.9, 0.9), 3, 0.8, ())
    assert not wants_draft(drafts(0.9, 0.9), 2, 0.8, ())
    assert not wants_draft(drafts(0.9, 0.9), 3, 0.82, ())
    assert not wants_draft(drafts(0.9, 0.9), 3, 0.8, {1})
    assert wants_draft(drafts(0.9, 0.9), 3, 0.8, {0})  # only the last one counts


def test_an_estimator_learns_from_the_drafts_that_have_a_margin() -> None:
    ahead, learnt, expected = drafts(0.9, 0.9), PassAcceptance(), AcceptanceEstimator()
    ahead.append(7, 0.9, None)
    ahead.append(8, 0.9, 2.0)
    learn_acceptance(learnt, ahead.compare([0, 1, 7, 9]))
    for margin, agreed in ((1.0, True), (1.0, True), (2.0, False)):
        expected.update(margin, agreed)
    assert learnt.at(0).estimate(1.5) == expected.estimate(1.5)


def rows(*tokens: int) -> np.ndarray:
    """Logits that prefer these tokens, in order, by 2."""
    return 2.0 * np.eye(5, dtype=np.float32)[list(tokens)]


def drafts_of_a_pass(
    logits: np.ndarray, *, joint: float = 1.0, least: float = 0.0, grammar: Forbids | None = None
) -> list[NextDraft]:
    return next_drafts(
        logits,
        COMMITTED,
        (4,),
        None if grammar is None else processor(grammar),
        GREEDY,
        PassAcceptance(),
        joint_acceptance=joint,
        least_acceptance=least,
        ends={0},
    )


def test_the_drafts_of_a_pass_have_their_places() -> None:
    made = drafts_of_a_pass(rows(1, 2, 3))
    assert [(draft.token, draft.place, draft.margin) for draft in made] == [
        (1, 0, 2.0), (2, 1, 2.0), (3, 2, 2.0),
    ]  # fmt: skip


def test_the_drafts_of_a_pass_end_where_none_is_wanted() -> None:
    first = drafts_of_a_pass(rows(1, 2))[0].acceptance
    assert len(drafts_of_a_pass(rows(1, 0, 2))) == 2  # an end token
    assert len(drafts_of_a_pass(rows(1, 2, 3), least=0.98 * first)) == 2
    assert len(drafts_of_a_pass(rows(1, 2, 3), joint=0.5, least=0.6)) == 1  # at least one
    assert drafts_of_a_pass(rows(1, 2, 3), grammar=Forbids(dead=(0,))) == []


def test_the_drafts_of_a_pass_are_those_of_their_rows_one_by_one() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(4, 8)).astype(np.float32)
    acceptance = PassAcceptance()
    made = next_drafts(
        logits.copy(), COMMITTED, (), None, SAMPLED, acceptance,
        joint_acceptance=1.0, least_acceptance=0.0, ends=(),
    )  # fmt: skip
    path: list[int] = []
    for place, draft in enumerate(made):
        row = logits[place : place + 1].copy()
        alone = next_draft(row, COMMITTED, path, None, SAMPLED, acceptance.at(place))
        assert alone is not None
        assert draft == alone._replace(place=place)
        path.append(draft.token)
    assert len(path) == 4


def test_each_place_of_a_pass_is_learnt_by_itself() -> None:
    ahead, learnt = drafts(), PassAcceptance()
    before = learnt.at(0).estimate(1.0)
    for _ in range(20):
        for place in range(3):
            ahead.append(place, 0.9, 1.0, place)
        learn_acceptance(learnt, ahead.compare([0, 1, 9]))
    assert learnt.at(0).estimate(1.0) > before
    assert learnt.at(1).estimate(1.0) > before
    assert learnt.at(2).estimate(1.0) < 0.3
    assert learnt.at(3).estimate(1.0) == before


def test_the_means_of_places_follow_the_drafts_and_those_before() -> None:
    acceptance = PassAcceptance()
    assert len({*acceptance.means(8)}) == 1  # an untried drafter has one mean
    for at in range(100):
        acceptance.update(0, 1.0, agreed=at % 10 > 0)
        acceptance.update(1, 1.0, agreed=at % 2 > 0)
    means = acceptance.means(4)
    assert means[0] == pytest.approx(0.9, abs=0.02)
    assert means[1] == pytest.approx(0.5, abs=0.05)
    assert means[1] == means[2] == means[3]  # no place is better than the one before it
    acceptance.update(0, math.inf, agreed=True)  # forced by a grammar
    assert acceptance.means(1) == means[:1]
    for _ in range(400):
        acceptance.update(1, 1.0, agreed=True)
    assert acceptance.means(2)[1] > 0.9  # old drafts fade


def test_places_without_drafts_are_tried_again() -> None:
    acceptance = PassAcceptance()
    for _ in range(50):
        acceptance.count(0, agreed=True)
        acceptance.count(1, agreed=False)
    assert acceptance.means(2)[1] < 0.25
    for _ in range(1000):
        acceptance.count(0, agreed=True)
    assert acceptance.means(2)[1] > 0.9


def test_means_may_learn_without_margins() -> None:
    acceptance = PassAcceptance()
    before = acceptance.at(2).estimate(1.0)
    for at in range(100):
        acceptance.count(2, agreed=at % 4 > 0)
    assert acceptance.means(3)[2] == pytest.approx(0.75, abs=0.03)
    assert acceptance.at(2).estimate(1.0) == before
