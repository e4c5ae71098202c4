"""Start generations: check a device's `Begin`, and compile its grammar in another thread.

In:  a `Begin`, and the messages for its generation that arrive before its grammar is compiled.
Out: a session with a running generation, and a job that reads the prompt; or a typed refusal.

Cheap checks come first. A generation with a grammar then waits for the `GrammarCompiler`, and so do
its messages; meanwhile the session's previous generation continues.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pilotfish.base.errors import (
    DivergedError,
    MalformedError,
    PilotfishError,
    PromptTooLongError,
    RateLimitedError,
    TooLargeError,
    UnknownSessionError,
)
from pilotfish.edge_runtime.answer_trace import AnswerTrace
from pilotfish.edge_runtime.client_errors import to_client_error
from pilotfish.edge_runtime.edge_drafter import EdgeDrafter, Trail
from pilotfish.edge_runtime.generation import Generation, GenerationSpec, QueuedGeneration
from pilotfish.edge_runtime.grammar_compiler import Compilation, GrammarCompiler
from pilotfish.edge_runtime.hint_sources import HintSources, create_hint_sources
from pilotfish.edge_runtime.logits_processors import LogitsProcessors
from pilotfish.edge_runtime.replies import Replies
from pilotfish.edge_runtime.reply_logprobs import Logprobs, PromptLogprobs, expect_sendable
from pilotfish.edge_runtime.resources import EdgeResources
from pilotfish.edge_runtime.sessions import Session, Sessions
from pilotfish.engines.constraint import GrammarConstraint
from pilotfish.wire import messages as m
from pilotfish.wire.begin import read_begin
from pilotfish.wire.codecs.ids import count_ids, decode_ids
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.protocols import STREAM, SpeculationProtocol, get_protocol
from pilotfish.wire.protocols.protocol import NO_IDS, Ids
from pilotfish.wire.protocols.window_checks import check_frame_count
from pilotfish.wire.transport import Envelope

_MOST_HINTS = 8  # upper limit of hints that wait for a generation's grammar

Serve = Callable[[m.DeviceMessage, Envelope, int], None]
Charge = Callable[[bytes, float], None]
# function of a `Begin`, the time of its arrival (monotonic, ns), and the number of its tokens
StartTrace = Callable[[m.Begin, int, int], AnswerTrace]


class GenerationStarter:
    """Starts generations in sessions. Used by the serving loop.

    serve: function that serves a message after its wait for a grammar. charge: function that
    charges a client for time of this thread. vocab_size: size of the target's vocabulary.
    start_trace: starts a generation's spans; None: the edge makes no traces.
    """

    def __init__(
        self,
        sessions: Sessions,
        replies: Replies,
        compiler: GrammarCompiler,
        logits_processors: LogitsProcessors,
        *,
        resources: EdgeResources,
        edge_drafter: EdgeDrafter | None,
        limits: m.Limits,
        vocab_size: int,
        serve: Serve,
        charge: Charge,
        start_trace: StartTrace | None = None,
    ) -> None:
        self._sessions = sessions
        self._replies = replies
        self._compiler = compiler
        self._logits_processors = logits_processors
        self._resources = resources
        self._edge_drafter = edge_drafter
        self._limits = limits
        self._vocab = vocab_size
        self._serve = serve
        self._charge = charge
        self._start_trace = start_trace

    def begin(self, begin: m.Begin, envelope: Envelope) -> None:
        """Start a generation, or queue it until its grammar is compiled."""
        spec = self._check(begin, envelope)
        session = self._open_session(begin, envelope.owner)
        self.cancel(session)
        grammar = spec.sampling_params.logits_options.grammar
        if grammar is None:
            self._start(session, spec)
            return
        compilation = Compilation(
            envelope.owner,
            grammar,
            2 if self._uses_edge_drafter(spec.protocol) else 1,
            partial(self._on_compiled, session),
        )
        session.queued = QueuedGeneration(spec, envelope, compilation)
        try:
            self._compiler.submit(compilation)
        except PilotfishError:
            self.give_up(session)
            raise

    def _check(self, begin: m.Begin, envelope: Envelope) -> GenerationSpec:
        """Check a `Begin` without its session, and decode its frames."""
        constrained = begin.shape is not None and begin.shape.grammar != ""
        check_frame_count(envelope.frames, 1 + constrained + (begin.predicted is not None))
        frame = envelope.frames[0]
        length = begin.keep + count_ids(frame, self._vocab)
        if length >= self._limits.context:  # check before the ids are decoded, which costs more
            raise PromptTooLongError(
                f"The prompt has {length} tokens; this edge accepts at most "
                f"{self._limits.context - 1}."
            )
        new = decode_ids(frame, self._vocab)
        prediction = self._decode_prediction(begin, envelope.frames[-1])
        protocol = None if begin.protocol == STREAM else get_protocol(begin.protocol)
        request, sampling_params = read_begin(begin, envelope.frames[1] if constrained else None)
        if protocol is not None:
            protocol.check(sampling_params.sampling)
            protocol = self._resources.configure(protocol, request.options, begin.conditions)
        elif request.options:
            raise MalformedError(
                f"These are no options of {STREAM}: it has no option {min(request.options)!a}."
            )
        if begin.predicted is not None and (protocol is None or not protocol.streams):
            raise MalformedError(f"Protocol {begin.protocol} takes no prediction.")
        if length == 0:
            raise MalformedError("A generation needs at least one token to start from.")
        if begin.prompt_logprobs is not None:
            self._logits_processors.expect_model_logits()
            expect_sendable(length, begin.prompt_logprobs, self._limits.message_bytes // 2)
        self._logits_processors.check(begin, sampling_params, length)
        return GenerationSpec(begin, new, prediction, sampling_params, protocol)

    def _decode_prediction(self, begin: m.Begin, frame: m.Buffer) -> Ids:
        """Decode the predicted ids u32 [n]; none if the `Begin` has no prediction."""
        if begin.predicted is None:
            return NO_IDS
        if begin.predicted > self._limits.context:
            raise TooLargeError(
                f"The prediction has {begin.predicted} tokens; this edge accepts at most "
                f"{self._limits.context}."
            )
        if count_ids(frame, self._vocab) != begin.predicted:
            raise MalformedError("The prediction's frame does not have the stated number of ids.")
        return decode_ids(frame, self._vocab)

    def queue_message(
        self,
        queued: QueuedGeneration,
        message: m.DeviceMessage,
        envelope: Envelope,
        received_ns: int,
    ) -> None:
        """Queue a message until its generation begins.

        Only one window or pull is stored: a later one is the same message, sent again.
        """
        received = (message, envelope, received_ns)
        if isinstance(message, m.Hint):
            queued.hints = [*queued.hints, received][-_MOST_HINTS:]
            return
        others = (each.queued for each in self._sessions if each.owner == envelope.owner)
        size = sum(each.size for each in others if each is not None and each is not queued)
        if size + envelope.size > self._limits.message_bytes:
            raise RateLimitedError(
                "Too many bytes of this key's requests already wait for grammars; slow down."
            )
        queued.message = received

    def cancel(self, session: Session, error: PilotfishError | None = None) -> None:
        """Cancel the session's generation that waits for a grammar, if there is one.

        error: the refusal to send for its messages; None: send nothing.
        """
        queued, session.queued = session.queued, None
        if queued is not None:
            self._compiler.cancel(queued.compilation)
            if error is not None:
                self._refuse_all(queued, error)

    def cancel_ended(self, session: Session) -> None:
        """Refuse the messages that wait for a grammar, when the edge ends their session."""
        self.cancel(session, UnknownSessionError("The edge has dropped this session."))

    def give_up(self, session: Session) -> None:
        """Cancel a waiting generation; close the session if no generation ever ran in it."""
        self.cancel(session)
        if session.generation is None:
            self._sessions.close(session)

    def _on_compiled(self, session: Session, compilation: Compilation) -> None:
        """Start the session's waiting generation after the compilation, or refuse it."""
        queued = session.queued
        if queued is None or queued.compilation is not compilation:
            return  # the generation was cancelled during the compilation
        begun_s, error = time.thread_time(), compilation.error
        session.queued = None
        if error is None:
            error = self._start_queued(session, queued)
        if error is not None:
            self.give_up(session)
            self._refuse_all(queued, error)
        self._charge(session.owner, time.thread_time() - begun_s)
        if error is None:
            for waiting in queued.messages:
                self._serve(*waiting)

    def _start_queued(self, session: Session, queued: QueuedGeneration) -> PilotfishError | None:
        """Start a generation after its grammar was compiled; return an error, or None."""
        try:
            self._expect_prefix(queued.spec.begin, session.committed)
            self._start(session, queued.spec, queued.compilation.constraints)
        except Exception as error:
            return to_client_error(error, "a generation could not be started")
        return None

    def _refuse_all(self, queued: QueuedGeneration, error: PilotfishError) -> None:
        self._replies.refuse(queued.envelope, queued.spec.begin, error)
        for message, envelope, _ in queued.messages:
            self._replies.refuse(envelope, message, error)

    def _start(
        self, session: Session, spec: GenerationSpec, constraints: Sequence[GrammarConstraint] = ()
    ) -> None:
        """Replace the session's generation by a new one, and let the target read the prompt.

        constraints: the compiled grammar, once for the target and once for the edge drafter.
        """
        begin, committed = spec.begin, session.committed
        logits_processor = self._logits_processors.create(
            begin, spec.sampling_params, constraints[0] if constraints else None
        )
        session.stop()
        committed.truncate(begin.keep)
        committed.extend(spec.new)
        generation = session.generation = Generation(
            number=begin.generation,
            sampling_params=spec.sampling_params,
            protocol=spec.protocol,
            logits_processor=logits_processor,
            logprobs=None if begin.logprobs is None else Logprobs(begin.logprobs, len(committed)),
            prompt_logprobs=None
            if begin.prompt_logprobs is None
            else PromptLogprobs(committed.ids, begin.prompt_logprobs),
            hints=self._create_hints(session, spec, constraints),
            verify_cpu_s=constraints[0].cpu_s if constraints else 0.0,
        )
        if self._start_trace is not None:
            generation.trace = self._start_trace(begin, spec.received_ns, len(committed))
        if generation.prompt_logprobs is not None:
            session.queue_prompt_scores(generation)
        elif len(spec.new) > 1:  # the target reads the prompt while the device drafts
            session.queue_prompt(generation)

    def _create_hints(
        self, session: Session, spec: GenerationSpec, constraints: Sequence[GrammarConstraint]
    ) -> HintSources | None:
        """Create the sources of hints, with the statistics of the session's last generation."""
        make_trail = None
        if self._uses_edge_drafter(spec.protocol):
            make_trail = self._trail_factory(session, spec, constraints[1] if constraints else None)
        previous = session.generation
        return create_hint_sources(
            spec.protocol,
            session.committed,
            self._limits.window,
            make_trail,
            None if previous is None else previous.hints,
            spec.prediction,
        )

    def _uses_edge_drafter(self, protocol: SpeculationProtocol[Any] | None) -> bool:
        """Return whether the edge drafter may draft for a generation of this protocol."""
        return self._edge_drafter is not None and protocol is not None and protocol.streams

    def _trail_factory(
        self, session: Session, spec: GenerationSpec, constraint: GrammarConstraint | None
    ) -> Callable[[], Trail]:
        assert self._edge_drafter is not None
        sampling_params = spec.sampling_params
        # the drafter's thread uses this processor, so the target needs its own
        logits_processor = self._logits_processors.create(spec.begin, sampling_params, constraint)
        return partial(
            self._edge_drafter.follow,
            session.owner + session.id,  # clients choose ids, so two owners may have the same
            session.slot,
            session.committed.ids,
            sampling_params,
            logits_processor,
        )

    def _open_session(self, begin: m.Begin, owner: bytes) -> Session:
        try:
            session = self._sessions.use(begin.session, owner)
        except UnknownSessionError:
            if begin.keep:
                raise
            self._expect_prefix(begin, CommittedTokens())
            return self._sessions.open(begin.session, owner)
        latest = session.generation_number
        if session.queued is not None:
            latest = max(latest, session.queued.number)
        if begin.generation <= latest:
            raise DivergedError(
                f"The edge is already at generation {latest} of this session, and generation "
                f"{begin.generation} does not come after it."
            )
        self._expect_prefix(begin, session.committed)
        return session

    @staticmethod
    def _expect_prefix(begin: m.Begin, committed: CommittedTokens) -> None:
        if begin.keep > len(committed) or committed.hash_at(begin.keep) != begin.hash:
            raise DivergedError(
                f"The edge holds {len(committed)} tokens of this session, and the first "
                f"{begin.keep} differ from the device's: begin again with all tokens."
            )
