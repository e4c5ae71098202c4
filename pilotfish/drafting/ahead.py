"""Draft ahead of the committed tokens, pass by pass: the rules that both ends follow.

In:  logits after the committed tokens and the drafts so far. Out: the next drafts with their
     margins, and whether one more draft is likely to be accepted.

A pass of most drafters yields one draft. A pass of a drafter with a mask token yields several; the
later ones are wrong more often at the same margin, since the drafter does not know the tokens
between. So acceptance is learnt for each place in a pass by itself, and the number of drafts of a
pass is chosen by it (`speculation.pass_drafts`).

A device drafts for its own generation (`device_runtime.forerunner`); the drafter of an edge drafts
for many sessions in one pass (`edge_runtime.edge_drafter`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from pilotfish.speculation.acceptance import PRIOR_ACCEPTANCE, AcceptanceEstimator
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.logits_options import LogitsProcessor
from pilotfish.wire.protocols.ahead import DraftAhead, DraftComparison, draft_with_margin
from pilotfish.wire.protocols.protocol import Ids, SamplingParams

_PRIOR_DRAFTS = 8.0  # weight, in compared drafts, of a place's prior acceptance
_FADE = 0.995  # factor by which the weight of older drafts shrinks (`PassAcceptance.count`)


class Proposal(NamedTuple):
    """Drafts that follow the committed tokens, with acceptances.

    acceptance: for each draft, its acceptance given that the drafts before it are accepted.
    """

    ids: Sequence[int]
    acceptance: Sequence[float]


class NextDraft(NamedTuple):
    """A draft, its acceptance, and its margin (`draft_with_margin`).

    acceptance: given that the drafts before it are accepted. margin: None if the acceptance was not
    estimated from it. place: its place among the drafts of its pass, from 0.
    """

    token: int
    acceptance: float
    margin: float | None
    place: int = 0


class PassAcceptance:
    """Acceptance of the drafts of a pass by their places, each place learnt by itself.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._estimators = [AcceptanceEstimator()]
        # by place: weighted number of compared drafts, and of right ones among them
        self._counts = [(0.0, 0.0)]

    def at(self, place: int) -> AcceptanceEstimator:
        """Return the estimator for a place, from 0: the token right after the text."""
        while place >= len(self._estimators):
            self._estimators.append(AcceptanceEstimator())
            self._counts.append((0.0, 0.0))
        return self._estimators[place]

    def update(self, place: int, margin: float, agreed: bool) -> None:
        """Learn whether the target chose the draft at a place, which had this margin."""
        self.at(place).update(margin, agreed)
        if margin != math.inf:  # a token that a grammar forced tells nothing about the model
            self.count(place, agreed)

    def count(self, place: int, agreed: bool) -> None:
        """Learn for `means` whether the target accepted the draft at a place.

        Each pass has a draft at place 0. It also fades the evidence of the later places, so that
        places which no pass has any more are tried again after some hundred passes.
        """
        self.at(place)
        for faded in range(len(self._counts)) if place == 0 else (place,):
            compared, right = self._counts[faded]
            self._counts[faded] = _FADE * compared, _FADE * right
        compared, right = self._counts[place]
        self._counts[place] = compared + 1.0, right + agreed

    def means(self, places: int) -> list[float]:
        """Estimate the mean acceptance at each of the first places.

        It is the share of right drafts among those whose earlier drafts were right. A place without
        evidence is taken to be as good as the place before.
        """
        result, mean = [], PRIOR_ACCEPTANCE
        for place in range(places):
            compared, right = self._counts[place] if place < len(self._counts) else (0.0, 0.0)
            mean = (_PRIOR_DRAFTS * mean + right) / (_PRIOR_DRAFTS + compared)
            result.append(mean)
        return result


class ModelAcceptance:
    """Acceptance of a model's drafts, learnt from committed tokens. Not thread-safe.

    Greedy and sampled answers are learnt apart: noise changes the margins of sampled drafts.
    """

    def __init__(self) -> None:
        self._greedy, self._sampled = PassAcceptance(), PassAcceptance()

    def of(self, params: SamplingParams) -> PassAcceptance:
        """Return the acceptance of drafts in answers with these sampling parameters."""
        return self._greedy if params.sampling.greedy else self._sampled


def next_draft(
    logits: Floats,
    committed: Ids,
    drafts: Sequence[int],
    processor: LogitsProcessor | None,
    params: SamplingParams,
    estimator: AcceptanceEstimator,
    acceptance: float | None = None,
) -> NextDraft | None:
    """Draft the token after committed tokens u32 [n] and drafts; None if no token may follow.

    logits: f32 [1, V], the drafter's prediction; the processor changes them in place. acceptance:
    the draft's acceptance, if the drafter knows it (`Level`); None: estimate it from the margin.
    """
    if processor is not None:
        dead = processor.process(logits, committed, [drafts])
        if dead or np.isneginf(logits.max()):
            return None
    token, margin = draft_with_margin(logits[0], params, len(committed) + len(drafts))
    if acceptance is not None:
        return NextDraft(token, acceptance, None)
    return NextDraft(token, estimator.estimate(margin), margin)


def next_drafts(
    logits: Floats,
    committed: Ids,
    drafts: Sequence[int],
    processor: LogitsProcessor | None,
    params: SamplingParams,
    acceptance: PassAcceptance,
    *,
    joint_acceptance: float,
    least_acceptance: float,
    ends: Collection[int],
    known: Sequence[float] | None = None,
) -> list[NextDraft]:
    """Draft the tokens after committed tokens u32 [n] and drafts, one from each row of a pass.

    logits: f32 [rows, V], row i predicts the token i places later. The list ends before a place
    where no token may follow, and after the first draft after which none is wanted (`wants_draft`).
    joint_acceptance: the earlier drafts' joint acceptance. known: each draft's acceptance, if the
    drafter knows it (`Level`).
    """
    path, made = list(drafts), list[NextDraft]()
    for place in range(len(logits)):
        if made and not _continues(joint_acceptance, least_acceptance, path[-1], ends):
            break
        draft = next_draft(
            logits[place : place + 1],
            committed,
            path,
            processor,
            params,
            acceptance.at(place),
            None if known is None else known[place],
        )
        if draft is None:
            break
        made.append(draft._replace(place=place))
        path.append(draft.token)
        joint_acceptance *= draft.acceptance
    return made


def wants_draft(
    ahead: DraftAhead, most: int, least_acceptance: float, ends: Collection[int]
) -> bool:
    """Return whether to draft one more token.

    most: maximum number of drafts. least_acceptance: lower limit of the joint acceptance of all
    drafts so far. ends: end tokens, after which nothing is drafted.
    """
    if len(ahead) >= most:
        return False
    return not len(ahead) or _continues(
        ahead.joint_acceptance, least_acceptance, int(ahead.drafts[-1]), ends
    )


def _continues(
    joint_acceptance: float, least_acceptance: float, last: int, ends: Collection[int]
) -> bool:
    """Whether a draft may follow the draft ``last``; joint_acceptance: of all drafts up to it."""
    return joint_acceptance >= least_acceptance and last not in ends


def learn_acceptance(acceptance: PassAcceptance, comparison: DraftComparison) -> None:
    """Update the estimates with each compared draft that has a margin."""
    for at, (margin, place) in enumerate(zip(comparison.margins, comparison.places, strict=True)):
        if margin is not None:
            acceptance.update(place, margin, at < comparison.agreed)
