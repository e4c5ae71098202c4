"""A conversation: it generates answers one after the other, also when the link breaks.

In:  prompts and plans. Out: pieces, and a `Generation` at the end of each answer.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pilotfish.base.errors import (
    BadGrammarError,
    PairMismatchError,
    PilotfishError,
    TokenOutOfRangeError,
    UnsupportedError,
)
from pilotfish.bridge import Prompt
from pilotfish.device_runtime.alternatives import alternatives
from pilotfish.device_runtime.answer import AnswerBuffer, answer_outline, explain_grammar_error
from pilotfish.device_runtime.answer_trace import AnswerTrace
from pilotfish.device_runtime.choice import POLICIES
from pilotfish.device_runtime.draft_advice import draft_advice
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.probing import refresh
from pilotfish.device_runtime.link.retry import AWAY, CancelToken, OutageLog, RetryPolicy
from pilotfish.device_runtime.link_renewal import channel_from
from pilotfish.device_runtime.pair_statistics import PairStatistics
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Choice, Generation, Piece, Probing, Round, RttSample
from pilotfish.device_runtime.session import Session
from pilotfish.drafting.lookup import DEFAULT_OWNER, Owner
from pilotfish.drafting.window import Drafter
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.prediction import count_taken
from pilotfish.wire.link.meter import SMALL_BYTES
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import LOCAL, PROTOCOL_REGISTRY, STREAM
from pilotfish.wire.protocols.protocol import Ids
from pilotfish.wire.request import Request

_log = logging.getLogger("pilotfish.device")

# UnsupportedError: the edge came back without the decision head that the answer needs
_STANDALONE_ERRORS: tuple[type[PilotfishError], ...] = (*AWAY, UnsupportedError)
_CHARACTERS = 16  # characters per token of a prediction that are read; texts have about 4


@dataclass
class _Progress:
    """Rounds, times and losses of the edge of an answer that is under way."""

    begun_s: float = field(default_factory=time.monotonic)
    first_token_s: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    losses: OutageLog = field(default_factory=OutageLog)

    def add(self, record: Round) -> None:
        """Add a round."""
        self.rounds.append(record)
        self.first_token_s = self.first_token_s or time.monotonic() - self.begun_s


class Conversation:
    """Generates answers with one drafter, link and session; for one thread at a time.

    shares: see `Session`.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Vocabulary,
        link: EdgeLink | None,
        statistics: PairStatistics,
        retry_policy: RetryPolicy,
        cancel_token: CancelToken,
        on_round: Callable[[Round], None] | None,
        *,
        shares: bool = False,
    ) -> None:
        self._target = target
        self._trees, self._standalone = not drafter.no_tree_reason, drafter.standalone
        self._link = link
        self._statistics = statistics
        self._retry_policy = retry_policy
        self._cancel_token = cancel_token
        self._on_round = on_round
        self.session = Session(drafter, link, cancel_token, shares=shares)
        self.last: Generation | None = None

    def _end_ids(self, request: Request) -> list[int]:
        """Return the tokens that end the answer to a request."""
        welcome = self._link.welcome if self._link is not None else None
        end_ids = () if request.ignore_eos else (welcome or self._target).eos_ids
        return [*end_ids, *request.stop_token_ids]

    def answer(
        self,
        prompt: Prompt,
        request: Plan | Request,
        owner: Owner = DEFAULT_OWNER,
        *,
        alone: bool = True,
        trace: AnswerTrace | None = None,
    ) -> Generator[Piece, None, None]:
        """Yield the pieces of the answer to an owner's prompt; afterwards ``last`` is the answer.

        request: a plan, or a request for protocol "auto", whose plan depends on edge and link.
        alone: under policy "local", treat an edge with another vocabulary as lost even before the
        first piece; if False, raise `PairMismatchError` in this case. trace: the answer's spans.
        """
        session = self.session
        progress, probing_before = _Progress(), self._probing
        plan, choice, state = self._prepare(request)
        target = self._target.with_tools if prompt.tools is not None else self._target
        outline = answer_outline(prompt, target, plan.sampling.logits_options.grammar)
        plan = plan.with_grammar(outline.grammar)
        answer = AnswerBuffer(target, outline, plan, self._end_ids(plan.request))
        prediction = _encode_prediction(
            plan.request.prediction, self._target, session.context - len(prompt)
        )
        finished = False
        try:
            advice = draft_advice(plan, self._target)
            session.start(
                prompt,
                plan,
                channel_from(state),
                advice,
                owner,
                prediction,
                traceparent=None if trace is None else trace.traceparent,
            )
            yield from self._pieces(plan, answer, progress, trace, alone=alone)
            finished = True
        except BadGrammarError as error:
            raise explain_grammar_error(error, outline) from error.__cause__
        finally:
            if plan.streams or not finished or session.edge.traced:  # ends the edge's spans, too
                session.edge.cancel()
            session.truncate(len(prompt) + len(answer.tokens))
            session.end()
            self._statistics.add(plan, progress.rounds, state)
        progress.losses.end(time.monotonic_ns())
        self.last = Generation(
            protocol=plan.protocol,
            prompt_tokens=len(prompt),
            tokens=answer.tokens,
            text=answer.text,
            finish_reason=answer.finish_reason or "length",
            stop_string=answer.stop_string,
            rounds=progress.rounds,
            first_token_s=progress.first_token_s,
            total_s=time.monotonic() - progress.begun_s,
            link=state,
            choice=choice,
            probing=self._probing.since(probing_before),
            rtts=self._rtts_since(progress.begun_s),
            recoveries=progress.losses.recoveries,
            parts=answer.parts,
            prompt_logprobs=session.prompt_logprobs,
            cached_tokens=session.reused,
            prompt_ids=[] if plan.request.prompt_logprobs is None else prompt.ids.tolist(),
            predicted_tokens=len(prediction),
            accepted_prediction_tokens=count_taken(prediction, answer.tokens),
        )

    @property
    def _probing(self) -> Probing:
        """The cost of measuring the link so far."""
        return self._link.estimator.probing if self._link is not None else Probing()

    def _rtts_since(self, begun_s: float) -> list[RttSample]:
        """The samples of the RTT since this time (monotonic)."""
        link = self._link
        return [] if link is None else link.estimator.rtts_since(int(begun_s * 1e9))

    # Before the first round

    def _prepare(self, request: Plan | Request) -> tuple[Plan, Choice | None, LinkState | None]:
        """Greet the edge; returns the answer's plan, the choice of "auto", and the link's state."""
        link = self._link
        is_ready = False
        if link is not None:
            is_ready = self._handshake(link, request)
        if isinstance(request, Plan):
            if link is not None and is_ready and request.depends_on_link:
                self._measure(link, [request])
            plan, choice, state = request, None, link.state() if link else None
        else:
            plan, choice, state = self._choose(request, is_ready)
        if link is not None:
            link.estimator.next_answer()
        return plan, choice, state

    def _handshake(self, link: EdgeLink, request: Plan | Request) -> bool:
        """Greet the edge, waiting if the policy allows; returns whether the edge is ready."""
        if self._retry_policy.policy == "local":
            is_ready = link.poll()
        elif isinstance(request, Plan) and request.protocol == LOCAL:
            is_ready = link.is_up()
        else:
            link.handshake()
            is_ready = True
        self._statistics.on_welcome(link.welcome)
        return is_ready

    def plans(self, request: Request, *, reachable: bool) -> list[Plan]:
        """List the plans that "auto" may choose from; reachable: whether an edge can be reached."""
        link = self._link
        if link is None:
            return alternatives(request, offered=self._draftable([LOCAL]), reachable=False)
        if link.welcome is None:  # not greeted yet: the edge may lack a decision head
            plans = alternatives(
                request,
                offered=self._draftable([*PROTOCOL_REGISTRY, STREAM, LOCAL]),
                reachable=reachable,
                vocab_size=self._statistics.vocab_size,
            )
            sure = [plan for plan in plans if not plan.requires]
            return plans if POLICIES[request.auto.policy].wants_resources else sure or plans
        limits = link.welcome.limits
        offered = self._draftable([*link.welcome.protocols, LOCAL])
        plans = alternatives(
            request,
            offered=offered,
            most=limits.window,
            reachable=reachable,
            vocab_size=self._statistics.vocab_size,
        )
        fitting = [
            plan
            for plan in plans
            if self._statistics.message_bytes(plan) <= limits.message_bytes // 2
        ]
        return fitting or plans[:1]

    def _draftable(self, protocols: Sequence[str]) -> list[str]:
        """Return the protocols that the drafter supports."""
        undraftable = set() if self._standalone else {LOCAL}
        if not self._trees:
            undraftable |= {
                name for name, protocol in PROTOCOL_REGISTRY.items() if protocol.allows_trees
            }
        return [name for name in protocols if name not in undraftable]

    def _choose(self, request: Request, is_ready: bool) -> tuple[Plan, Choice, LinkState | None]:
        """Choose a plan by the link's state; measure the link first if needed."""
        plans = self.plans(request, reachable=is_ready)
        state = None
        if self._link is not None:
            if is_ready:
                self._measure(self._link, plans)
            state = self._link.state()
        plan, choice = self._statistics.choose(request.auto, plans, state)
        return plan, choice, state

    def _measure(self, link: EdgeLink, plans: Sequence[Plan]) -> None:
        # a decision head depends on the link as measured for this request (WISV, §VII-B)
        by_link = any(plan.depends_on_link for plan in plans)
        rates_matter = by_link or any(
            self._statistics.message_bytes(plan) > SMALL_BYTES for plan in plans
        )
        try:
            refresh(link, rates=rates_matter, anew=by_link)
        except AWAY:
            if not self._retry_policy.starts_without_edge:
                raise  # otherwise the first round runs into the same loss and handles it

    # Round by round

    def _pieces(
        self,
        plan: Plan,
        answer: AnswerBuffer,
        progress: _Progress,
        trace: AnswerTrace | None,
        *,
        alone: bool,
    ) -> Iterator[Piece]:
        """Yield the pieces of an answer's rounds until it ends, and record its progress."""
        link = self._link
        for record in self._rounds(plan, answer, trace, alone=alone):
            settled_ns = time.monotonic_ns()
            lost_ns = None if link is None else link.lost_ns
            if link is not None and progress.losses.add(record, lost_ns, settled_ns):
                link.on_verified()
                if trace is not None and lost_ns is not None:
                    trace.add_loss(lost_ns, settled_ns)
            pieces = answer.take(record)
            record.timings.settle += (time.monotonic_ns() - settled_ns) * 1e-9
            progress.add(record)
            if trace is not None:
                trace.add(record)
            if self._on_round is not None:
                self._on_round(record)
            yield from pieces
            if answer.finish_reason is not None:
                break
            self._cancel_token.check()
        yield from answer.end("length")  # no end so far: the context is full

    def _rounds(
        self, plan: Plan, answer: AnswerBuffer, trace: AnswerTrace | None, *, alone: bool
    ) -> Iterator[Round]:
        """Yield rounds; under policy "local", the drafter answers alone while the edge is away."""
        session = self.session
        if plan.protocol == LOCAL:
            yield from session.local(plan.sampling, answer.remaining)
            return
        end_ids = self._end_ids(plan.request)
        while self._has_room(answer):
            try:
                session.join()
                if trace is not None:
                    trace.note_prompt()
                if plan.streams:
                    yield from session.stream(plan, answer.remaining, end_ids)
                    continue
                while self._has_room(answer):
                    yield session.speculate(plan, answer.remaining, end_ids)
            except _STANDALONE_ERRORS as error:
                if not self._may_continue_alone(error, plan, answer, alone=alone):
                    raise
                _log.info("continuing without the edge: %s", error)
                assert self._link is not None
                self._link.on_lost()
                back = yield from self._draft_alone(plan, answer)
                if not back and self._has_room(answer):
                    raise  # the drafter's context is full

    def _has_room(self, answer: AnswerBuffer) -> bool:
        """Whether the answer has not ended, and the context has room."""
        return answer.remaining > 0 and len(self.session.committed) < self.session.context

    def _may_continue_alone(
        self, error: PilotfishError, plan: Plan, answer: AnswerBuffer, *, alone: bool
    ) -> bool:
        if self._retry_policy.policy != "local":
            return False
        if isinstance(error, UnsupportedError):
            return bool(answer.tokens) and not self._edge_offers(plan)
        if isinstance(error, PairMismatchError):
            return alone or bool(answer.tokens)
        return True

    def _edge_offers(self, plan: Plan) -> bool:
        """Whether the last greeted edge offers the plan's protocol."""
        welcome = self._link.welcome if self._link is not None else None
        return welcome is None or plan.protocol in welcome.protocols

    def _draft_alone(self, plan: Plan, answer: AnswerBuffer) -> Generator[Round, None, bool]:
        """Yield rounds of the drafter alone until the edge is back; returns whether it is."""
        assert self._link is not None
        for record in self.session.local(plan.sampling, answer.remaining):
            yield record
            if self._link.poll() and self._edge_offers(plan):
                _log.info("the edge is back")
                return True
        return False


def _encode_prediction(prediction: str | Sequence[int], target: Vocabulary, room: int) -> Ids:
    """Return a request's prediction as ids u32 [n] of the target, at most ``room``.

    What is longer than the answer can be is left out. Raises `TokenOutOfRangeError` for a foreign
    id.
    """
    room = max(0, room)
    if isinstance(prediction, str):
        text = prediction[: _CHARACTERS * room]
        ids: Sequence[int] = target.tokenizer.encode_later(text) if text else ()
    else:
        ids, vocab = prediction, target.vocab_size
        invalid = [id for id in ids if not 0 <= id < vocab]
        if invalid:
            raise TokenOutOfRangeError(
                f"The prediction has the token {invalid[0]}, but the target has {vocab} tokens."
            )
    return np.array(ids[:room], np.uint32)
