"""An answer as the drafter reads it, and what it is to say at each place of it.

In:  a prompt and the target's answer to it. Out: a `TrainingRow`: the drafter's own ids, and for
     each token of the answer where the drafter is asked for it and what it has to say.

A row is made by the bridge that a device drafts through, so the prompt stands in the drafter's own
template and the answer in its own tokens, and what is learnt is what will be asked. The context
after part of an answer is mostly a part of the context after all of it; where it is not (the text
so far ends within one of the drafter's words) the place is not in the row, and has no position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.bridge import Pair, Prompt
from pilotfish.field.agreement import by_depth
from pilotfish.wire.codecs.logprobs import TokenLogprob

NOWHERE = -1  # a position that the row does not have; a token that the drafter does not have


class TrainingRow(msgspec.Struct, frozen=True):
    """One answer of n tokens.

    ids: the drafter's, [m]: prompt and answer. prompt: how many of them are the prompt's. at: [n],
    the position after which the drafter is asked for each token; NOWHERE if it reads another text
    then. labels: [n], what it is to say, its own id of the target's token; NOWHERE if it has none.
    likely, weights: [n][k ≤ K], the drafter's ids of the target's likeliest tokens that it has, and
    ln p of each.
    """

    ids: list[int]
    prompt: int
    at: list[int]
    labels: list[int]
    likely: list[list[int]]
    weights: list[list[float]]

    @property
    def places(self) -> NDArray[np.int64]:
        """Return ``at`` as an array, [n]; of whole numbers even if n is 0."""
        return np.array(self.at, np.int64)

    @property
    def learnable(self) -> NDArray[np.int64]:
        """The places [l] that something can be learnt at, as numbers below n."""
        return np.flatnonzero((self.places >= 0) & (np.array(self.labels, np.int64) >= 0))

    def agreed(self, choices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Find which of a drafter's choices [n] are the target's, bool [n]; NOWHERE never is."""
        matches: NDArray[np.bool_] = choices == np.array(self.labels, np.int64)
        return (choices >= 0) & matches


class OwnTokens:
    """The drafter's ids of the target's; all of them where both have the same."""

    def __init__(self, pair: Pair) -> None:
        self._to_own = None if pair.shared is None else pair.shared.to_draft_ids

    def __call__(self, token: int) -> int:
        """Return the drafter's id of the target's token, or NOWHERE."""
        return token if self._to_own is None else int(self._to_own[token])


def row_of(
    pair: Pair,
    prompt: Prompt,
    answer: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
) -> TrainingRow:
    """Make the row. told: of each token of the answer, what the target found likely."""
    draft_id, bridge = OwnTokens(pair), pair.bridge()
    bridge.start(prompt)
    ids = np.array([*prompt.ids.tolist(), *answer], dtype=np.uint32)
    full_context = np.array(bridge.context(ids))
    bridge.start(prompt)  # from here on it grows token by token, which costs what is new
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
    """How often a drafter says what the target says, at temperature 0.

    positions: how many places were looked at. alpha: the share of them at which it does. survival:
    S(1) to S(8); S(k) is the share of runs that reach k drafts, where a run begins with an answer
    and behind each token that was not drafted.
    """

    positions: int
    alpha: float
    survival: list[float]


DEPTHS = 8


def agreement(agreed: Sequence[NDArray[np.bool_]]) -> Agreement:
    """Count over answers. agreed: bool [n] each: did the drafter say the target's token there?"""
    positions, hits = sum(map(len, agreed)), sum(int(answer.sum()) for answer in agreed)
    reached, right = np.zeros(DEPTHS), np.zeros(DEPTHS)
    for answer in agreed:
        # one depth more, which takes all that are deeper
        reached_here, right_here = by_depth(answer, DEPTHS + 1)
        reached += reached_here[:DEPTHS]
        right += right_here[:DEPTHS]
    alphas = np.divide(right, reached, out=np.zeros(DEPTHS), where=reached > 0)
    return Agreement(positions, hits / max(1, positions), np.cumprod(alphas).tolist())
