"""Serve the devices' messages. The serving loop calls these functions; they never wait.

Every message gets a reply, except where the protocol has none. A fault in a client's message causes
a typed failure for this client only.
"""

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from pilotfish.base.errors import (
    AccessDeniedError,
    DrainingError,
    InternalError,
    MalformedError,
    PilotfishError,
    UnknownSessionError,
)
from pilotfish.base.tracing import Tracer
from pilotfish.edge_runtime.admission import Admission
from pilotfish.edge_runtime.answer_trace import AnswerTrace
from pilotfish.edge_runtime.client_errors import is_client_error, to_client_error
from pilotfish.edge_runtime.draft_cost import DraftCost
from pilotfish.edge_runtime.edge_config import EdgeLimits
from pilotfish.edge_runtime.edge_drafter import EdgeDrafter
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.generation import Generation
from pilotfish.edge_runtime.generation_start import GenerationStarter
from pilotfish.edge_runtime.grammar_compiler import GrammarCompiler
from pilotfish.edge_runtime.handshake import Handshake, limits_for_devices
from pilotfish.edge_runtime.logits_processors import LogitsProcessors
from pilotfish.edge_runtime.replies import Replies, Send
from pilotfish.edge_runtime.resources import EdgeResources
from pilotfish.edge_runtime.scheduler import Job
from pilotfish.edge_runtime.sessions import Session, Sessions, Submit
from pilotfish.edge_runtime.streams import StreamServer
from pilotfish.edge_runtime.targets.target import Target
from pilotfish.edge_runtime.transfers import Uploads
from pilotfish.edge_runtime.vocabulary_server import VocabularyServer
from pilotfish.edge_runtime.windows import WindowServer
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire import messages as m
from pilotfish.wire.protocols import Decision
from pilotfish.wire.protocols.window_checks import check_frame_count
from pilotfish.wire.transfer import unpack
from pilotfish.wire.transport import Envelope, check_size

_U31: Final = 2**31 - 1  # the kernel's counters overflow later; a device notices
_PONG_BYTES: Final = 64  # bytes of a pong without its frame, at most


