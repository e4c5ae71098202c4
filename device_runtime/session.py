"""The session loop: draft, have the edge settle it, commit; and the two baselines.

The session owns the committed tokens. The drafter's K/V and the edge's session follow them, and
both can be rebuilt from them.

A window whose verdict never came may be abandoned for `local`, since it was the link that decided
so and not what was drawn. Nothing of it is kept, and the drafter's own tokens are drawn for a
purpose of their own.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.bridge import Prompt
from pilotfish.device_runtime.drafter import Drafter
from pilotfish.device_runtime.edge_session import EdgeSession, Settled, Streamed
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.loss import Interrupt
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round, Timings
from pilotfish.speculation.channel import Channel
from pilotfish.speculation.randomness import Purpose
from pilotfish.speculation.tree import Expansion, nodes_at_most
from pilotfish.wire.codecs.ids import decode_ids
from pilotfish.wire.committed import Committed
from pilotfish.wire.errors import MalformedError, PromptTooLongError
from pilotfish.wire.messages import Conditions, Verdict
from pilotfish.wire.protocols import LOCAL, STREAM, Law, Ruling, choose

_NS = 1e-9
_UNKNOWN = Channel()


@dataclass(frozen=True)
class Proposal:
    """What the rounds yield: tokens that both ends agree on, and how they came about."""

    record: Round  # ``tokens`` holds all of the round; the caller cuts what is not wanted
    full: bool  # every drafted token was accepted, so the last token is a bonus


class Session:
    """One conversation with one edge, or with none for `local`."""

    def __init__(
        self, drafter: Drafter, link: EdgeLink | None, interrupt: Interrupt | None = None
    ) -> None:
        self.committed = Committed()
        self._drafter = drafter
        self._edge = EdgeSession(link, self.committed, drafter.bridge.vocab_size)
        self._interrupt = interrupt or Interrupt()
        self._plan: Plan | None = None

    @property
    def context(self) -> int:
        """Tokens that both ends have room for, the prompt's included.

        A drafter with other tokens sets no limit: where its own context is full, it drafts nothing.
        """
        if not self._drafter.bridge.trivial:
            return self._edge.limits.context
        return min(self._drafter.context, self._edge.limits.context)

    def start(self, prompt: Prompt, plan: Plan, channel: Channel = _UNKNOWN) -> None:
        """Prepare a generation: what the session and the prompt share is kept on both ends.

        channel: the link as it was measured for it, which a decision head goes by to its end.
        """
        ids = prompt.ids
        if len(ids) == 0:
            raise MalformedError("The prompt is empty; a generation needs a token to go on from.")
        if len(ids) >= self.context:
            raise PromptTooLongError(
                f"The prompt has {len(ids)} tokens; drafter and target together take at most "
                f"{self.context - 1}."
            )
        if plan.protocol == LOCAL and len(prompt.own) > self._drafter.context:
            raise PromptTooLongError(
                f"The prompt has {len(prompt.own)} tokens of the drafter's, which takes at most "
                f"{self._drafter.context}."
            )
        kept = self.shared(ids)
        self.committed.truncate(kept)
        self.committed.extend(ids[kept:])
        self._drafter.start(prompt)
        self._plan = plan
        self._edge.keep(kept)
        self._edge.prepare(plan, self._conditions(plan, channel))

    def shared(self, prompt: NDArray[np.uint32]) -> int:
        """How many tokens of the prompt, from the first one on, are those of this session."""
        return _common_prefix(self.committed.ids, prompt)

    def join(self) -> None:
        """Let the edge take part: now, or again after the drafter went on alone."""
        assert self._plan is not None
        self._edge.begin()
        if self._plan.protocol != STREAM:  # while the edge reads, too
            self._drafter.read(self.committed.ids, self._interrupt.check)

    def _conditions(self, plan: Plan, channel: Channel) -> Conditions | None:
        """What the edge decides by, where it does."""
        if not plan.by_link:
            return None
        return Conditions(
            drafter=self._drafter.manifest.origin,
            hidden_size=self._drafter.manifest.dimensions.hidden,
            rtt_s=channel.rtt_s,
            up_bps=channel.up_bps,
            down_bps=channel.down_bps,
            loss=channel.loss,
        )

    def keep(self, length: int) -> None:
        """Keep only ``length`` committed tokens: the answer ended within a round."""
        self.committed.truncate(length)
        self._edge.keep(length)

    # Speculation

    def speculate(self, plan: Plan, remaining: int, ends: Sequence[int]) -> Proposal:
        """One round: a window within ``plan.expansion`` is drafted, verified and committed."""
        exchange = plan.exchange
        assert exchange is not None
        meanwhile = self._drafter.read_last if exchange.inquires else None
        started_ns = time.monotonic_ns()
        start, vocab = len(self.committed), self._drafter.bridge.vocab_size
        settled: Settled | None = None
        while settled is None:
            draft = self._drafter.draft(
                self.committed.ids,
                self._room(plan.expansion, min(remaining, self.context - start) - 1),
                exchange,
                plan.drafting,
                ends,
                auto=plan.auto,
            )
            drafted_ns = time.monotonic_ns()
            settled = self._edge.settle(exchange, draft, started_ns, drafted_ns, meanwhile)
        verdict = settled.reply
        assert isinstance(verdict, Verdict)
        ruling = Ruling(verdict.accepted, verdict.token, settled.last.frames, verdict.notes)
        if ruling.accepted > len(draft.ids):
            raise MalformedError("The edge's verdict does not fit the window that was sent.")
        path = draft.path(ruling.accepted)
        notes = exchange.check_notes(ruling.notes, window=draft.depth, accepted=len(path))
        token = exchange.settle(draft, ruling, plan.law, round_start=start, vocab_size=vocab)
        if token >= vocab:
            raise MalformedError(f"The edge's verdict names token {token} of {vocab}.")
        committed = [*(int(draft.ids[node - 1]) for node in path), token]
        self.committed.extend(committed)
        # a token that was sampled here is pending: the edge learns it with the next window
        self._edge.agree(len(self.committed) - (ruling.token is None))
        self._drafter.keep(path)
        settled.timings.settle += (time.monotonic_ns() - settled.last.received_ns) * _NS
        record = Round(
            protocol=exchange.name,
            start=start,
            window=draft.depth,
            nodes=len(draft.ids),
            accepted=len(path),
            tokens=committed,
            uplink_bytes=settled.uplink_bytes,
            downlink_bytes=settled.downlink_bytes,
            timings=settled.timings,
            notes=notes,
            inquired=settled.inquired,
            pass_s=settled.pass_s,
        )
        return Proposal(record, len(path) == draft.depth)

    def _room(self, expansion: Expansion, levels: int) -> Expansion:
        """What of the expansion is wanted still, the edge takes, and fits into the context.

        By the nodes that it may have: what was drawn must not decide what is sent.
        """
        expansion = expansion[: max(0, levels)]
        room = max(0, min(self._edge.limits.window, self.context - len(self.committed) - 1))
        while nodes_at_most(expansion) > room:
            expansion = expansion[:-1]
        return expansion

    # Baselines

    def stream(self, count: int) -> Iterator[Proposal]:
        """`stream`: the target generates ``count`` tokens alone; they come one by one."""
        for tokens in self._edge.streamed(min(count, self.context - len(self.committed))):
            yield self._streamed(tokens)

    def _streamed(self, tokens: Streamed) -> Proposal:
        reply, answer, waited_ns = tokens
        if len(answer.frames) != 1 or len(answer.frames[0]) == 0:
            raise MalformedError("The edge sent a stream message without tokens.")
        ids = decode_ids(answer.frames[0], self._drafter.bridge.vocab_size).tolist()
        start = len(self.committed)
        self.committed.extend(ids)
        self._edge.agree(len(self.committed))
        # of a pass only what was waited for: with bursts or a slow reader tokens lie here already
        verify_ns = min(waited_ns, reply.times.verify_ns)
        record = Round(
            protocol=STREAM,
            start=start,
            window=0,
            accepted=0,
            tokens=ids,
            uplink_bytes=answer.uplink_bytes,
            downlink_bytes=answer.downlink_bytes,
            timings=Timings(verify=verify_ns * _NS, downlink=(waited_ns - verify_ns) * _NS),
            pass_s=reply.times.verify_ns * _NS,
        )
        return Proposal(record, full=False)

    def local(self, law: Law, count: int) -> Iterator[Proposal]:
        """`local`: the drafter generates alone, until its context is full."""
        for _ in range(min(count, self.context - len(self.committed))):
            if self._drafter.room(self.committed.ids) < 0:
                return
            started_ns = time.monotonic_ns()
            start = len(self.committed)
            self._drafter.read(self.committed.ids, self._interrupt.check)
            token = choose(self._drafter.logits(self.committed.ids), law, start, Purpose.LOCAL)
            self.committed.extend([token])
            record = Round(protocol=LOCAL, start=start, window=0, accepted=0, tokens=[token])
            record.timings.draft = (time.monotonic_ns() - started_ns) * _NS
            yield Proposal(record, full=False)

    def cancel(self) -> None:
        """Tell the edge to stop working on the generation, if it is listening."""
        self._edge.cancel()

    def close(self) -> None:
        """Tell the edge to forget the session."""
        self._edge.close()


def _common_prefix(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> int:
    shorter = min(len(a), len(b))
    differing = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differing[0]) if len(differing) else shorter
