"""Convert an answer to drafter tokens, with a label for each of the target's tokens.

In:  a prompt and the target's answer to it. Out: a `TrainingRow`: the drafter's ids, and for each
     target token of the answer its label and the position from which the drafter predicts it.

The same bridge makes a row and, on a device, the drafter's context: the prompt is in the drafter's
template, the answer in drafter tokens. The context after a part of an answer is usually a prefix of
the context after the whole answer. It is not if the part ends inside a drafter token. Then the row
has no position for the target token that follows the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.bridge import Pair, Prompt
from pilotfish.lab.agreement import count_by_depth
from pilotfish.wire.codecs.logprobs import TokenLogprob

NOWHERE = -1  # instead of a position: the row has none; instead of an id: the drafter has none


class TrainingRow(msgspec.Struct, frozen=True):
    """A prompt and its answer of n target tokens, as the drafter reads them.

    ids: the drafter's ids of prompt and answer, [m]. prompt: number of ids in the prompt. at: index
    in ``ids`` from which the drafter predicts each target token, [n]; NOWHERE if the context before
    the token is no prefix of ``ids``. labels: the drafter's id of each target token, [n]; NOWHERE
    if the drafter has no such token. likely: the drafter's ids of the target's K likeliest tokens,
    without those that the drafter lacks, [n][k ≤ K]. weights: the target's ln p of these tokens,
    [n][k].
    """

    ids: list[int]
    prompt: int
    at: list[int]
    labels: list[int]
    likely: list[list[int]]
    weights: list[list[float]]

    @property
    def places(self) -> NDArray[np.int64]:
        """The list ``at`` as an array, i64 [n]."""
        return np.array(self.at, np.int64)

    @property
    def learnable(self) -> NDArray[np.int64]:
        """The indices (below n) of the l tokens that have both position and label, i64 [l]."""
        return np.flatnonzero((self.places >= 0) & (np.array(self.labels, np.int64) >= 0))

    def compare_choices(self, choices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each choice equals its label, bool [n]; the choice NOWHERE never does.

        choices: the drafter's ids, i64 [n].
        """
        matches: NDArray[np.bool_] = choices == np.array(self.labels, np.int64)
        return (choices >= 0) & matches


class DraftIds:
    """Maps the target's ids to the drafter's; with one vocabulary, this is the identity."""

    def __init__(self, pair: Pair) -> None:
        self._to_own = None if pair.shared is None else pair.shared.to_draft_ids

    def __call__(self, token: int) -> int:
        """Return the drafter's id of a target token; NOWHERE if the drafter lacks the token."""
        return token if self._to_own is None else int(self._to_own[token])


def make_row(
    pair: Pair,
    prompt: Prompt,
    answer: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
) -> TrainingRow:
    """Make a row from a prompt and the target's answer.

    logprobs: the target's likeliest tokens at each position of the answer, [n].
    """
    draft_id, bridge = DraftIds(pair), pair.bridge()
    bridge.start(prompt)
    ids = np.array([*prompt.ids.tolist(), *answer], dtype=np.uint32)
    full_context = np.array(bridge.context(ids))
    bridge.start(
        prompt
    )  # restart, because the contexts below grow one token at a time from the prompt
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
    """The agreement of a drafter's choices with the target's, at temperature 0.

    positions: number of compared positions. alpha: share of the positions at which the choices
    agree. survival: S(1) to S(8). S(k) is the share of runs that begin with k right drafts; a new
    run begins at the start of an answer and after each wrong draft.
    """

    positions: int
    alpha: float
    survival: list[float]


DEPTHS = 8


def agreement(agreed: Sequence[NDArray[np.bool_]]) -> Agreement:
    """Compute the agreement over several answers.

    agreed: whether each token's choices agree, bool [n] for each answer.
    """
    positions, hits = sum(map(len, agreed)), sum(int(answer.sum()) for answer in agreed)
    reached, right = np.zeros(DEPTHS), np.zeros(DEPTHS)
    for answer in agreed:
        # count one depth more and drop it: it collects all deeper drafts
        reached_here, right_here = count_by_depth(answer, DEPTHS + 1)
        reached += reached_here[:DEPTHS]
        right += right_here[:DEPTHS]
    alphas = np.divide(right, reached, out=np.zeros(DEPTHS), where=reached > 0)
    return Agreement(positions, hits / max(1, positions), np.cumprod(alphas).tolist())
