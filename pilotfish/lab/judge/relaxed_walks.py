"""Compute the tokens that `adaptive` commits, for several relaxations at once.

In:  a question, a window γ, the sampling parameters of both ends, relaxations. Out: each
     relaxation's tokens and rounds, exactly as a device and an edge with these models would commit
     them with this seed, and the bytes of the rounds' messages.

Every draw depends only on the seed and on positions (`speculation.randomness`). So relaxations that
have committed the same tokens share the next window and the target's passes, until one of them
accepts a token that another rejects. The drafter reads the whole window, as a device does. The
target reads no token after a rejection, since it decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pilotfish.lab.judge.model_passes import Procedure
from pilotfish.lab.judge.question_reader import QuestionReader
from pilotfish.speculation.adaptive import DistributionComparison
from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.tree import Tree, Walk
from pilotfish.wire import messages as m
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols.adaptive import Adaptive
from pilotfish.wire.protocols.draws import coins, sample_next
from pilotfish.wire.protocols.protocol import (
    NO_IDS,
    Decision,
    DrawKey,
    RoundBytes,
    SamplingParams,
)
from pilotfish.wire.protocols.tslt import SparseDraft

# Contents of header fields that have the same size in every message of this kind.
_SESSION, _HASH, _GENERATION = bytes(16), bytes(8), 1
# A day of an edge's clock, and stays of a tenth of a second: msgpack's size of a number follows
# from its value.
_TIMES = m.Times(received_ns=86_400 * 10**9, held_ns=10**8, queue_ns=10**7, verify_ns=10**8)


class RelaxedRound(NamedTuple):
    """One round. drafted, accepted: tokens. deviation, key: sums over the verified tokens."""

    drafted: int
    accepted: int
    deviation: float
    key: int
    bytes: RoundBytes

    @property
    def verified(self) -> int:
        """The number of verified tokens."""
        return min(self.drafted, self.accepted + 1)


@dataclass(eq=False)
class RelaxedTrajectory:
    """A relaxation's answer and rounds. tokens: target ids, with the end token if there is one."""

    protocol: Adaptive
    tokens: list[int] = field(default_factory=list)
    rounds: list[RelaxedRound] = field(default_factory=list)


class RelaxedSampling(NamedTuple):
    """What all relaxations share. window: γ. target, drafter: sampling parameters of p and q."""

    window: int
    seed: int
    target: Sampling
    drafter: Sampling

    @property
    def target_params(self) -> SamplingParams:
        """The parameters of the edge's draws."""
        return SamplingParams(sampling=self.target, seed=self.seed)

    @property
    def drafter_params(self) -> SamplingParams:
        """The parameters of the device's draws."""
        return SamplingParams(sampling=self.drafter, seed=self.seed)


class _Decided(NamedTuple):
    """The trajectories with the same decision: accepted tokens, and the next token, if any."""

    accepted: int
    token: int | None
    trajectories: list[RelaxedTrajectory]


def relaxed_walks(
    reader: QuestionReader, protocols: Sequence[Adaptive], sampling: RelaxedSampling
) -> Procedure[list[RelaxedTrajectory]]:
    """Walk each relaxation to its answer's end; return the trajectories in this order."""
    trajectories = [RelaxedTrajectory(protocol) for protocol in protocols]
    branches = [(list[int](), trajectories)]
    while branches:
        answer, group = branches.pop()
        if len(answer) == reader.most or reader.has_ended(answer):
            for trajectory in group:
                trajectory.tokens = answer
        else:
            branches += yield from _round(reader, answer, group, sampling)
    return trajectories


def _round(
    reader: QuestionReader,
    answer: list[int],
    group: Sequence[RelaxedTrajectory],
    sampling: RelaxedSampling,
) -> Procedure[list[tuple[list[int], list[RelaxedTrajectory]]]]:
    """Draft and verify one window; return a branch for each different decision."""
    draft = yield from _draft(reader, answer, group[0].protocol, sampling)
    decided = yield from _verify(reader, answer, draft, group, sampling)
    ids = draft.ids.tolist()
    return [
        ([*answer, *ids[:accepted], *([] if token is None else [token])], trajectories)
        for accepted, token, trajectories in decided
    ]


