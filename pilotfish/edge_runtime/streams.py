"""Streams: compute the target's tokens one after another, and send them as they come.

In:  a `Pull` of a running generation; under `ahead` also hints. Out: a job for the next token, to
     which hints are attached when its pass starts; when the job is finished, its `Tokens`, and the
     next job.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pilotfish.base.errors import BadGrammarError, DivergedError, MalformedError, PilotfishError
from pilotfish.edge_runtime.draft_cost import DraftCost
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.generation import Generation, Stream
from pilotfish.edge_runtime.hint_sources import NO_HINTS, AttachedHints, HintSources
from pilotfish.edge_runtime.logits_processors import RowProcessor
from pilotfish.edge_runtime.replies import Replies, job_times
from pilotfish.edge_runtime.scheduler import Job, sum_omitted
from pilotfish.edge_runtime.sessions import Session, Verify
from pilotfish.engines.constraint import DEAD_END
from pilotfish.engines.manifest import Manifest
from pilotfish.speculation.agreement import count_agreed
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.logits_options import node_paths
from pilotfish.speculation.randomness import Purpose
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import encode_ids
from pilotfish.wire.protocols import Decision, choose
from pilotfish.wire.protocols.protocol import Ids
from pilotfish.wire.protocols.window_checks import check_frame_count
from pilotfish.wire.transport import Envelope


@dataclass(frozen=True, eq=False)
class StreamServer:
    """Serves the streams of all sessions. Used by the serving loop.

    manifest: the target's manifest. limits: the limits in the edge's `Welcome`.
    """

    replies: Replies
    metrics: EdgeMetrics
    draft_cost: DraftCost
    manifest: Manifest
    limits: m.Limits

    def serve_pull(
        self,
        session: Session,
        generation: Generation,
        pull: m.Pull,
        envelope: Envelope,
        received_ns: int,
    ) -> None:
        """Start a stream, or change the number of its tokens; send missed tokens again."""
        check_frame_count(envelope.frames, 0)
        if generation.protocol is not None and not generation.protocol.streams:
            raise MalformedError("This generation verifies windows; it does not stream tokens.")
        length = len(session.committed)
        if pull.start > length or session.committed.hash_at(pull.start) != pull.hash:
            raise DivergedError(f"The edge holds {length} other tokens of this session.")
        if pull.start < length:
            self.replies.expect_room(envelope)
        missed = session.committed.ids[pull.start :].tolist()
        running = generation.stream is not None
        generation.stream = Stream(envelope.client, pull.count - len(missed), received_ns)
        if generation.hints is not None:
            generation.hints.set_requested_end(pull.start + pull.count)
        if missed:  # a retry: the device did not receive these tokens
            times = m.Times(received_ns=received_ns, held_ns=0, queue_ns=0, verify_ns=0)
            logprobs = generation.logprobs
            frame = None if logprobs is None else logprobs.frame_of(pull.start, len(missed))
            tokens = _make_tokens(session, generation, pull.start, times)
            size = self._send(generation, envelope.client, tokens, missed, frame)
            self.replies.charge(envelope, size)
        if not running and not generation.ended:
            self._queue_token(session, generation)

    def add_hint(self, generation: Generation, hint: m.Hint, envelope: Envelope) -> str:
        """Add a hint of the device; return its outcome for the metrics. A hint gets no reply."""
        if generation.hints is None:
            return "unknown"
        try:
            accepted = generation.hints.add_device_hint(
                hint.start, hint.hash, envelope.frames, self.manifest.vocab_size
            )
        except PilotfishError:
            return "malformed"
        return "kept" if accepted else "stale"

    def _queue_token(self, session: Session, generation: Generation) -> None:
        """Queue a job for the stream's next token, if more tokens are requested.

        The generation's hints are attached to the job when its pass starts.
        """
        stream = generation.stream
        if stream is None:
            return
        if stream.remaining <= 0 or len(session.committed) >= self.limits.context:
            generation.stream = None
            return
        session.queue_prompt_scores(generation)  # if a pass over the prompt has failed
        tokens = session.committed.ids.copy()
        hints = None
        if generation.hints is not None:
            hints = _StreamHints(
                session, generation, generation.hints, self.draft_cost, self.limits.context
            )
        processor, verify = _rule(generation, tokens, ())
        session.queue_job(generation, tokens, 1, verify, hints=hints, processor=processor)

    def finish_job(
        self,
        session: Session,
        generation: Generation,
        stream: Stream,
        job: Job,
        decision: Decision,
    ) -> None:
        """Commit and send the tokens of a finished job, and queue the next job."""
        start, token = len(session.committed), decision.token
        assert token is not None  # `_verify` always samples a token
        drafts = job.tokens[start : start + decision.accepted].tolist()
        # the device may have lowered its request during the pass; one token is always committed
        ids = _cut_at_end(self.manifest.eos_ids, [*drafts, token])[: max(1, stream.remaining)]
        session.committed.extend(ids)
        generation.ended = ids[-1] in self.manifest.eos_ids
        stream.remaining = 0 if generation.ended else stream.remaining - len(ids)
        self.metrics.streamed += len(ids)
        self.draft_cost.record_tokens(len(ids))
        attached, accepted = NO_HINTS, min(decision.accepted, len(ids))
        if generation.hints is not None:
            attached = generation.hints.record_pass(ids, accepted)
            self.metrics.record_hints(attached, accepted)
        logprobs = None if generation.logprobs is None else generation.logprobs.commit(len(ids))
        times = job_times(job, stream.received_ns)
        self.metrics.record_times(times.queue_ns * 1e-9, times.verify_ns * 1e-9)
        omitted_mass = sum_omitted(job.omitted, range(accepted + 1))
        if omitted_mass is not None:
            self.metrics.record_omitted(generation.protocol, omitted_mass)
        tokens = _make_tokens(session, generation, start, times, attached, accepted, omitted_mass)
        self._send(generation, stream.client, tokens, ids, logprobs)
        stream.received_ns = time.monotonic_ns()
        self._queue_token(session, generation)

    def _send(
        self,
        generation: Generation,
        client: bytes,
        tokens: m.Tokens,
        ids: Sequence[int],
        logprobs: m.Buffer | None,
    ) -> int:
        """Send tokens with these ids; return the bytes of the frames.

        logprobs: frame of the tokens' log-probabilities, if requested.
        """
        frame = encode_ids(np.asarray(ids, dtype=np.uint32), self.manifest.vocab_size)
        frames = (frame,) if logprobs is None else (frame, logprobs)
        return self.replies.send_result(generation, client, tokens, frames)


def _make_tokens(
    session: Session,
    generation: Generation,
    start: int,
    times: m.Times,
    attached: AttachedHints = NO_HINTS,
    accepted: int = 0,
    omitted_mass: float | None = None,
) -> m.Tokens:
    """Return the header of tokens from position ``start`` on.

    attached: drafts of the pass that computed the tokens. accepted: number of accepted drafts.
    omitted_mass: from an ensemble, see `wire.messages.Tokens`.
    """
    return m.Tokens(
        session=session.id,
        generation=generation.number,
        start=start,
        times=times,
        source=attached.budget.name if attached.budget is not None else "",
        drafted=len(attached.ids),
        accepted=accepted,
        omitted_mass=omitted_mass,
    )


class _StreamHints:
    """Hints of a stream's next pass, in the form that the scheduler attaches to a job."""

    def __init__(
        self,
        session: Session,
        generation: Generation,
        hints: HintSources,
        draft_cost: DraftCost,
        context: int,
    ) -> None:
        self._session, self._generation, self._hints = session, generation, hints
        self._draft_cost, self._context = draft_cost, context

    @property
    def tokens_per_pass(self) -> float:
        return self._hints.tokens_per_pass

    def propose(self) -> Sequence[float]:
        stream, length = self._generation.stream, len(self._session.committed)
        assert stream is not None
        most = min(stream.remaining, self._context - length) - 1
        return self._hints.propose(most, self._draft_cost.tokens_per_draft)

    def attach(self, job: Job, count: int) -> None:
        drafts = self._hints.attach(count)
        committed = self._session.committed.ids
        # [committed + drafts]
        job.tokens = np.concatenate([committed, np.array(drafts, np.uint32)])
        job.rows = 1 + len(drafts)
        text = job.tokens[: len(committed)]
        job.processor, job.verify = _rule(self._generation, text, drafts)


