"""Draft ahead of the committed tokens, token by token: the rules that both ends follow.

In:  logits after the committed tokens and the drafts so far. Out: the next draft and its margin,
     and whether one more draft is likely to be accepted.

A device drafts for its own generation (`device_runtime.forerunner`); the drafter of an edge drafts
for many sessions in one pass (`edge_runtime.edge_drafter`).
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from pilotfish.speculation.acceptance import AcceptanceEstimator
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.logits_options import LogitsProcessor
from pilotfish.wire.protocols.ahead import DraftAhead, DraftComparison, draft_with_margin
from pilotfish.wire.protocols.protocol import Ids, SamplingParams


class Proposal(NamedTuple):
    """Drafts that follow the committed tokens, with acceptances.

    acceptance: for each draft, its acceptance given that the drafts before it are accepted.
    """

    ids: Sequence[int]
    acceptance: Sequence[float]


class NextDraft(NamedTuple):
    """A draft, its acceptance, and its margin (`draft_with_margin`).

    acceptance: given that the drafts before it are accepted. margin: None if the acceptance was not
    estimated from it.
    """

    token: int
    acceptance: float
    margin: float | None


class ModelAcceptance:
    """Acceptance of a model's drafts, learnt from committed tokens. Not thread-safe.

    Greedy and sampled answers are learnt apart: noise changes the margins of sampled drafts.
    """

    def __init__(self) -> None:
        self._greedy, self._sampled = AcceptanceEstimator(), AcceptanceEstimator()

    def estimator(self, params: SamplingParams) -> AcceptanceEstimator:
        """Return the estimator for answers with these sampling parameters."""
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


def wants_draft(
    ahead: DraftAhead, most: int, least_acceptance: float, ends: Collection[int]
) -> bool:
    """Return whether to draft one more token.

    most: maximum number of drafts. least_acceptance: lower limit of the joint acceptance of all
    drafts so far. ends: end tokens, after which nothing is drafted.
    """
    if len(ahead) >= most:
        return False
    return not len(ahead) or (
        ahead.joint_acceptance >= least_acceptance and int(ahead.drafts[-1]) not in ends
    )


def learn_acceptance(estimator: AcceptanceEstimator, comparison: DraftComparison) -> None:
    """Update the estimator with each compared draft that has a margin."""
    for at, margin in enumerate(comparison.margins):
        if margin is not None:
            estimator.update(margin, at < comparison.agreed)
