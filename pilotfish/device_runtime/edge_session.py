"""The device's side of its session at the edge: the tokens that the edge holds, and the requests.

In:  drafts, or a number of tokens to stream. Out: the edge's replies; requests are repeated as
     often as the link's policy allows.

If the edge loses the session, the device sends all committed tokens again. Every draw is keyed by
position, so the text continues unchanged.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import structs

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
from pilotfish.device_runtime.link_renewal import LinkRenewal
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Timings
from pilotfish.speculation.prediction import remaining
from pilotfish.wire import messages as m
from pilotfish.wire.begin import begin_fields
from pilotfish.wire.codecs.ids import encode_ids
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.protocols import LOCAL, Ahead, Draft, SpeculationProtocol
from pilotfish.wire.protocols.protocol import NO_IDS, Ids

_NS = 1e-9
_RECOVERABLE = (UnknownSessionError, DivergedError, *BUSY)
# Tokens per request of a stream, and the number of outstanding tokens at which to request more. The
# requests stay within the 64 messages that every edge queues.
_PULL_TOKENS, _PULL_BELOW = 48, 36
_UNLIMITED = m.Limits(
    context=2**31 - 1, window=m.MAX_WINDOW, message_bytes=2**31 - 1, sessions=2**31 - 1
)


@dataclass(slots=True)
class VerifiedWindow:
    """A window's verdict, its times and its bytes.

    frames: the verdict's frames, including requested logprobs. timings: stages of all exchanges,
    without drafting and settling. received_ns: arrival of the verdict (monotonic). pass_s: seconds
    of the target's pass. inquired: number of hidden states that the edge requested before the
    verdict.
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
    """A message with tokens of a stream; the answer's first frame has their ids.

    waited_ns: time that the device waited for the message; short if it had already arrived.
    """

    reply: m.Tokens
    answer: TimedReply
    waited_ns: int