def _draft(
    reader: QuestionReader, answer: list[int], protocol: Adaptive, sampling: RelaxedSampling
) -> Procedure[SparseDraft]:
    """Draft a window that leaves room for the target's token, as `drafting.window` does."""
    window, tree, rows = reader.window(answer), Tree(), []
    start = len(reader.prompt.ids) + len(answer)
    for depth in range(min(sampling.window, reader.most - len(answer) - 1)):
        result = yield window.read(tree.ids.tolist())
        logits = window.logits(result)[0]
        tokens, row = protocol.draw(logits, sampling.drafter_params, DrawKey(start, depth))
        tree.grow([tokens])
        rows.append(row)
        if tokens[0] in reader.ends:
            break
    return protocol.make_draft(tree, rows)


def _verify(
    reader: QuestionReader,
    answer: list[int],
    draft: SparseDraft,
    group: Sequence[RelaxedTrajectory],
    sampling: RelaxedSampling,
) -> Procedure[list[_Decided]]:
    """Decide on a window token by token, as `speculation.adaptive.verify` does."""
    start, params = len(reader.prompt.ids) + len(answer), sampling.target_params
    ids = draft.ids.tolist()
    coin = coins(len(ids), params, start)
    decided: list[_Decided] = []
    deviations = dict.fromkeys(group, 0.0)
    keys: dict[RelaxedTrajectory, list[bool]] = {trajectory: [] for trajectory in group}
    left = list(group)

    def close(walk: Walk, trajectories: list[RelaxedTrajectory]) -> None:
        """End the round of these trajectories with the token that follows the accepted ones."""
        token = sample_next(walk, params, DrawKey(start, walk.node))
        for each in trajectories:
            message = each.protocol.verdict(walk.node, token, deviations[each], keys[each])
            sizes = _round_bytes(each.protocol, draft, start, message, reader)
            key = sum(keys[each])
            each.rounds.append(RelaxedRound(len(ids), walk.node, deviations[each], key, sizes))
        ended = walk.node > 0 and reader.has_ended(ids[: walk.node])
        decided.append(_Decided(walk.node, None if ended else token, trajectories))

    for index, token in enumerate(ids):
        logits = yield from reader.logits([*answer, *ids[:index]])
        p = probabilities(logits[None], sampling.target)[0]
        comparison = DistributionComparison(p, draft.q.row(index))
        rejected: list[RelaxedTrajectory] = []
        for trajectory in left:
            rule = comparison.rule(token, trajectory.protocol.relaxation)
            deviations[trajectory] += rule.deviation
            keys[trajectory].append(rule.key)
            if not coin(index, rule.acceptance):
                rejected.append(trajectory)
        if rejected:
            close(Walk(index, comparison.residual(), rejected=True), rejected)
        left = [trajectory for trajectory in left if trajectory not in rejected]
        if not left:
            return decided
    logits = yield from reader.logits([*answer, *ids])
    close(Walk(len(ids), probabilities(logits[None], sampling.target)[0], rejected=False), left)
    return decided


def _round_bytes(
    protocol: Adaptive, draft: SparseDraft, start: int, decision: Decision, reader: QuestionReader
) -> RoundBytes:
    """Encode the round's messages; return the bytes of their headers and frames."""
    up = m.Window(session=_SESSION, generation=_GENERATION, start=start, hash=_HASH)
    down = m.Verdict(
        session=_SESSION,
        generation=_GENERATION,
        start=start,
        accepted=decision.accepted,
        token=decision.token,
        times=_TIMES,
        notes=list(decision.notes),
    )
    frames = protocol.encode_draft(draft, NO_IDS, reader.vocab_size)
    return RoundBytes(_size(up, frames), _size(down, decision.frames))


def _size(header: m.Header, frames: Sequence[Buffer]) -> int:
    return len(m.encode(header)) + sum(map(len, frames))