def _rule(
    generation: Generation, text: Ids, drafts: Sequence[int]
) -> tuple[RowProcessor | None, Verify]:
    """Return the processor of the rows after ``text`` and after each draft, and their rule."""
    processor = None
    if generation.logits_processor is not None:
        processor = RowProcessor(generation.logits_processor, text, node_paths(drafts, None))
    return processor, partial(_verify, generation, len(text), drafts, processor)


def _verify(
    generation: Generation,
    position: int,
    drafts: Sequence[int],
    processor: RowProcessor | None,
    logits: Floats,
    hidden: Floats,
) -> Decision:
    """Sample the token at a position, and one after each draft that equals the token before it.

    logits: [n + 1, V], of the position and after each of n drafts.
    """
    sampling_params = generation.sampling_params
    dead = () if processor is None else processor.process(logits)
    decision = Decision(
        *count_agreed(
            drafts,
            lambda index: choose(logits[index], sampling_params, position + index, Purpose.TARGET),
        )
    )
    if dead and min(dead) <= decision.accepted:
        raise BadGrammarError(DEAD_END)
    if generation.logprobs is not None:
        generation.logprobs.record_stream(drafts, logits, decision)
    return decision


def _cut_at_end(ends: Collection[int], ids: list[int]) -> list[int]:
    """Return the ids up to the first end token, with that token."""
    end = next((at for at, id in enumerate(ids) if id in ends), len(ids))
    return ids[: end + 1]