class MessageHandler:
    """Serves messages and owns the sessions. Used by the serving loop.

    pass_times, drafter_pass_times: pass times of the target, and of the edge drafter. resources:
    the edge's options and resources for protocols. allowed: allowed key → device name; None: the
    edge has no keys. vocabulary: the target's vocabulary; None: read it from the artifact. tracer:
    None: the edge makes no traces.
    """

    def __init__(
        self,
        artifact: Artifact,
        target: Target,
        limits: EdgeLimits,
        submit: Submit,
        send: Send,
        pass_times: Sequence[m.PassTime] = (),
        *,
        draft_cost: DraftCost,
        edge_drafter: EdgeDrafter | None = None,
        drafter_pass_times: Sequence[m.PassTime] = (),
        resources: EdgeResources | None = None,
        allowed: Mapping[bytes, str] | None = None,
        metrics: EdgeMetrics | None = None,
        vocabulary: Vocabulary | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        manifest = artifact.manifest
        vocabulary = vocabulary or Vocabulary.from_artifact(artifact)
        resources = resources or EdgeResources()
        metrics = metrics or EdgeMetrics()
        wire_limits = limits_for_devices(limits, manifest, target.context)
        self._allowed = allowed
        self._draining = False
        self._message_bytes = wire_limits.message_bytes
        self._metrics = metrics
        self._vocabulary_server = VocabularyServer(vocabulary)
        self._handshake = Handshake(
            manifest=manifest,
            digest=target.digest,
            limits=wire_limits,
            resources=resources,
            vocabulary_server=self._vocabulary_server,
            pass_times=pass_times,
            drafter_pass_times=drafter_pass_times,
            traces=tracer is not None,
        )
        self._admission = Admission(limits.messages_per_s)
        self._uploads = Uploads(self._message_bytes)
        replies = self._replies = Replies(send, self._admission, metrics)
        self.sessions = Sessions(limits, submit, metrics=metrics)
        self._windows = WindowServer(replies, metrics, draft_cost, manifest, wire_limits)
        self._streams = StreamServer(replies, metrics, draft_cost, manifest, wire_limits)
        self.compiler = GrammarCompiler(vocabulary.grammars)
        self._starter = GenerationStarter(
            self.sessions,
            replies,
            self.compiler,
            LogitsProcessors(vocabulary, model_logits=target.model_logits),
            resources=resources,
            edge_drafter=edge_drafter,
            limits=wire_limits,
            vocab_size=manifest.vocab_size,
            serve=self._serve,
            charge=self._admission.charge,
            start_trace=None if tracer is None else partial(AnswerTrace, tracer, manifest.model),
        )
        self.sessions.on_end = self._starter.cancel_ended

    # Called by the daemon

    def apply_config(self, limits: EdgeLimits, allowed: Mapping[bytes, str] | None) -> None:
        """Apply new limits and a new allow-list; end the sessions of removed keys."""
        self._admission.rate = limits.messages_per_s
        self.sessions.limits = limits
        self._allowed = allowed
        for session in self.sessions:
            if allowed is not None and session.owner not in allowed:
                self.sessions.close(session)
                self._metrics.sessions_ended["revoked"] += 1

    def expire(self) -> None:
        """End sessions and drop transfers that have been idle for too long."""
        self.sessions.expire()
        self._uploads.expire()
        self._replies.expire()

    def drain(self) -> None:
        """Refuse new work, and cancel all work except the windows under way."""
        self._draining = True
        for session in self.sessions:
            self._starter.cancel(session, _draining_error())
            if session.generation is not None and not session.generation.undecided:
                session.generation.stop()

    def end_traces(self) -> None:
        """End the spans of all answers: the edge stops."""
        for session in self.sessions:
            session.stop()

    @property
    def drained(self) -> bool:
        """Whether every window has been decided, and no session has a job."""
        return not any(session.busy for session in self.sessions)

    def over_budget(self, owner: bytes) -> bool:
        """Return whether a client owes time of this thread; its jobs then wait."""
        return self._admission.over_budget(owner, time.monotonic())

    def sessions_by_device(self) -> dict[str, int]:
        """Return the number of open sessions of each device name on the allow-list."""
        names = self._allowed or {}
        return Counter(names.get(session.owner, "") for session in self.sessions)

    # Messages in

    def handle(self, envelope: Envelope) -> None:
        """Serve one message of a device: check it, admit it, and serve it."""
        now_ns = time.monotonic_ns()
        self._metrics.bytes_in += envelope.size
        admitted = False
        try:
            if self._allowed is not None and envelope.owner not in self._allowed:
                raise AccessDeniedError("This key was removed from the edge's allow-list.")
            optional = m.is_hint(envelope.header)
            self._admission.admit(envelope.owner, now_ns * 1e-9, optional=optional)
            admitted = True
            check_size(envelope, self._message_bytes)
            message = m.decode_device_message(envelope.header)
        except PilotfishError as error:  # a cheap refusal: no frame was decoded
            self._replies.refuse(envelope, None, error, admitted=admitted)
            return
        self._serve(message, envelope, now_ns - envelope.queued_ns())

    def _serve(self, message: m.DeviceMessage, envelope: Envelope, received_ns: int) -> None:
        """Serve an admitted message, and charge its client for the time of this thread."""
        begun_s = time.thread_time()
        self._attempt(message, envelope, received_ns)
        self._admission.charge(envelope.owner, time.thread_time() - begun_s)

    def _attempt(self, message: m.DeviceMessage, envelope: Envelope, received_ns: int) -> None:
        try:
            self._dispatch(message, envelope, received_ns)
        except Exception as error:
            error = to_client_error(error, "a message could not be served")
            self._replies.refuse(envelope, message, error)

    def _dispatch(self, message: m.DeviceMessage, envelope: Envelope, received_ns: int) -> None:
        while_draining = (
            m.States | m.Ping | m.Train | m.Hint | m.Cancel | m.Close | m.Chunk | m.More
        )
        if self._draining and not isinstance(message, while_draining):
            raise _draining_error()
        match message:
            case m.Window() | m.States() | m.Pull():
                self._serve_round(message, envelope, received_ns)
            case m.Hint():
                self._hint(message, envelope, received_ns)
            case m.Begin():
                self._starter.begin(message, envelope)
            case m.Ping():
                self._ping(message, envelope, received_ns)
            case m.Train():
                self._train(message, envelope, received_ns)
            case m.Hello():
                self._hello(message, envelope, received_ns)
            case m.Fetch():
                check_frame_count(envelope.frames, 0)
                self._replies.expect_room(envelope)
                self._replies.send_cheap(envelope, *self._vocabulary_server.get_part(message))
            case m.Chunk():
                self._chunk(message, envelope, received_ns)
            case m.More():
                check_frame_count(envelope.frames, 0)
                self._replies.send_slice(message, envelope)
            case m.Cancel() | m.Close():
                with suppress(UnknownSessionError):
                    self._end(message, self.sessions.find(message.session, envelope.owner))

    def _serve_round(
        self, message: m.Window | m.States | m.Pull, envelope: Envelope, received_ns: int
    ) -> None:
        """Serve a message of a running generation, or queue it if its generation waits."""
        session = self.sessions.use(message.session, envelope.owner)
        queued = session.queued
        if queued is not None and queued.number == message.generation:
            self._starter.queue_message(queued, message, envelope, received_ns)
            return
        generation = session.find_generation(message.generation)
        match message:
            case m.Window():
                self._windows.serve_window(session, generation, message, envelope, received_ns)
            case m.States():
                self._windows.serve_states(session, generation, message, envelope, received_ns)
            case m.Pull():
                self._streams.serve_pull(session, generation, message, envelope, received_ns)

    def _hint(self, hint: m.Hint, envelope: Envelope, received_ns: int) -> None:
        """Add a hint to its generation, and count the outcome; a hint never gets a reply."""
        outcome = "unknown"
        with suppress(UnknownSessionError):
            session = self.sessions.find(hint.session, envelope.owner)
            queued, generation = session.queued, session.generation
            if queued is not None and queued.number == hint.generation:
                self._starter.queue_message(queued, hint, envelope, received_ns)
                return
            if generation is not None and generation.number == hint.generation:
                outcome = self._streams.add_hint(generation, hint, envelope)
        self._metrics.hints[outcome] += 1

    def _end(self, message: m.Cancel | m.Close, session: Session) -> None:
        """Stop a generation (`Cancel`), or close the session (`Close`)."""
        queued = session.queued
        if isinstance(message, m.Close):
            self._starter.cancel(session)
            self.sessions.close(session)
        elif session.generation_number == message.generation:
            session.stop()
        elif queued is not None and queued.number == message.generation:
            self._starter.give_up(session)

    def _hello(self, hello: m.Hello, envelope: Envelope, received_ns: int) -> None:
        welcome = self._handshake.welcome(hello, received_ns)
        self._replies.set_slice_limit(envelope.client, envelope.owner, hello.reply_bytes)
        self._replies.expect_room(envelope)
        self._replies.send_cheap(envelope, welcome)

    def _chunk(self, chunk: m.Chunk, envelope: Envelope, received_ns: int) -> None:
        """Receive one chunk of a large message; serve the message once it is complete."""
        check_frame_count(envelope.frames, 1)
        here, body = self._uploads.receive_chunk(envelope.owner, chunk, envelope.frames[0])
        self._replies.send_cheap(envelope, m.Ack(transfer=chunk.transfer, offset=here))
        if body is None:
            return
        header, frames = unpack(body)
        size = len(header) + sum(map(len, frames))
        if not envelope.frames[0]:  # an empty chunk queries the progress: serve the message again
            self._replies.expect_room(envelope)
            size = envelope.size
        whole = Envelope(envelope.client, envelope.owner, header, frames, size)
        check_size(whole, self._message_bytes)
        message = m.decode_device_message(header)
        if isinstance(message, m.Chunk):
            raise MalformedError("A message that was sent in chunks cannot itself be a chunk.")
        # a `Begin` must not be served twice, and has no reply that could be lost
        keep = not isinstance(message, m.Begin)
        self._uploads.mark_served(envelope.owner, chunk.transfer, keep=keep)
        self._attempt(message, whole, received_ns)

    def _ping(self, ping: m.Ping, envelope: Envelope, received_ns: int) -> None:
        if len(envelope.frames) > 1 or envelope.size > m.MAX_PROBE:
            raise MalformedError(f"A ping may have at most one frame and {m.MAX_PROBE} bytes.")
        self._metrics.pings += 1
        segments = envelope.segments()
        pong = m.Pong(
            nonce=ping.nonce,
            received_ns=received_ns,
            sent_ns=time.monotonic_ns(),
            segments=segments.sent & _U31 if segments is not None else 0,
            repeated=segments.retransmitted & _U31 if segments is not None else 0,
        )
        self._replies.send_cheap(envelope, pong, envelope.frames)

    def _train(self, train: m.Train, envelope: Envelope, received_ns: int) -> None:
        """Send a train's pongs; their bytes are charged like those of other cheap replies."""
        if len(envelope.frames) > 1 or envelope.size > m.MAX_PROBE:
            raise MalformedError(f"A train may have at most one frame and {m.MAX_PROBE} bytes.")
        if train.bytes or train.pongs > 1:
            self._replies.expect_room(envelope)
        self._metrics.pings += 1
        # random bytes, so that no link compresses them
        frames = [(os.urandom(train.bytes),) if train.bytes else () for _ in range(train.pongs)]
        for pong_frames in frames:
            pong = m.Pong(nonce=train.nonce, received_ns=received_ns, sent_ns=time.monotonic_ns())
            self._replies.send(envelope.client, pong, pong_frames)
        self._replies.charge(envelope, train.pongs * (_PONG_BYTES + train.bytes))

    # Finished jobs

    def finish_job(self, job: Job) -> None:
        """Apply a finished job to its session, send the reply, and charge the verification."""
        self._apply_job(job)  # first, since the device waits for the reply
        self._admission.charge(job.owner, job.verify_cpu_s)

    def _apply_job(self, job: Job) -> None:
        session = self.sessions.get(job.session)
        if session is None or session.generation is None or job.cancelled:
            return
        generation = session.generation
        generation.jobs.remove(job)
        generation.verify_cpu_s = job.verify_cpu_s
        if job.error is not None:
            self._fail(session, generation, job)
        elif job.decision is not None:  # else the job has read a part of a prompt
            if generation.stream is not None and isinstance(job.decision, Decision):
                self._streams.finish_job(session, generation, generation.stream, job, job.decision)
            else:
                self._windows.finish_job(session, generation, job, job.decision)
        if generation.trace is not None:
            generation.trace.add(job, len(session.committed))
        if self._allowed is not None:
            self._metrics.device_jobs[self._allowed[session.owner]] += 1

    def _fail(self, session: Session, generation: Generation, job: Job) -> None:
        """Cancel the session's jobs and send the error of a failed pass; the device may retry."""
        error = job.error
        if not (isinstance(error, PilotfishError) and is_client_error(error)):
            error = InternalError("The target failed in this round; see the edge's log.")
        if generation.trace is not None:
            generation.trace.fail(job, error.code)
        waiting = generation.window_state or generation.stream
        # also cancels the session's other jobs, since the device repeats the round
        generation.stop()
        if waiting is not None:
            failure = m.Failure(
                code=error.code,
                message=str(error)[:1024],
                session=session.id,
                generation=generation.number,
                start=len(session.committed),
            )
            self._replies.send(waiting.client, failure, ())


def _draining_error() -> DrainingError:
    return DrainingError(
        "This edge is about to stop; continue at another edge, or when this edge is back."
    )
