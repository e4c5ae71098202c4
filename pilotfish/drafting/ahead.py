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
    """A draft, and its margin: the input of the acceptance estimate (`draft_with_margin`)."""

    token: int
    margin: float


def next_draft(
    logits: Floats,
    committed: Ids,
    drafts: Sequence[int],
    processor: LogitsProcessor | None,
    params: SamplingParams,
) -> NextDraft | None:
    """Draft the token after committed tokens u32 [n] and drafts; None if no token may follow.

    logits: f32 [1, V], the drafter's prediction; the processor changes them in place.
    """
    if processor is not None:
        dead = processor.process(logits, committed, [drafts])
        if dead or np.isneginf(logits.max()):
            return None
    return NextDraft(*draft_with_margin(logits[0], params, len(committed) + len(drafts)))


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
