"""The session loop: draft, propose, wait for the verdict, commit; and the two baselines.

The session owns the committed tokens. The drafter's K/V and the edge's session follow them, and
both can be rebuilt from them: an edge that has forgotten the session is told all tokens again, and
since every draw is keyed by position the text goes on as it would have (DESIGN §7).

A window whose verdict never came may be abandoned for `local`, since it was the link that decided
so and not what was drawn. Nothing of it is kept, and the drafter's own tokens are drawn for a
purpose of their own.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.bridge import Prompt
from device_runtime.drafter import Drafter
from device_runtime.link.edge_link import EdgeLink
from device_runtime.link.gauge import Answer
from device_runtime.link.loss import BUSY, Interrupt
from device_runtime.plan import Plan
from device_runtime.record import Round, Timings
from speculation.channel import Channel
from speculation.randomness import Purpose
from speculation.tree import Expansion, nodes_at_most
from wire.codecs.ids import decode_ids, encode_ids
from wire.committed import Committed
from wire.errors import (
    DivergedError,
    MalformedError,
    PilotfishError,
    PromptTooLongError,
    TooLargeError,
    UnknownSessionError,
)
from wire.messages import (
    HEADER_BYTES,
    MAX_WINDOW,
    Begin,
    Cancel,
    Close,
    Inquiry,
    Judging,
    Limits,
    Pull,
    Reply,
    States,
    Tokens,
    Verdict,
    Window,
)
from wire.protocols import LOCAL, STREAM, Draft, Exchange, Law, Ruling, choose

_NS = 1e-9
_RECOVERABLE = (UnknownSessionError, DivergedError, *BUSY)
_AHEAD = 48  # tokens of a stream that may be under way; an edge has room for 64 messages at least
_UNKNOWN = Channel()
_UNLIMITED = Limits(
    context=2**31 - 1, window=MAX_WINDOW, message_bytes=2**31 - 1, sessions=2**31 - 1
)


@dataclass(frozen=True)
class Settled:
    """A window's verdict, and what the way to it took.

    last: the answer that holds it. timings: of all exchanges, from drafting to the last reply.
    """

    reply: Verdict | Inquiry
    last: Answer
    timings: Timings
    uplink_bytes: int
    downlink_bytes: int
    pass_s: float
    inquired: int = 0


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
        self._drafter = drafter
        self._link = link
        self._interrupt = interrupt or Interrupt()
        self._id = secrets.token_bytes(16)
        self._generation = -1
        self._at_edge = 0  # a prefix of the committed tokens that the edge holds too
        self._plan: Plan | None = None
        self._channel = _UNKNOWN
        self._known_limits = _UNLIMITED
        self.committed = Committed()

    @property
    def _limits(self) -> Limits:
        """What the edge takes, as one that suits said when it was greeted last."""
        welcome = self._link.welcome if self._link is not None else None
        if welcome is not None:
            self._known_limits = welcome.limits
        return self._known_limits

    @property
    def context(self) -> int:
        """Tokens that both ends have room for, the prompt's included.

        A drafter with other tokens sets no limit: where its own context is full, it drafts nothing.
        """
        if not self._drafter.bridge.trivial:
            return self._limits.context
        return min(self._drafter.context, self._limits.context)

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
        self._at_edge = min(self._at_edge, kept)
        self._drafter.start(prompt)
        self._plan, self._channel = plan, channel

    def shared(self, prompt: NDArray[np.uint32]) -> int:
        """How many tokens of the prompt, from the first one on, are those of this session."""
        return _common_prefix(self.committed.ids, prompt)

    def join(self) -> None:
        """Let the edge take part: now, or again after the drafter went on alone."""
        assert self._plan is not None
        self._begin()
        if self._plan.protocol != STREAM:  # while the edge reads, too
            self._drafter.read(self.committed.ids, self._interrupt.check)

    def _begin(self) -> None:
        """Tell the edge what it lacks of the committed tokens, and how to sample after them."""
        assert self._plan is not None
        law = self._plan.law
        self._generation += 1
        begin = Begin(
            session=self._id,
            generation=self._generation,
            keep=self._at_edge,
            hash=self.committed.hash_of(self._at_edge),
            protocol=self._plan.protocol,
            seed=law.seed,
            temperature=law.sampling.temperature,
            top_k=law.sampling.top_k,
            top_p=law.sampling.top_p,
            judging=self._judging(),
        )
        missing = self.committed.ids[self._at_edge :].copy()  # sent without a copy, may yet change
        self._edge.tell(begin, [encode_ids(missing, self._drafter.bridge.vocab_size)])
        self._at_edge = len(self.committed)

    def _judging(self) -> Judging | None:
        """What a decision head goes by, where one is to judge."""
        plan, channel = self._plan, self._channel
        if plan is None or plan.exchange is None or not plan.exchange.judged:
            return None
        return Judging(
            drafter=self._drafter.manifest.origin,
            hidden_size=self._drafter.manifest.dimensions.hidden,
            threshold=plan.threshold,
            rtt_s=channel.rtt_s,
            up_bps=channel.up_bps,
            down_bps=channel.down_bps,
            loss=channel.loss,
        )

    def _begin_anew(self, reason: PilotfishError) -> None:
        """Give the edge everything again.

        A session that it does not know gets a new name: the old one may belong to a connection
        that broke, and without keys nobody can prove that this was ours.
        """
        if isinstance(reason, UnknownSessionError):
            self._id = secrets.token_bytes(16)
        self._at_edge = 0
        self._begin()

    @property
    def _edge(self) -> EdgeLink:
        if self._link is None:
            raise MalformedError("This device has no edge; only protocol local works without one.")
        return self._link

    def keep(self, length: int) -> None:
        """Keep only ``length`` committed tokens: the answer ended within a round."""
        self.committed.truncate(length)
        self._at_edge = min(self._at_edge, length)

    # Speculation

    def speculate(self, plan: Plan, remaining: int, ends: Sequence[int]) -> Proposal:
        """One round: a window within ``plan.expansion`` is drafted, verified and committed."""
        exchange = plan.exchange
        assert exchange is not None
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
            settled = self._settled_by_edge(exchange, draft, started_ns, time.monotonic_ns())
        verdict = settled.reply
        assert isinstance(verdict, Verdict)
        ruling = Ruling(
            verdict.accepted, verdict.token, settled.last.frames, forgiven=verdict.forgiven
        )
        if ruling.accepted > len(draft.ids) or ruling.forgiven > ruling.accepted:
            raise MalformedError("The edge's verdict does not fit the window that was sent.")
        path = draft.path(ruling.accepted)
        token = exchange.settle(draft, ruling, plan.law, round_start=start, vocab_size=vocab)
        if token >= vocab:
            raise MalformedError(f"The edge's verdict names token {token} of {vocab}.")
        committed = [*(int(draft.ids[node - 1]) for node in path), token]
        self.committed.extend(committed)
        # a token that was sampled here is pending: the edge learns it with the next window
        self._at_edge = len(self.committed) - (ruling.token is None)
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
            forgiven=ruling.forgiven,
            inquired=settled.inquired,
            pass_s=settled.pass_s,
        )
        return Proposal(record, len(path) == draft.depth)

    def _room(self, expansion: Expansion, levels: int) -> Expansion:
        """What of the expansion is wanted still, the edge takes, and fits into the context.

        By the nodes that it may have: what was drawn must not decide what is sent.
        """
        expansion = expansion[: max(0, levels)]
        room = max(0, min(self._limits.window, self.context - len(self.committed) - 1))
        while nodes_at_most(expansion) > room:
            expansion = expansion[:-1]
        return expansion

    def _settled_by_edge(
        self, exchange: Exchange[Any], draft: Draft, started_ns: int, drafted_ns: int
    ) -> Settled | None:
        """The verdict on this draft; an edge that lost the session is told everything again.

        None if another edge has come that takes smaller windows only: then draft anew.
        """
        start = len(self.committed)
        setbacks = self._edge.setbacks()
        while len(draft.ids) <= self._limits.window:
            pending = self.committed.ids[self._at_edge :].copy()
            window = Window(
                session=self._id,
                generation=self._generation,
                start=start,
                hash=self.committed.hash_of(self._at_edge),
            )
            frames = exchange.propose(draft, pending, self._drafter.bridge.vocab_size)
            # longer ones the edge would not even read
            if (size := sum(map(len, frames)) + HEADER_BYTES) > self._limits.message_bytes:
                raise TooLargeError(
                    f"The window takes up to {size:,} bytes and this edge "
                    f"{self._limits.message_bytes:,}: use a smaller one, or a protocol that sends "
                    "less."
                )
            try:
                wanted = self._answers((Verdict, Inquiry), start)
                answer = self._edge.ask(window, frames, wanted, self._meanwhile(exchange))
                first = self._arrived(answer, started_ns, drafted_ns)
                if isinstance(answer.reply, Verdict):
                    return first
                return self._supplied(exchange, draft, answer, first)
            except _RECOVERABLE as error:
                setbacks.add(error)
                self._begin_anew(error)
        return None

    def _meanwhile(self, exchange: Exchange[Any]) -> Callable[[], None]:
        """What the drafter does while a window is with the edge."""
        return self._drafter.read_last if exchange.judged else lambda: None

    def _supplied(
        self, exchange: Exchange[Any], draft: Draft, inquiry: Answer, first: Settled
    ) -> Settled:
        """The verdict, after the edge has been told what it asked for."""
        start = len(self.committed)
        frames = exchange.supply(draft, inquiry.frames)
        states = States(session=self._id, generation=self._generation, start=start)
        answer = self._edge.ask(states, frames, self._answers((Verdict,), start))
        then_ns = inquiry.received_ns
        last = self._arrived(answer, then_ns, then_ns)
        return replace(
            last,
            timings=first.timings + last.timings,
            uplink_bytes=first.uplink_bytes + last.uplink_bytes,
            downlink_bytes=first.downlink_bytes + last.downlink_bytes,
            pass_s=first.pass_s,
            inquired=len(inquiry.frames[0]),
        )

    def _arrived(self, answer: Answer, started_ns: int, drafted_ns: int) -> Settled:
        """One exchange; the link's meter learns from it."""
        reply = answer.reply
        assert isinstance(reply, Verdict | Inquiry)
        timings = self._edge.gauge.timings(answer, reply.times, started_ns, drafted_ns)
        return Settled(
            reply=reply,
            last=answer,
            timings=timings,
            uplink_bytes=answer.uplink_bytes,
            downlink_bytes=answer.downlink_bytes,
            pass_s=reply.times.verify_ns * _NS,
        )

    def _answers(
        self, kinds: tuple[type[Verdict] | type[Inquiry] | type[Tokens], ...], start: int
    ) -> Callable[[Reply], bool]:
        """Tells this round's reply from late ones of earlier rounds."""
        generation = self._generation

        def wanted(reply: Reply) -> bool:
            return (
                isinstance(reply, kinds)
                and reply.session == self._id
                and reply.generation == generation
                and reply.start == start
            )

        return wanted

    # Baselines

    def stream(self, count: int) -> Iterator[Proposal]:
        """`stream`: the target generates ``count`` tokens alone; they come one by one.

        They are asked for in good time, but no more of them than the edge keeps for a slow reader.
        """
        count = min(count, self.context - len(self.committed))
        expected = len(self.committed) + count
        pulled = 0  # the tokens before this position have been asked for
        begun = False
        setbacks = self._edge.setbacks()
        while (start := len(self.committed)) < expected:
            pull = Pull(
                session=self._id,
                generation=self._generation,
                start=start,
                hash=self.committed.hash,
                count=min(_AHEAD, expected - start),
            )
            wanted = self._answers((Tokens,), start)
            before_ns = time.monotonic_ns()
            asked, more_bytes = not begun, 0
            try:
                if asked:
                    answer = self._edge.ask(pull, (), wanted)
                    begun = True
                else:
                    if pulled < expected and pulled - start <= _AHEAD // 2:
                        more_bytes = self._edge.mention(pull)
                    answer = self._edge.wait(pull, (), wanted, more_bytes, before_ns)
            except _RECOVERABLE as error:
                begun = False
                setbacks.add(error)
                self._begin_anew(error)
                continue
            if asked or more_bytes:
                pulled = start + pull.count
            setbacks = self._edge.setbacks()
            yield self._streamed(answer, start, before_ns, asked=asked)

    def _streamed(self, answer: Answer, start: int, before_ns: int, *, asked: bool) -> Proposal:
        reply = answer.reply
        assert isinstance(reply, Tokens)
        if len(answer.frames) != 1 or len(answer.frames[0]) == 0:
            raise MalformedError("The edge sent a stream message without tokens.")
        ids = decode_ids(answer.frames[0], self._drafter.bridge.vocab_size).tolist()
        self.committed.extend(ids)
        self._at_edge = len(self.committed)
        if asked:  # others were on their way before more was asked for
            self._edge.gauge.measure(answer, reply.times.received_ns, reply.times.held_ns)
        # of a pass only what was waited for: with bursts or a slow reader tokens lie here already
        waited = answer.received_ns - before_ns
        verify = min(waited, reply.times.verify_ns)
        record = Round(
            protocol=STREAM,
            start=start,
            window=0,
            accepted=0,
            tokens=ids,
            uplink_bytes=answer.uplink_bytes,
            downlink_bytes=answer.downlink_bytes,
            timings=Timings(verify=verify * _NS, downlink=(waited - verify) * _NS),
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
        if self._link is not None and self._plan is not None and self._plan.protocol != LOCAL:
            self._link.mention(Cancel(session=self._id, generation=self._generation))

    def close(self) -> None:
        """Tell the edge to forget the session."""
        if self._link is not None and self._generation >= 0:
            self._link.mention(Close(session=self._id))


def _common_prefix(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> int:
    shorter = min(len(a), len(b))
    differing = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differing[0]) if len(differing) else shorter
