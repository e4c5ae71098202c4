"""Serve the devices' messages. The serving loop calls these functions; they never wait.

Every request gets a reply, except where the protocol has none. A fault in a client's message causes
a typed failure for this client only.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from pilotfish.base.errors import (
    AccessDeniedError,
    ConflictError,
    DivergedError,
    DrainingError,
    MalformedError,
    PairMismatchError,
    PilotfishError,
    RateLimitedError,
    TooLargeError,
    UnknownSessionError,
    VersionMismatchError,
)
from pilotfish.base.version import SOFTWARE
from pilotfish.edge_runtime.admission import Admission
from pilotfish.edge_runtime.client_errors import to_client_error
from pilotfish.edge_runtime.draft_cost import DraftCost
from pilotfish.edge_runtime.edge_config import MEBIBYTE, EdgeLimits
from pilotfish.edge_runtime.edge_drafter import EdgeDrafter
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.generation_start import GenerationStarter
from pilotfish.edge_runtime.generations import Generations, Send, Submit
from pilotfish.edge_runtime.grammar_compiler import GrammarCompiler
from pilotfish.edge_runtime.logits_processors import LogitsProcessors
from pilotfish.edge_runtime.resources import EdgeResources
from pilotfish.edge_runtime.scheduler import Job
from pilotfish.edge_runtime.sessions import Sessions, SessionState, Stream, WindowState
from pilotfish.edge_runtime.targets.target import Target
from pilotfish.edge_runtime.transfers import Downloads, Uploads
from pilotfish.edge_runtime.vocabulary_server import VocabularyServer
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire import messages as m
from pilotfish.wire.protocols import STREAM, Draft
from pilotfish.wire.protocols.protocol import check_frame_count
from pilotfish.wire.transfer import unpack
from pilotfish.wire.transport import Envelope, check_size

_log = logging.getLogger("pilotfish.edge")

_REPLY_BYTES = 256  # approximate size of a reply's header (bytes)


class MessageHandler:
    """Serves messages and owns the sessions. Used by the serving loop.

    pass_times, drafter_pass_times: pass times of the target, and of the edge drafter. resources:
    the edge's options and resources for protocols. allowed: allowed key → device name; None: the
    edge has no keys. vocabulary: the target's vocabulary; None: read it from the artifact.
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
    ) -> None:
        manifest = self._manifest = artifact.manifest
        vocabulary = vocabulary or Vocabulary.from_artifact(artifact)
        self._vocabulary_server = VocabularyServer(vocabulary)
        self._vocab = manifest.vocab_size
        self._digest = target.digest
        self._message_bytes = limits.message_mib * MEBIBYTE
        states = manifest.states
        self._limits = m.Limits(
            context=target.context,
            window=limits.window if states is None else min(limits.window, states.window),
            message_bytes=self._message_bytes,
            sessions=limits.sessions_per_client,
        )
        self._uploads, self._downloads = Uploads(self._message_bytes), Downloads(send)
        self._send = self._downloads.send
        self._passes, self._drafts = list(pass_times), list(drafter_pass_times)
        self._resources = resources or EdgeResources()
        self._allowed = allowed
        self._metrics = metrics or EdgeMetrics()
        self._draining = False
        self._generations = Generations(
            submit,
            self._send,
            self._metrics,
            vocab_size=manifest.vocab_size,
            context=target.context,
            ends=manifest.eos_ids,
            draft_cost=draft_cost,
        )
        self._admission = Admission(limits.messages_per_s)
        self._expire_s = limits.expire_s
        self.sessions = Sessions(
            limits.sessions, limits.sessions_per_client, limits.idle_s, metrics=self._metrics
        )
        self.compiler = GrammarCompiler(vocabulary.grammars)
        self._starter = GenerationStarter(
            self.sessions,
            self._generations,
            LogitsProcessors(vocabulary, model_logits=target.model_logits),
            self.compiler,
            resources=self._resources,
            edge_drafter=edge_drafter,
            limits=self._limits,
            vocab_size=manifest.vocab_size,
            serve=self._serve,
            refuse=self._refuse,
            charge=self._admission.charge,
        )
        self.sessions.on_end = self._starter.cancel_ended

    # Called by the daemon

    def apply_config(self, limits: EdgeLimits, allowed: Mapping[bytes, str] | None) -> None:
        """Apply new limits and a new allow-list; end the sessions of removed keys."""
        self._admission.rate = limits.messages_per_s
        self._expire_s = limits.expire_s
        self.sessions.per_owner = limits.sessions_per_client
        self.sessions.idle_s = limits.idle_s
        self._allowed = allowed
        for session in self.sessions:
            if allowed is not None and session.owner not in allowed:
                self.sessions.close(session)
                self._metrics.sessions_ended["revoked"] += 1

    def expire(self) -> None:
        """End sessions and drop transfers that have been idle for too long."""
        self.sessions.expire(self._expire_s)
        self._uploads.expire()
        self._downloads.expire()

    def drain(self) -> None:
        """Refuse new work, and cancel all work except the windows under way."""
        self._draining = True
        for session in self.sessions:
            self._starter.cancel(session, _draining_error())
            if not session.undecided:
                self._generations.stop(session)

    @property
    def drained(self) -> bool:
        """Whether every window has been decided, and no session has a job."""
        return not any(session.jobs or session.undecided for session in self.sessions)

    def over_budget(self, owner: bytes) -> bool:
        """Return whether a client owes time of this thread; its jobs then wait."""
        return self._admission.over_budget(owner, time.monotonic())

    def sessions_by_device(self) -> dict[str, int]:
        """Return the number of open sessions of each device name on the allow-list."""
        names = self._allowed or {}
        return Counter(names.get(session.owner, "") for session in self.sessions)

    # Messages in

    def handle(self, envelope: Envelope) -> None:
        """Serve one message of a device: check it, admit it, and serve its request."""
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
            request = m.decode_request(envelope.header)
        except PilotfishError as error:  # a cheap refusal: no frame was decoded
            self._refuse(envelope, None, error, admitted=admitted)
            return
        self._serve(request, envelope, now_ns - envelope.queued_ns())

    def start_compiled(self) -> bool:
        """Start generations after the compilation of their grammars; returns False in any case."""
        return self.compiler.run_callbacks()

    def _serve(self, request: m.Request, envelope: Envelope, received_ns: int) -> None:
        """Serve an admitted request, and charge its client for the time of this thread."""
        begun_s = time.thread_time()
        self._attempt(request, envelope, received_ns)
        self._admission.charge(envelope.owner, time.thread_time() - begun_s)

    def _attempt(self, request: m.Request, envelope: Envelope, received_ns: int) -> None:
        try:
            self._dispatch(request, envelope, received_ns)
        except Exception as error:
            self._refuse(envelope, request, to_client_error(error, "a message could not be served"))

    def _dispatch(self, request: m.Request, envelope: Envelope, received_ns: int) -> None:
        while_draining = m.States | m.Ping | m.Hint | m.Cancel | m.Close | m.Chunk | m.More
        if self._draining and not isinstance(request, while_draining):
            raise _draining_error()
        if self._starter.queue_request(request, envelope, received_ns):
            return
        match request:
            case m.Window():
                self._window(request, envelope, received_ns)
            case m.States():
                self._states(request, envelope, received_ns)
            case m.Hint():
                self._metrics.hints[self._hint(request, envelope)] += 1
            case m.Pull():
                self._pull(request, envelope, received_ns)
            case m.Begin():
                self._starter.begin(request, envelope)
            case m.Ping():
                self._ping(request, envelope, received_ns)
            case m.Hello():
                self._hello(request, envelope, received_ns)
            case m.Fetch():
                check_frame_count(envelope.frames, 0)
                self._expect_room_for_replies(envelope)
                self._reply(envelope, *self._vocabulary_server.get_part(request))
            case m.Chunk() | m.More():
                self._transfer(request, envelope, received_ns)
            case m.Cancel() | m.Close():
                with suppress(UnknownSessionError):
                    self._end(request, self.sessions.find(request.session, envelope.owner))

    def _end(self, request: m.Cancel | m.Close, session: SessionState) -> None:
        """Stop a generation (`Cancel`), or close the session (`Close`)."""
        queued = session.queued
        if isinstance(request, m.Close):
            self._starter.cancel(session)
            self.sessions.close(session)
        elif session.generation == request.generation:
            self._generations.stop(session)
        elif queued is not None and queued.begin.generation == request.generation:
            self._starter.give_up(session)

    def _expect_room_for_replies(self, envelope: Envelope) -> None:
        """Raise `RateLimitedError` if the client has no bytes left for cheap replies."""
        if not self._admission.may_send(envelope.owner):
            raise RateLimitedError(
                "This key requests too many bytes that need no target pass; slow down."
            )

    def _reply(self, envelope: Envelope, reply: m.Reply, frames: Sequence[m.Buffer] = ()) -> None:
        """Send a cheap reply (computed without a target pass), and charge its bytes."""
        self._send(envelope.client, reply, frames)
        self._charge_reply(envelope, sum(map(len, frames)))

    def _charge_reply(self, envelope: Envelope, size: int) -> None:
        """Charge a cheap reply: the bytes by which the reply is larger than its request."""
        beyond = max(0, _REPLY_BYTES + size - envelope.size)
        self._admission.charge_bytes(envelope.owner, beyond)

    def _hello(self, hello: m.Hello, envelope: Envelope, received_ns: int) -> None:
        if hello.version != m.VERSION:
            raise VersionMismatchError(
                f"The device uses version {hello.version} of the wire protocol, but this edge "
                f"uses version {m.VERSION}: install the same Pilotfish release on both."
            )
        if hello.tokenizer != self._manifest.tokenizer_fingerprint and not hello.bridges:
            raise PairMismatchError(
                f"The drafter's vocabulary ({hello.vocab_size} tokens) differs from the "
                "vocabulary of the target "
                f"{self._manifest.model} ({self._vocab} tokens): use a drafter of the same family, "
                "or install a newer Pilotfish on the device, which can bridge vocabularies."
            )
        welcome = m.Welcome(
            version=m.VERSION,
            software=SOFTWARE,
            model=self._manifest.model,
            vocab_size=self._vocab,
            padded_vocab_size=self._manifest.padded_vocab_size,
            hidden_size=self._manifest.dimensions.hidden,
            eos_ids=self._manifest.eos_ids,
            protocols=[*self._resources.protocols(hello.drafter, hello.hidden_size), STREAM],
            limits=self._limits,
            received_ns=received_ns,
            sent_ns=time.monotonic_ns(),
            passes=self._passes,
            digest=self._digest,
            tokenizer=self._manifest.tokenizer_fingerprint,
            vocabulary=self._vocabulary_server.digest,
            vocabulary_bytes=self._vocabulary_server.size,
            drafts=self._drafts,
            chunks=True,
        )
        self._downloads.set_slice_limit(envelope.client, envelope.owner, hello.reply_bytes)
        self._expect_room_for_replies(envelope)
        self._reply(envelope, welcome)

    def _transfer(self, request: m.Chunk | m.More, envelope: Envelope, received_ns: int) -> None:
        if isinstance(request, m.Chunk):
            self._chunk(request, envelope, received_ns)
        else:
            self._more(request, envelope)

    def _chunk(self, chunk: m.Chunk, envelope: Envelope, received_ns: int) -> None:
        """Receive one chunk of a large message; serve the message once it is complete."""
        check_frame_count(envelope.frames, 1)
        here, body = self._uploads.receive_chunk(envelope.owner, chunk, envelope.frames[0])
        self._reply(envelope, m.Ack(transfer=chunk.transfer, offset=here))
        if body is None:
            return
        header, frames = unpack(body)
        size = len(header) + sum(map(len, frames))
        if not envelope.frames[0]:  # an empty chunk queries the progress: serve the message again
            self._expect_room_for_replies(envelope)
            size = envelope.size
        whole = Envelope(envelope.client, envelope.owner, header, frames, size)
        check_size(whole, self._message_bytes)
        request = m.decode_request(header)
        if isinstance(request, m.Chunk):
            raise MalformedError("A message that was sent in chunks cannot itself be a chunk.")
        # a `Begin` must not be served twice, and has no reply that could be lost
        keep = not isinstance(request, m.Begin)
        self._uploads.mark_served(envelope.owner, chunk.transfer, keep=keep)
        self._attempt(request, whole, received_ns)

    def _more(self, more: m.More, envelope: Envelope) -> None:
        """Send the requested slice of a large reply."""
        check_frame_count(envelope.frames, 0)
        self._expect_room_for_replies(envelope)
        again = self._downloads.more(envelope.client, envelope.owner, more)
        self._charge_reply(envelope, again)

    def _ping(self, ping: m.Ping, envelope: Envelope, received_ns: int) -> None:
        if len(envelope.frames) > 1 or envelope.size > m.MAX_PROBE:
            raise MalformedError(f"A ping may have at most one frame and {m.MAX_PROBE} bytes.")
        self._metrics.pings += 1
        pong = m.Pong(nonce=ping.nonce, received_ns=received_ns, sent_ns=time.monotonic_ns())
        self._reply(envelope, pong, envelope.frames)

    def _window(self, window: m.Window, envelope: Envelope, received_ns: int) -> None:
        session = self._generation(window, envelope.owner)
        protocol, sampling_params = session.protocol, session.sampling_params
        if protocol is None or protocol.streams or sampling_params is None:
            raise MalformedError("This generation streams tokens, so it accepts no windows.")
        last = session.window_state
        if last is not None and last.start == window.start:
            self._retry(session, last, window, envelope)
            return
        if last is not None and last.verdict is None:
            raise ConflictError(f"The window at position {last.start} is still being verified.")
        # check before the distributions are decoded, which costs more
        pending, drafted = protocol.count_tokens(envelope.frames, self._vocab)
        if pending != session.awaits_pending:
            raise DivergedError(
                "The device must send a token that it sampled itself with the next window, and "
                "only with that window: begin again."
            )
        self._expect_position(session, window.start - pending, window.hash)
        self._expect_room(session, pending, drafted)
        draft: Draft = protocol.decode_draft(envelope.frames, self._vocab)
        self._expect_room(session, pending, len(draft.ids))  # a tree may have more nodes than that
        window_state = WindowState(
            envelope.client, window.start, envelope.frames, draft, received_ns
        )
        self._generations.queue_window(session, window_state, protocol, sampling_params)

    def _retry(
        self, session: SessionState, last: WindowState, window: m.Window, envelope: Envelope
    ) -> None:
        """Answer a repeated window: send its reply again, or nothing while it is being verified."""
        if window.hash != session.committed.hash_at(last.committed_before):
            raise DivergedError(
                f"The edge holds other tokens before position {last.committed_before}: begin again."
            )
        if not last.matches(envelope.frames):
            raise ConflictError(f"Another window at position {last.start} was already verified.")
        last.client = envelope.client
        self._repeat(session, last, envelope)

    def _repeat(self, session: SessionState, last: WindowState, envelope: Envelope) -> None:
        """Send the reply to a window again, if the window has a reply."""
        if last.verdict is None and last.states_request is None:
            return
        self._expect_room_for_replies(envelope)
        if last.verdict is not None:
            size = self._generations.send_with_prompt_logprobs(
                session, last.client, last.verdict, last.reply_frames
            )
            self._charge_reply(envelope, size)
        elif last.states_request is not None:
            self._reply(envelope, last.states_request, last.reply_frames)

    def _states(self, states: m.States, envelope: Envelope, received_ns: int) -> None:
        """Verify a window with the requested hidden states, or repeat its verdict."""
        session = self._generation(states, envelope.owner)
        last = session.window_state
        if last is None or last.start != states.start:
            raise DivergedError(
                f"The edge holds no window at position {states.start}: begin again."
            )
        if last.states_request is None:
            raise MalformedError("The edge did not request hidden states of this window.")
        last.client = envelope.client
        if last.verdict is not None:
            self._repeat(session, last, envelope)
        else:
            self._generations.verify_with_states(session, envelope.frames, received_ns)

    def _pull(self, pull: m.Pull, envelope: Envelope, received_ns: int) -> None:
        check_frame_count(envelope.frames, 0)
        session = self._generation(pull, envelope.owner)
        if session.protocol is not None and not session.protocol.streams:
            raise MalformedError("This generation verifies windows; it does not stream tokens.")
        length = len(session.committed)
        if pull.start > length or session.committed.hash_at(pull.start) != pull.hash:
            raise DivergedError(f"The edge holds {length} other tokens of this session.")
        if pull.start < length:
            self._expect_room_for_replies(envelope)
        missed = session.committed.ids[pull.start :]
        remaining = pull.count - len(missed)
        running = session.stream is not None
        session.stream = Stream(envelope.client, remaining, received_ns)
        if session.hints is not None:
            session.hints.set_requested_end(pull.start + pull.count)
        if len(missed):  # a retry: the device did not receive these tokens
            times = m.Times(received_ns=received_ns, held_ns=0, queue_ns=0, verify_ns=0)
            missed_ids = missed.tolist()
            log = session.logprobs
            frame = None if log is None else log.frame_of(pull.start, len(missed_ids))
            size = self._generations.send_tokens(
                session, pull.start, missed_ids, times, logprobs=frame
            )
            self._charge_reply(envelope, size)
        if not running and not session.ended:
            self._generations.queue_stream_token(session)

    def _hint(self, hint: m.Hint, envelope: Envelope) -> str:
        """Add a hint; return its outcome for the metrics. A hint never gets a reply."""
        try:
            session = self.sessions.find(hint.session, envelope.owner)
            if session.generation != hint.generation or session.hints is None:
                return "unknown"
            accepted = session.hints.add_device_hint(
                hint.start, hint.hash, envelope.frames, self._vocab
            )
        except UnknownSessionError:
            return "unknown"
        except PilotfishError:
            return "malformed"
        return "kept" if accepted else "stale"

    def _generation(self, request: m.Window | m.States | m.Pull, owner: bytes) -> SessionState:
        session = self.sessions.use(request.session, owner)
        if request.generation != session.generation:
            raise DivergedError(
                f"The edge is at generation {session.generation} of this session, the device at "
                f"{request.generation}: begin again."
            )
        return session

    @staticmethod
    def _expect_position(session: SessionState, start: int, digest: bytes) -> None:
        length = len(session.committed)
        if start != length or digest != session.committed.hash:
            raise DivergedError(
                f"The round starts at {start}, but the edge holds {length} tokens"
                f"{'' if start != length else ' that differ from the device’s'}: begin again."
            )

    def _expect_room(self, session: SessionState, pending: int, drafted: int) -> None:
        if drafted > self._limits.window:
            raise TooLargeError(
                f"The window has {drafted} tokens; this edge accepts at most {self._limits.window}."
            )
        if len(session.committed) + pending + drafted + 1 > self._limits.context:
            raise TooLargeError(
                f"The session has {len(session.committed)} tokens, and the edge's context is "
                f"{self._limits.context} tokens: there is no room for a window of "
                f"{pending + drafted}."
            )

    # Finished jobs

    def finish_job(self, job: Job) -> None:
        """Apply a finished job to its session and send the reply."""
        session = self.sessions.get(job.session)
        self._admission.charge(job.owner, job.verify_cpu_s)
        if session is not None and not job.cancelled:
            session.verify_cpu_s = job.verify_cpu_s
            self._generations.finish(session, job)
            if self._allowed is not None:
                self._metrics.device_jobs[self._allowed[session.owner]] += 1

    def _refuse(
        self,
        envelope: Envelope,
        request: m.Request | None,
        error: PilotfishError,
        *,
        admitted: bool = True,
    ) -> None:
        if m.is_hint(envelope.header):
            self._metrics.hints["refused"] += 1  # a hint never gets a reply
            return
        self._metrics.refusals[error.code] += 1
        # the message rate limits replies to admitted messages; this limits the other refusals
        if not admitted and not self._admission.may_send(envelope.owner):
            self._metrics.dropped_replies += 1
            return
        about = request if isinstance(request, m.Begin | m.Window | m.States | m.Pull) else None
        failure = m.Failure(
            code=error.code,
            message=str(error)[:1024],
            session=about.session if about else None,
            generation=about.generation if about else None,
            start=about.start if isinstance(about, m.Window | m.States | m.Pull) else None,
        )
        self._reply(envelope, failure)


def _draining_error() -> DrainingError:
    return DrainingError(
        "This edge is about to stop; continue at another edge, or when this edge is back."
    )
