"""Convert an answer to the drafter's tokens, with a label for each of the target's tokens.

In:  a prompt and the target's answer to it. Out: a `TrainingRow`: the drafter's ids, and for each
     token of the answer the position from which the drafter predicts it, and its label.

A row is made by the bridge that a device drafts through: the prompt is in the drafter's template
and the answer in its tokens, as in drafting. The drafter's context after a part of an answer is
mostly a prefix of its context after the whole answer. If it is not (the part ends within one of the
drafter's tokens), the row has no position for the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.bridge import Pair, Prompt
from pilotfish.field.agreement import count_by_depth
from pilotfish.wire.codecs.logprobs import TokenLogprob

NOWHERE = -1  # a position that the row lacks; a token that the drafter lacks


class TrainingRow(msgspec.Struct, frozen=True):
    """One answer of n tokens.

    ids: the drafter's ids of prompt and answer, [m]. prompt: number of the prompt's ids. at: [n],
    position from which the drafter predicts each token; NOWHERE if its context is then no prefix of
    ``ids``. labels: [n], the drafter's id of the target's token; NOWHERE if it has none. likely,
    weights: [n][k ≤ K], the drafter's ids of the target's likeliest tokens that it has, and ln p.
    """

    ids: list[int]
    prompt: int
    at: list[int]
    labels: list[int]
    likely: list[list[int]]
    weights: list[list[float]]

    @property
    def places(self) -> NDArray[np.int64]:
        """Return ``at`` as an array i64 [n]."""
        return np.array(self.at, np.int64)

    @property
    def learnable(self) -> NDArray[np.int64]:
        """The tokens [l] with position and label, as indices below n."""
        return np.flatnonzero((self.places >= 0) & (np.array(self.labels, np.int64) >= 0))

    def compare_choices(self, choices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Compare a drafter's choices [n] with the labels, bool [n]; NOWHERE never agrees."""
        matches: NDArray[np.bool_] = choices == np.array(self.labels, np.int64)
        return (choices >= 0) & matches


class DraftIds:
    """Maps the target's ids to the drafter's; the identity if both share a vocabulary."""

    def __init__(self, pair: Pair) -> None:
        self._to_own = None if pair.shared is None else pair.shared.to_draft_ids

    def __call__(self, token: int) -> int:
        """Return the drafter's id of the target's token, or NOWHERE."""
        return token if self._to_own is None else int(self._to_own[token])


def make_row(
    pair: Pair,
    prompt: Prompt,
    answer: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
) -> TrainingRow:
    """Make a row. logprobs: the target's likeliest tokens at each token of the answer."""
    draft_id, bridge = DraftIds(pair), pair.bridge()
    bridge.start(prompt)
    ids = np.array([*prompt.ids.tolist(), *answer], dtype=np.uint32)
    full_context = np.array(bridge.context(ids))
    bridge.start(
        prompt
    )  # restart: contexts below grow token by token, each at the cost of its new tokens
    start, positions = len(prompt.ids), []
    for count in range(len(answer)):
        context = bridge.context(ids[: start + count])
        length = len(context)
        is_prefix = length <= len(full_context) and np.array_equal(full_context[:length], context)
        positions.append(length - 1 if is_prefix else NOWHERE)
    likely, weights = [], []
    for position_logprobs in logprobs:
        tops = (
            []
            if position_logprobs is None
            else [(draft_id(id), value) for id, value in position_logprobs.top]
        )
        usable = [(id, value) for id, value in tops if id >= 0 and np.isfinite(value)]
        likely.append([id for id, _ in usable])
        weights.append([round(float(value), 4) for _, value in usable])
    return TrainingRow(
        ids=[int(id) for id in full_context],
        prompt=len(prompt.draft_ids),
        at=positions,
        labels=[draft_id(token) for token in answer],
        likely=likely,
        weights=weights,
    )


class Agreement(NamedTuple):
    """Agreement of a drafter's and the target's choices at temperature 0.

    positions: number of compared positions. alpha: share of them that agree. survival: S(1) to
    S(8); S(k) is the share of runs with k right drafts, where a run begins with an answer and after
    each wrong draft.
    """

    positions: int
    alpha: float
    survival: list[float]


DEPTHS = 8


def agreement(agreed: Sequence[NDArray[np.bool_]]) -> Agreement:
    """Compute the agreement over answers. agreed: bool [n] for each answer."""
    positions, hits = sum(map(len, agreed)), sum(int(answer.sum()) for answer in agreed)
    reached, right = np.zeros(DEPTHS), np.zeros(DEPTHS)
    for answer in agreed:
        # one depth more, at which deeper drafts count
        reached_here, right_here = count_by_depth(answer, DEPTHS + 1)
        reached += reached_here[:DEPTHS]
        right += right_here[:DEPTHS]
    alphas = np.divide(right, reached, out=np.zeros(DEPTHS), where=reached > 0)
    return Agreement(positions, hits / max(1, positions), np.cumprod(alphas).tolist())
