"""Drafting ahead: what the next draft is, and when drafting stops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pilotfish.drafting.ahead import (
    ModelAcceptance,
    NextDraft,
    learn_acceptance,
    next_draft,
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
    assert next_draft(logits(), COMMITTED, (), None, GREEDY, odds, 0.25) == (1, 0.25, None)


def test_greedy_and_sampled_answers_are_learnt_apart() -> None:
    acceptance = ModelAcceptance()
    greedy, sampled = acceptance.estimator(GREEDY), acceptance.estimator(SAMPLED)
    before = sampled.estimate(1.0)
    for _ in range(20):
        acceptance.estimator(GREEDY).update(1.0, agreed=False)
    assert greedy.estimate(1.0) < before == acceptance.estimator(SAMPLED).estimate(1.0)


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
    ahead, learnt, expected = drafts(0.9, 0.9), AcceptanceEstimator(), AcceptanceEstimator()
    ahead.append(7, 0.9, None)
    ahead.append(8, 0.9, 2.0)
    learn_acceptance(learnt, ahead.compare([0, 1, 7, 9]))
    for margin, agreed in ((1.0, True), (1.0, True), (2.0, False)):
        expected.update(margin, agreed)
    assert learnt.estimate(1.5) == expected.estimate(1.5)