class EdgeSession:
    """One edge's copy of the committed tokens; under `local` there is neither link nor copy.

    committed: the session's tokens; `Session` extends and cuts them. vocab_size: number of token
    ids of the target.
    """

    def __init__(self, link: EdgeLink | None, committed: CommittedTokens, vocab_size: int) -> None:
        self._link = link
        self._committed = committed
        self._vocab_size = vocab_size
        self._id = secrets.token_bytes(16)
        self._generation = -1
        self._edge_length = 0  # length of the committed prefix that the edge holds
        self._plan: Plan | None = None
        self._prompt_length = 0  # number of tokens of the plan's prompt
        self._prediction = NO_IDS  # ids that the answer is expected to have
        self._traceparent: str | None = None  # the answer's span
        self._conditions: m.DecisionConditions | None = None
        self._renewal = LinkRenewal()
        self._begin_length = 0  # number of committed tokens at the last `begin`
        self.has_prompt_logprobs = True  # False: requested, but not arrived yet
        self._last_limits = _UNLIMITED
        self._begin_connection = 0  # number of the connection that carried the last `begin`

    @property
    def limits(self) -> m.Limits:
        """The limits of the present edge, or of the last suitable one."""
        welcome = self._link.welcome if self._link is not None else None
        return self._last_limits if welcome is None else welcome.limits

    @property
    def token_s(self) -> float:
        """Seconds of the target's pass over one token, as the edge measured it; 0 if unknown."""
        welcome = self._link.welcome if self._link is not None else None
        return welcome.passes[0].ns * _NS if welcome is not None and welcome.passes else 0.0

    def note_welcome(self) -> None:
        """Store the present edge's limits, for times without a suitable edge."""
        self._last_limits = self.limits

    @property
    def _edge(self) -> EdgeLink:
        if self._link is None:
            raise MalformedError("This device has no edge; only protocol local works without one.")
        return self._link

    # The edge's tokens

    def prepare(
        self,
        plan: Plan,
        prompt_length: int,
        conditions: m.DecisionConditions | None,
        prediction: Ids = NO_IDS,
        traceparent: str | None = None,
    ) -> None:
        """Set the plan of the next generation, and the inputs of the edge's decision head.

        prediction: u32 [n]; the edge gets it only if it drafts from it (`Ahead`). traceparent: the
        answer's span; the edge gets it if it makes traces.
        """
        self.note_welcome()
        self._plan, self._prompt_length, self._conditions = plan, prompt_length, conditions
        self._prediction = prediction if isinstance(plan.exchange, Ahead) else NO_IDS
        self._traceparent = traceparent
        if conditions is not None:
            self._renewal.start(conditions.channel)
        self.has_prompt_logprobs = plan.request.prompt_logprobs is None

    def truncate(self, length: int) -> None:
        """Limit the edge's prefix to ``length`` tokens: the committed tokens were cut."""
        self._edge_length = min(self._edge_length, length)

    def set_edge_length(self, length: int) -> None:
        """Set the length of the committed prefix that the edge holds."""
        self._edge_length = length

    def begin(self) -> None:
        """Send `begin`: the committed tokens that the edge lacks, and the sampling parameters."""
        assert self._plan is not None
        request = self._plan.request
        if self.has_prompt_logprobs:
            request = structs.replace(request, prompt_logprobs=None)
        self._generation += 1
        prediction = self._remaining_prediction()
        begin = m.Begin(
            session=self._id,
            generation=self._generation,
            keep=self._edge_length,
            hash=self._committed.hash_at(self._edge_length),
            conditions=self._conditions,
            predicted=len(prediction) or None,
            traceparent=self._traceparent if self.traced else None,
            **begin_fields(request, self._prompt_length),
        )
        self._begin_length = len(self._committed)
        missing = self._committed.ids[
            self._edge_length :
        ].copy()  # a copy: the ids may change while ZeroMQ sends
        frames: list[m.Buffer] = [encode_ids(missing, self._vocab_size)]
        if request.grammar is not None:
            frames.append(request.grammar.text.encode())
        if len(prediction):
            frames.append(encode_ids(prediction, self._vocab_size))
        self._edge.notify(begin, frames)
        self.note_welcome()
        self._begin_connection = self._edge.connection
        self._edge_length = len(self._committed)

    @property
    def traced(self) -> bool:
        """Whether the edge gets the answer's span: there is one, and the edge makes traces."""
        welcome = self._link.welcome if self._link is not None else None
        return self._traceparent is not None and welcome is not None and welcome.traces

    def _remaining_prediction(self) -> Ids:
        """Return what is left of the prediction: all of it, unless the answer was interrupted."""
        if not len(self._prediction):
            return NO_IDS
        answer = self._committed.ids[self._prompt_length :].tolist()
        room = max(0, self.limits.context - len(self._committed))
        return remaining(self._prediction, answer)[:room]

    def _begin_again(self, reason: PilotfishError) -> None:
        """Send the edge all committed tokens again.

        If the edge does not know the session, the device chooses a new id: the old id may still
        belong to the broken connection, and without keys the device cannot prove that the session
        is its own.
        """
        if isinstance(reason, UnknownSessionError):
            self._id = secrets.token_bytes(16)
        if (
            self._edge.connection != self._begin_connection
        ):  # the edge came back before any check noticed the loss
            self._edge.on_lost()
        self._edge_length = 0
        self.begin()

    def cancel(self) -> None:
        """Send `cancel` for the generation, if the edge is connected."""
        if self._link is not None and self._plan is not None and self._plan.protocol != LOCAL:
            self._link.try_send(m.Cancel(session=self._id, generation=self._generation))

    def close(self) -> None:
        """Send `close` for the session, if the edge is connected."""
        if self._link is not None and self._generation >= 0:
            self._link.try_send(m.Close(session=self._id))

    def forget(self) -> None:
        """Close the session and choose a new id: the edge then holds no tokens."""
        self.close()
        self._id = secrets.token_bytes(16)
        self._edge_length = 0

    def expects_prompt_logprobs(self, start: int) -> bool:
        """Whether the reply for this start position has the prompt's log-probabilities."""
        return not self.has_prompt_logprobs and start == self._begin_length

    # Windows

    def send(self, exchange: SpeculationProtocol[Any], draft: Draft) -> SentRequest:
        """Send a window and, before it, the pending token if there is one."""
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

    def renew_channel(self, exchange: SpeculationProtocol[Any], draft: Draft) -> Draft:
        """Return the draft, with the link's newest state if that differs from the head's.

        The state belongs to the window: a window that is sent again brings the same state, and a
        later `begin` has it, too. So a lost connection or session changes no decision.
        """
        channel = self._renewal.renewed(self._edge.state)
        if channel is None or self._conditions is None:
            return draft
        self._conditions = structs.replace(self._conditions, **vars(channel))
        renewed: Draft = exchange.attach_channel(draft, channel)
        return renewed

    def wait_verdict(
        self,
        exchange: SpeculationProtocol[Any],
        draft: Draft,
        sent: SentRequest,
        drafted_ns: int,
        *,
        late: bool = False,
    ) -> VerifiedWindow | None:
        """Wait for the verdict on a window; begin again at an edge that lost the session.

        Returns None if another edge with smaller windows has come; the caller must draft again.
        late: the drafter has worked since the window was sent, so the reply's arrival time is
        unknown.
        """
        retry_budget = RetryBudget(self._edge)
        while True:
            wanted = self._reply_test(len(self._committed), m.Verdict, m.StatesRequest)
            try:
                answer = self._edge.wait(sent, wanted, late=late)
                if isinstance(answer.reply, m.Verdict):
                    return self._verified_window(answer, answer.reply, drafted_ns)
                return self._send_states(exchange, draft, answer, drafted_ns)
            except _RECOVERABLE as error:
                retry_budget.add(error)
                self._begin_again(error)
            if len(draft.ids) > self.limits.window:
                return None
            sent = self.send(exchange, draft)

    def _require_room(self, frames: Sequence[m.Buffer]) -> None:
        """Raise `TooLargeError` if the edge would not accept a message of this size."""
        most = self.limits.message_bytes
        if (size := sum(map(len, frames)) + m.HEADER_BYTES) > most:
            raise TooLargeError(
                f"The window may need {size:,} bytes, but this edge accepts at most {most:,}: use "
                "a smaller window, or a protocol that sends less."
            )

    def _send_states(
        self, exchange: SpeculationProtocol[Any], draft: Draft, first: TimedReply, drafted_ns: int
    ) -> VerifiedWindow:
        """Send the hidden states that the edge requested, and wait for the verdict."""
        request = first.reply
        assert isinstance(request, m.StatesRequest)
        timings = self._edge.estimator.timings(first, request.times, drafted_ns)
        start = len(self._committed)
        states = m.States(session=self._id, generation=self._generation, start=start)
        frames = exchange.encode_states(draft, first.frames)
        self._require_room(frames)
        answer = self._edge.request(states, frames, self._reply_test(start, m.Verdict))
        assert isinstance(answer.reply, m.Verdict)
        window = self._verified_window(answer, answer.reply, first.received_ns)
        window.timings = timings + window.timings
        window.uplink_bytes += first.uplink_bytes
        window.downlink_bytes += first.downlink_bytes
        window.pass_s = request.times.verify_ns * _NS
        window.inquired = len(first.frames[0])
        return window

    def _verified_window(
        self, answer: TimedReply, verdict: m.Verdict, ready_ns: int
    ) -> VerifiedWindow:
        """Build a verified window from a reply, and update the link estimator."""
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
        """Return a test that accepts this round's reply and rejects those of earlier rounds."""
        generation = self._generation

        def is_wanted(reply: m.Reply) -> bool:
            return (
                isinstance(reply, kinds)
                and reply.session == self._id
                and reply.generation == generation
                and reply.start == start
            )

        return is_wanted

    # `stream` and `ahead`

    @property
    def incarnation(self) -> tuple[int, int]:
        """Generation and connection: if either changes, the edge may have lost the hints."""
        return self._generation, self._edge.connection

    def hint(self, start: int, digest: bytes, frames: Sequence[m.Buffer]) -> int | None:
        """Send a hint of the tokens from ``start`` on; returns its bytes, or None if unsent."""
        hint = m.Hint(session=self._id, generation=self._generation, start=start, hash=digest)
        return self._edge.try_send(hint, frames)

    @property
    def has_ended_stream(self) -> bool:
        """Whether the edge has ended its stream, since the last token is the target's end token."""
        welcome = self._edge.welcome
        return welcome is not None and int(self._committed.ids[-1]) in welcome.eos_ids

    def stream_tokens(
        self, count: int, on_idle: Callable[[], bool] | None = None
    ) -> Iterator[StreamedTokens]:
        """Yield messages with ``count`` tokens of the target in total; commit each before the next.

        Requests tokens ahead, but no more than the edge queues for a slow reader. on_idle: work to
        do while no token has arrived; see `EdgeLink.wait`.
        """
        expected = len(self._committed) + count
        pulled = 0  # the tokens before this position have been requested
        begun = False
        retry_budget = RetryBudget(self._edge)
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
            sends_request, more_bytes = not begun, 0
            try:
                if sends_request:
                    sent = self._edge.send(pull)
                else:
                    if pulled < expected and pulled - start <= _PULL_BELOW:
                        more_bytes = self._edge.try_send(pull) or 0
                    sent = SentRequest(pull, (), more_bytes, before_ns)
                answer = self._edge.wait(sent, wanted, on_idle=on_idle)
                begun = True
            except _RECOVERABLE as error:
                begun = False
                retry_budget.add(error)
                self._begin_again(error)
                continue
            if sends_request or more_bytes:
                pulled = start + pull.count
            retry_budget = RetryBudget(self._edge)
            reply = answer.reply
            assert isinstance(reply, m.Tokens)
            if sends_request:  # otherwise the reply left the edge before this request reached it
                self._edge.estimator.measure(answer, reply.times.received_ns, reply.times.held_ns)
            yield StreamedTokens(reply, answer, answer.received_ns - before_ns)
