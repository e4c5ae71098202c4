"""The device's view of its session at the edge: which tokens the edge holds, and the requests.

An edge that has lost the session is sent all committed tokens again. Since every draw is keyed by
position, the text goes on unchanged. In: drafts, or a number of tokens of a stream.
Out: the edge's replies; requests are repeated as often as the link's policy allows.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pilotfish.base.errors import (
    DivergedError,
    MalformedError,
    PilotfishError,
    TooLargeError,
    UnknownSessionError,
)
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.link_estimator import TimedReply
from pilotfish.device_runtime.link.pending import SentRequest
from pilotfish.device_runtime.link.retry import BUSY, RetryBudget
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Timings
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import encode_ids
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.protocols import LOCAL, Draft, SpeculationProtocol
from pilotfish.wire.protocols.protocol import NO_IDS

_NS = 1e-9
_RECOVERABLE = (UnknownSessionError, DivergedError, *BUSY)
_PULL_TOKENS, _PULL_BELOW = (
    48,
    36,
)  # stream tokens asked for ahead; an edge has room for 64 messages at least
_UNLIMITED = m.Limits(
    context=2**31 - 1, window=m.MAX_WINDOW, message_bytes=2**31 - 1, sessions=2**31 - 1
)


@dataclass(slots=True)
class VerifiedWindow:
    """A window's verdict, its times and its bytes.

    frames: the verdict's, and that of the logprobs if they were asked for. timings: of all
    exchanges, without drafting and settling. inquired: number of hidden states that the edge asked
    for first. received_ns: when the verdict came.
    """

    verdict: m.Verdict
    frames: Sequence[m.Buffer]
    timings: Timings
    uplink_bytes: int
    downlink_bytes: int
    received_ns: int
    pass_s: float
    inquired: int = 0


class StreamedTokens(NamedTuple):
    """Tokens of a stream; the frames are their ids.

    waited_ns: time spent waiting for them; short if they had arrived before.
    """

    reply: m.Tokens
    answer: TimedReply
    waited_ns: int


class EdgeSession:
    """One edge's copy of the committed tokens; `local` has no link, and no such copy.

    committed: owned by the session, which extends and cuts them. vocab_size: of their ids.
    """

    def __init__(self, link: EdgeLink | None, committed: CommittedTokens, vocab_size: int) -> None:
        self._link = link
        self._committed = committed
        self._vocab_size = vocab_size
        self._id = secrets.token_bytes(16)
        self._generation = -1
        self._edge_length = 0  # committed tokens, from the first on, that the edge has too
        self._plan: Plan | None = None
        self._prompt_length = 0  # tokens of its prompt
        self._conditions: m.DecisionConditions | None = None
        self._begin_length = 0  # committed tokens when the edge was last told to begin
        self.has_prompt_logprobs = (
            True  # the prompt's log-probabilities have come, if they were asked for
        )
        self._last_limits = _UNLIMITED
        self._begin_connection = (
            0  # the connection over which the edge was last told to begin; 0: none
        )

    @property
    def limits(self) -> m.Limits:
        """The limits of the present edge, or of the last suitable one."""
        welcome = self._link.welcome if self._link is not None else None
        return self._last_limits if welcome is None else welcome.limits

    def note_welcome(self) -> None:
        """Keep the present edge's limits for the time in which no suitable edge is there."""
        self._last_limits = self.limits

    @property
    def _edge(self) -> EdgeLink:
        if self._link is None:
            raise MalformedError("This device has no edge; only protocol local works without one.")
        return self._link

    # The edge's tokens

    def prepare(
        self, plan: Plan, prompt_length: int, conditions: m.DecisionConditions | None
    ) -> None:
        """Set the plan of the next generation, and the conditions that the edge decides by.

        since: tokens of its prompt.
        """
        self.note_welcome()
        self._plan, self._prompt_length, self._conditions = plan, prompt_length, conditions
        self.has_prompt_logprobs = plan.prompt_logprobs is None

    def truncate(self, length: int) -> None:
        """Note that the committed tokens were cut to ``length``."""
        self._edge_length = min(self._edge_length, length)

    def set_edge_length(self, length: int) -> None:
        """Note that the edge holds ``length`` committed tokens."""
        self._edge_length = length

    def begin(self) -> None:
        """Send `begin`: the committed tokens that the edge lacks, and how to sample."""
        assert self._plan is not None
        law = self._plan.sampling
        self._generation += 1
        begin = m.Begin(
            session=self._id,
            generation=self._generation,
            keep=self._edge_length,
            hash=self._committed.hash_at(self._edge_length),
            protocol=self._plan.protocol,
            seed=law.seed,
            temperature=law.sampling.temperature,
            top_k=law.sampling.top_k,
            top_p=law.sampling.top_p,
            options=self._plan.exchange.options.to_dict() if self._plan.exchange else {},
            conditions=self._conditions,
            min_p=law.sampling.min_p,
            shape=m.LogitsOptionsMsg.from_options(law.logits_options, self._prompt_length),
            logprobs=self._plan.logprobs,
            prompt_logprobs=None if self.has_prompt_logprobs else self._plan.prompt_logprobs,
        )
        self._begin_length = len(self._committed)
        missing = self._committed.ids[
            self._edge_length :
        ].copy()  # may change while ZeroMQ sends it
        frames: list[m.Buffer] = [encode_ids(missing, self._vocab_size)]
        if law.logits_options.grammar is not None:
            frames.append(law.logits_options.grammar.text.encode())
        self._edge.notify(begin, frames)
        self.note_welcome()
        self._begin_connection = self._edge.connection
        self._edge_length = len(self._committed)

    def _begin_again(self, reason: PilotfishError) -> None:
        """Send the edge all committed tokens again.

        An unknown session gets a new id: without keys, the old id may belong to the broken
        connection, and this end cannot prove that the session is its own.
        """
        if isinstance(reason, UnknownSessionError):
            self._id = secrets.token_bytes(16)
        if (
            self._edge.connection != self._begin_connection
        ):  # so quick a return that nothing else showed it
            self._edge.on_lost()
        self._edge_length = 0
        self.begin()

    def cancel(self) -> None:
        """Tell the edge, if it is there, to stop working on the generation."""
        if self._link is not None and self._plan is not None and self._plan.protocol != LOCAL:
            self._link.try_send(m.Cancel(session=self._id, generation=self._generation))

    def close(self) -> None:
        """Tell the edge to forget the session."""
        if self._link is not None and self._generation >= 0:
            self._link.try_send(m.Close(session=self._id))

    def forget(self) -> None:
        """Go on with another session, of which the edge holds nothing."""
        self.close()
        self._id = secrets.token_bytes(16)
        self._edge_length = 0

    def expects_prompt_logprobs(self, start: int) -> bool:
        """Whether a reply from this position on has the prompt's log-probabilities."""
        return not self.has_prompt_logprobs and start == self._begin_length

    # Windows

    def send(self, exchange: SpeculationProtocol[Any], draft: Draft) -> SentRequest:
        """Send a window, with the pending token before it if there is one."""
        all_held = self._edge_length == len(self._committed)
        pending = NO_IDS if all_held else self._committed.ids[self._edge_length :].copy()
        window = m.Window(
            session=self._id,
            generation=self._generation,
            start=len(self._committed),
            hash=self._committed.hash_at(self._edge_length),
        )
        frames = exchange.encode_draft(draft, pending, self._vocab_size)
        self._require_room(frames)
        sent = self._edge.send(window, frames)
        self.note_welcome()
        return sent

    def wait_verdict(
        self,
        exchange: SpeculationProtocol[Any],
        draft: Draft,
        sent: SentRequest,
        drafted_ns: int,
        *,
        late: bool = False,
    ) -> VerifiedWindow | None:
        """Wait for the verdict on a window; begins again at an edge that lost the session.

        Returns None if another edge with smaller windows has come: draft again. late: the drafter
        has worked since the window was sent.
        """
        setbacks = RetryBudget(self._edge)
        while True:
            wanted = self._reply_test(len(self._committed), m.Verdict, m.StatesRequest)
            try:
                answer = self._edge.wait(sent, wanted, late=late)
                if isinstance(answer.reply, m.Verdict):
                    return self._verified_window(answer, answer.reply, drafted_ns)
                return self._send_states(exchange, draft, answer, drafted_ns)
            except _RECOVERABLE as error:
                setbacks.add(error)
                self._begin_again(error)
            if len(draft.ids) > self.limits.window:
                return None
            sent = self.send(exchange, draft)

    def _require_room(self, frames: Sequence[m.Buffer]) -> None:
        """Raise `TooLargeError` if the edge would not accept a message of this size."""
        most = self.limits.message_bytes
        if (size := sum(map(len, frames)) + m.HEADER_BYTES) > most:
            raise TooLargeError(
                f"The window takes up to {size:,} bytes and this edge {most:,}: use a smaller one, "
                "or a protocol that sends less."
            )

    def _send_states(
        self, exchange: SpeculationProtocol[Any], draft: Draft, first: TimedReply, drafted_ns: int
    ) -> VerifiedWindow:
        """Send the hidden states that the edge asked for, and wait for the verdict."""
        inquiry = first.reply
        assert isinstance(inquiry, m.StatesRequest)
        timings = self._edge.estimator.timings(first, inquiry.times, drafted_ns)
        start = len(self._committed)
        states = m.States(session=self._id, generation=self._generation, start=start)
        frames = exchange.encode_states(draft, first.frames)
        self._require_room(frames)
        answer = self._edge.request(states, frames, self._reply_test(start, m.Verdict))
        assert isinstance(answer.reply, m.Verdict)
        found = self._verified_window(answer, answer.reply, first.received_ns)
        found.timings = timings + found.timings
        found.uplink_bytes += first.uplink_bytes
        found.downlink_bytes += first.downlink_bytes
        found.pass_s = inquiry.times.verify_ns * _NS
        found.inquired = len(first.frames[0])
        return found

    def _verified_window(
        self, answer: TimedReply, verdict: m.Verdict, ready_ns: int
    ) -> VerifiedWindow:
        """Build a verified window from a reply, and feed the link's meter."""
        return VerifiedWindow(
            verdict,
            answer.frames,
            self._edge.estimator.timings(answer, verdict.times, ready_ns),
            answer.uplink_bytes,
            answer.downlink_bytes,
            answer.received_ns,
            verdict.times.verify_ns * _NS,
        )

    def _reply_test(
        self, start: int, *kinds: type[m.Verdict | m.StatesRequest | m.Tokens]
    ) -> Callable[[m.Reply], bool]:
        """Return a test that tells this round's reply from late ones of earlier rounds."""
        generation = self._generation

        def wanted(reply: m.Reply) -> bool:
            return (
                isinstance(reply, kinds)
                and reply.session == self._id
                and reply.generation == generation
                and reply.start == start
            )

        return wanted

    # `stream` and `ahead`

    @property
    def incarnation(self) -> tuple[int, int]:
        """Changes when the edge may have lost what it was told: generation and connection."""
        return self._generation, self._edge.connection

    def hint(self, start: int, digest: bytes, frames: Sequence[m.Buffer]) -> int | None:
        """Send a hint of the tokens from ``start`` on; returns its bytes, None if it did not go."""
        hint = m.Hint(session=self._id, generation=self._generation, start=start, hash=digest)
        return self._edge.try_send(hint, frames)

    def stream_tokens(
        self, count: int, on_idle: Callable[[], bool] | None = None
    ) -> Iterator[StreamedTokens]:
        """Yield ``count`` tokens that the target generates; commit each part before the next.

        Tokens are asked for ahead, at most as many as the edge keeps for a slow reader. meanwhile:
        what to do while none has arrived, as `EdgeLink.wait` has it.
        """
        expected = len(self._committed) + count
        pulled = 0  # the tokens before this position have been asked for
        begun = False
        setbacks = RetryBudget(self._edge)
        while (start := len(self._committed)) < expected:
            pull = m.Pull(
                session=self._id,
                generation=self._generation,
                start=start,
                hash=self._committed.hash,
                count=min(_PULL_TOKENS, expected - start),
            )
            wanted = self._reply_test(start, m.Tokens)
            before_ns = time.monotonic_ns()
            asked, more_bytes = not begun, 0
            try:
                if asked:
                    sent = self._edge.send(pull)
                else:
                    if pulled < expected and pulled - start <= _PULL_BELOW:
                        more_bytes = self._edge.try_send(pull) or 0
                    sent = SentRequest(pull, (), more_bytes, before_ns)
                answer = self._edge.wait(sent, wanted, on_idle=on_idle)
                begun = True
            except _RECOVERABLE as error:
                begun = False
                setbacks.add(error)
                self._begin_again(error)
                continue
            if asked or more_bytes:
                pulled = start + pull.count
            setbacks = RetryBudget(self._edge)
            reply = answer.reply
            assert isinstance(reply, m.Tokens)
            if asked:  # other replies left the edge before this request reached it
                self._edge.estimator.measure(answer, reply.times.received_ns, reply.times.held_ns)
            yield StreamedTokens(reply, answer, answer.received_ns - before_ns)
