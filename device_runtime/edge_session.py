"""The device's end of an edge's session: what the edge holds, and how it is talked with about it.

The edge follows the committed tokens and can be rebuilt from them: one that has forgotten the
session is told all tokens again, and since every draw is keyed by position the text goes on as it
would have (DESIGN §7). In: drafts, or how many tokens are wanted of `stream`. Out: answers to them,
whatever it took to get these.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.gauge import Answer
from pilotfish.device_runtime.link.loss import BUSY
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Timings
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import encode_ids
from pilotfish.wire.committed import Committed
from pilotfish.wire.errors import (
    DivergedError,
    MalformedError,
    PilotfishError,
    TooLargeError,
    UnknownSessionError,
)
from pilotfish.wire.protocols import LOCAL, Draft, Exchange

_NS = 1e-9
_RECOVERABLE = (UnknownSessionError, DivergedError, *BUSY)
_AHEAD = 48  # tokens of a stream that may be under way; an edge has room for 64 messages at least
_UNLIMITED = m.Limits(
    context=2**31 - 1, window=m.MAX_WINDOW, message_bytes=2**31 - 1, sessions=2**31 - 1
)


@dataclass(frozen=True)
class Settled:
    """A window's verdict, or on the way to it the edge's inquiry; and what that took.

    last: the answer that holds it. timings: of all exchanges, from drafting to the last reply.
    inquired: hidden states that the edge asked for before it.
    """

    reply: m.Verdict | m.Inquiry
    last: Answer
    timings: Timings
    uplink_bytes: int
    downlink_bytes: int
    pass_s: float
    inquired: int = 0


class Streamed(NamedTuple):
    """Tokens of `stream` as they came.

    reply: their times, and frames their ids. waited_ns: for them, which may have lain here already.
    """

    reply: m.Tokens
    answer: Answer
    waited_ns: int


class EdgeSession:
    """What one edge holds of the committed tokens; or, for `local`, no edge at all.

    committed: the conversation's, which its owner extends and cuts. vocab_size: that of its ids.
    """

    def __init__(self, link: EdgeLink | None, committed: Committed, vocab_size: int) -> None:
        self._link = link
        self._committed = committed
        self._vocab_size = vocab_size
        self._id = secrets.token_bytes(16)
        self._generation = -1
        self._held = 0  # a prefix of the committed tokens that the edge has too
        self._plan: Plan | None = None
        self._conditions: m.Conditions | None = None
        self._known_limits = _UNLIMITED

    @property
    def limits(self) -> m.Limits:
        """What the edge takes, as one that suits said when it was greeted last."""
        welcome = self._link.welcome if self._link is not None else None
        if welcome is not None:
            self._known_limits = welcome.limits
        return self._known_limits

    @property
    def _edge(self) -> EdgeLink:
        if self._link is None:
            raise MalformedError("This device has no edge; only protocol local works without one.")
        return self._link

    # What the edge holds

    def prepare(self, plan: Plan, conditions: m.Conditions | None) -> None:
        """A generation comes, of this plan; the edge decides by these conditions, if by any."""
        self._plan, self._conditions = plan, conditions

    def keep(self, length: int) -> None:
        """Of the committed tokens so many are left."""
        self._held = min(self._held, length)

    def agree(self, length: int) -> None:
        """Both ends have so many committed tokens."""
        self._held = length

    def begin(self) -> None:
        """Tell the edge what it lacks of the committed tokens, and how to sample after them."""
        assert self._plan is not None
        law = self._plan.law
        self._generation += 1
        begin = m.Begin(
            session=self._id,
            generation=self._generation,
            keep=self._held,
            hash=self._committed.hash_of(self._held),
            protocol=self._plan.protocol,
            seed=law.seed,
            temperature=law.sampling.temperature,
            top_k=law.sampling.top_k,
            top_p=law.sampling.top_p,
            options=self._plan.exchange.options.given() if self._plan.exchange else {},
            conditions=self._conditions,
        )
        missing = self._committed.ids[self._held :].copy()  # sent without a copy, may yet change
        self._edge.tell(begin, [encode_ids(missing, self._vocab_size)])
        self._held = len(self._committed)

    def _begin_anew(self, reason: PilotfishError) -> None:
        """Give the edge everything again.

        A session that it does not know gets a new name: the old one may belong to a connection
        that broke, and without keys nobody can prove that this was ours.
        """
        if isinstance(reason, UnknownSessionError):
            self._id = secrets.token_bytes(16)
        self._held = 0
        self.begin()

    def cancel(self) -> None:
        """Tell the edge to stop working on the generation, if it is listening."""
        if self._link is not None and self._plan is not None and self._plan.protocol != LOCAL:
            self._link.mention(m.Cancel(session=self._id, generation=self._generation))

    def close(self) -> None:
        """Tell the edge to forget the session."""
        if self._link is not None and self._generation >= 0:
            self._link.mention(m.Close(session=self._id))

    # Windows

    def settle(
        self,
        exchange: Exchange[Any],
        draft: Draft,
        started_ns: int,
        drafted_ns: int,
        meanwhile: Callable[[], None] | None,
    ) -> Settled | None:
        """The verdict on this draft; an edge that lost the session is told everything again.

        None if another edge has come that takes smaller windows only: then draft anew. meanwhile:
        what the drafter has to do while the window is with the edge.
        """
        start = len(self._committed)
        setbacks = self._edge.setbacks()
        while len(draft.ids) <= self.limits.window:
            pending = self._committed.ids[self._held :].copy()
            window = m.Window(
                session=self._id,
                generation=self._generation,
                start=start,
                hash=self._committed.hash_of(self._held),
            )
            frames = exchange.propose(draft, pending, self._vocab_size)
            self._expect_room(frames)
            try:
                wanted = self._answers(start, m.Verdict, m.Inquiry)
                answer = self._edge.ask(window, frames, wanted, meanwhile)
                first = self._arrived(answer, started_ns, drafted_ns)
                if isinstance(answer.reply, m.Verdict):
                    return first
                return self._supplied(exchange, draft, first)
            except _RECOVERABLE as error:
                setbacks.add(error)
                self._begin_anew(error)
        return None

    def _expect_room(self, frames: Sequence[m.Buffer]) -> None:
        """Raise `TooLargeError` for a longer message than the edge would even read."""
        most = self.limits.message_bytes
        if (size := sum(map(len, frames)) + m.HEADER_BYTES) > most:
            raise TooLargeError(
                f"The window takes up to {size:,} bytes and this edge {most:,}: use a smaller one, "
                "or a protocol that sends less."
            )

    def _supplied(self, exchange: Exchange[Any], draft: Draft, first: Settled) -> Settled:
        """The verdict, after the edge has been told what it asked for ``first``."""
        start, inquiry = len(self._committed), first.last
        states = m.States(session=self._id, generation=self._generation, start=start)
        frames = exchange.supply(draft, inquiry.frames)
        self._expect_room(frames)
        answer = self._edge.ask(states, frames, self._answers(start, m.Verdict))
        last = self._arrived(answer, inquiry.received_ns, inquiry.received_ns)
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
        assert isinstance(reply, m.Verdict | m.Inquiry)
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
        self, start: int, *kinds: type[m.Verdict | m.Inquiry | m.Tokens]
    ) -> Callable[[m.Reply], bool]:
        """Tells this round's reply from late ones of earlier rounds."""
        generation = self._generation

        def wanted(reply: m.Reply) -> bool:
            return (
                isinstance(reply, kinds)
                and reply.session == self._id
                and reply.generation == generation
                and reply.start == start
            )

        return wanted

    # `stream`

    def streamed(self, count: int) -> Iterator[Streamed]:
        """What the target says alone, as it comes; the caller commits each before the next.

        ``count`` tokens are asked for in good time, but no more of them than the edge keeps for a
        slow reader.
        """
        expected = len(self._committed) + count
        pulled = 0  # the tokens before this position have been asked for
        begun = False
        setbacks = self._edge.setbacks()
        while (start := len(self._committed)) < expected:
            pull = m.Pull(
                session=self._id,
                generation=self._generation,
                start=start,
                hash=self._committed.hash,
                count=min(_AHEAD, expected - start),
            )
            wanted = self._answers(start, m.Tokens)
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
            reply = answer.reply
            assert isinstance(reply, m.Tokens)
            if asked:  # others were on their way before more was asked for
                self._edge.gauge.measure(answer, reply.times.received_ns, reply.times.held_ns)
            yield Streamed(reply, answer, answer.received_ns - before_ns)
