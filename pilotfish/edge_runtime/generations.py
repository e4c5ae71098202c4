"""Convert the sessions' requests to jobs of the target, and finished jobs to replies.

A job reads a prompt, verifies a window, or computes the next token of a stream. A finished job
updates its session, and the device gets a reply.
"""

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from pilotfish.base.errors import BadGrammarError, BusyError, InternalError, PilotfishError
from pilotfish.edge_runtime.client_errors import is_client_error
from pilotfish.edge_runtime.draft_cost import DraftCost
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.hint_sources import NO_HINTS, AttachedHints, HintSources
from pilotfish.edge_runtime.reply_logprobs import Logprobs, PromptLogprobs
from pilotfish.edge_runtime.scheduler import Job
from pilotfish.edge_runtime.sessions import SessionState, Stream, WindowState
from pilotfish.engines.constraint import DEAD_END
from pilotfish.engines.engine_errors import GrammarBusyError, GrammarError
from pilotfish.speculation.agreement import count_agreed
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.logits_options import LogitsProcessor, node_paths
from pilotfish.speculation.randomness import Purpose
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import encode_ids
from pilotfish.wire.protocols import (
    Decision,
    Draft,
    SamplingParams,
    SpeculationProtocol,
    StatesNeeded,
    choose,
)
from pilotfish.wire.protocols.protocol import Ids

# Rows of a pass that scores a prompt: more than `NARROW`, so that the scheduler treats the pass as
# a prompt's, not as a window's.
_SCORED_ROWS = 48
Send = Callable[[bytes, m.Reply, Sequence[m.Buffer]], bool]  # returns whether the reply was sent
Submit = Callable[[Job], None]


class Generations:
    """Work of all sessions at the target.

    ends: the target's end tokens. context: upper limit of a session's tokens.
    """

    def __init__(
        self,
        submit: Submit,
        send: Send,
        metrics: EdgeMetrics,
        *,
        vocab_size: int,
        context: int,
        ends: Collection[int],
        draft_cost: DraftCost,
    ) -> None:
        self._submit = submit
        self._draft_cost = draft_cost
        self._send = send
        self._metrics = metrics
        self._vocab = vocab_size
        self._context = context
        self._ends = frozenset(ends)

    def queue_prefill(self, session: SessionState) -> None:
        """Queue a job that reads the committed tokens except the last, while the device drafts."""
        tokens = session.committed.ids[:-1].copy()  # a copy, since the committed tokens may change
        self._queue(session, Job(session.id, session.slot, tokens, rows=0, verify=None))

    def queue_prompt_scoring(self, session: SessionState, prompt: PromptLogprobs) -> None:
        """Queue jobs that compute the log-probability of each prompt token after the first.

        Parts of the prompt that an earlier pass has computed are skipped.
        """
        tokens = prompt.ids[:-1]
        for begin in range(0, len(tokens), _SCORED_ROWS):
            part = tokens[: begin + _SCORED_ROWS]
            if prompt.covers(begin, len(part)):
                continue

            def verify(logits: Floats, _: Floats, end: int = len(part)) -> None:
                prompt.record(end, logits)

            rows = len(part) - begin
            self._queue(session, Job(session.id, session.slot, part, rows=rows, verify=verify))

    def queue_window(
        self,
        session: SessionState,
        window_state: WindowState,
        protocol: SpeculationProtocol[Any],
        sampling_params: SamplingParams,
    ) -> None:
        """Queue a job that verifies a window."""
        self._requeue_prompt_scoring(session)
        session.window_state, draft = window_state, window_state.draft
        # [committed + pending + n]
        tokens = np.concatenate([session.committed.ids, draft.pending, draft.ids])
        text = tokens[: len(tokens) - len(draft.ids)]
        verify = partial(
            _verify_window,
            protocol,
            draft,
            sampling_params,
            text,
            session.logits_processor,
            session.logprobs,
        )
        rows = len(draft.ids) + 1
        job = Job(session.id, session.slot, tokens, rows, verify, draft)
        job.temperature = sampling_params.sampling.temperature
        self._queue(session, job)

    def queue_stream_token(self, session: SessionState) -> None:
        """Queue a job for the stream's next token, if more tokens are requested.

        The session's hints are attached to the job when its pass starts.
        """
        stream, sampling_params, length = (
            session.stream,
            session.sampling_params,
            len(session.committed),
        )
        if stream is None or sampling_params is None:
            return
        if stream.remaining <= 0 or length >= self._context:
            session.stream = None
            return
        self._requeue_prompt_scoring(session)
        tokens = session.committed.ids.copy()
        verify = partial(
            _verify_stream, sampling_params, tokens, session.logits_processor, session.logprobs, ()
        )
        job = Job(session.id, session.slot, tokens, rows=1, verify=verify)
        job.temperature = sampling_params.sampling.temperature
        if session.hints is not None:
            job.hints = _StreamHints(
                session, session.hints, sampling_params, self._draft_cost, self._context
            )
        self._queue(session, job)

    def _requeue_prompt_scoring(self, session: SessionState) -> None:
        """Queue the prompt's parts that have no log-probabilities because a pass failed."""
        prompt = session.prompt_logprobs
        if prompt is not None and not session.jobs and prompt.start == len(session.committed):
            self.queue_prompt_scoring(session, prompt)

    def send_tokens(
        self,
        session: SessionState,
        start: int,
        ids: Sequence[int],
        times: m.Times,
        attached: AttachedHints = NO_HINTS,
        accepted: int = 0,
        logprobs: m.Buffer | None = None,
    ) -> int:
        """Send a stream's tokens from position ``start`` on; return the bytes of the frames.

        attached: drafts of the pass that computed the tokens. accepted: number of accepted drafts.
        logprobs: frame of the tokens' log-probabilities, if requested.
        """
        assert session.stream is not None
        tokens = m.Tokens(
            session=session.id,
            generation=session.generation,
            start=start,
            times=times,
            source=attached.budget.name if attached.budget is not None else "",
            drafted=len(attached.ids),
            accepted=accepted,
        )
        frame = encode_ids(np.asarray(ids, dtype=np.uint32), self._vocab)
        extra = () if logprobs is None else (logprobs,)
        return self.send_with_prompt_logprobs(
            session, session.stream.client, tokens, (frame, *extra)
        )

    def send_with_prompt_logprobs(
        self,
        session: SessionState,
        client: bytes,
        reply: m.Verdict | m.Tokens,
        frames: Sequence[m.Buffer],
    ) -> int:
        """Send a reply, with the prompt's log-probabilities if due; return the bytes of the frames.

        The log-probabilities are sent once, with the first reply of the generation. They are sent
        again only if sending failed, or if the device retries over a new connection.
        """
        prompt_logprobs = session.prompt_logprobs
        if (
            prompt_logprobs is None
            or prompt_logprobs.start != reply.start
            or prompt_logprobs.sent_to == client
        ):
            self._send(client, reply, frames)
        else:
            frames = (*frames, prompt_logprobs.frame)
            if self._send(client, reply, frames):
                prompt_logprobs.sent_to = client
        return sum(map(len, frames))

    def stop(self, session: SessionState) -> None:
        """Cancel the session's jobs, but keep its committed tokens."""
        session.cancel_jobs()
        session.stream = None
        if session.hints is not None:
            session.hints.set_requested_end(0)
        if session.window_state is not None and session.window_state.verdict is None:
            session.window_state = None

    def finish(self, session: SessionState, job: Job) -> None:
        """Apply a finished job to its session and send the reply."""
        session.jobs.remove(job)
        if job.error is not None:
            self._fail(session, job.error)
        elif job.decision is None:
            return  # the job has read a part of a prompt
        elif isinstance(job.decision, StatesNeeded):
            self._request_states(session, job, job.decision)
        elif session.stream is not None:
            self._finish_stream_pass(session, session.stream, job, job.decision)
        elif session.window_state is not None:
            self._finish_window(
                session,
                session.window_state,
                _times(job, session.window_state.received_ns),
                job.decision,
            )

    def _queue(self, session: SessionState, job: Job) -> None:
        job.owner = session.owner
        job.expected_cpu_s = session.verify_cpu_s if job.verify is not None else 0.0
        session.jobs.append(job)
        self._submit(job)

    def _request_states(self, session: SessionState, job: Job, states_needed: StatesNeeded) -> None:
        """Request the drafter's hidden states that the decision on a window needs."""
        window_state = session.window_state
        if window_state is None:
            return
        window_state.states_needed, window_state.reply_frames = states_needed, states_needed.frames
        window_state.states_request = m.StatesRequest(
            session=session.id,
            generation=session.generation,
            start=window_state.start,
            times=_times(job, window_state.received_ns),
        )
        self._send(window_state.client, window_state.states_request, window_state.reply_frames)

    def verify_with_states(
        self, session: SessionState, frames: Sequence[m.Buffer], received_ns: int
    ) -> None:
        """Decide on a window with the hidden states that the device sent, without another pass."""
        window_state, protocol = session.window_state, session.protocol
        assert window_state is not None
        assert window_state.states_needed is not None
        assert protocol is not None
        decision = protocol.verify_with_states(
            window_state.draft, window_state.states_needed, frames
        )
        window_state.states_needed = None
        if session.logprobs is not None:
            session.logprobs.record_decision(decision)
        held_ns = time.monotonic_ns() - received_ns
        times = m.Times(received_ns=received_ns, held_ns=held_ns, queue_ns=0, verify_ns=held_ns)
        self._finish_window(session, window_state, times, decision)

    def _finish_window(
        self, session: SessionState, window_state: WindowState, times: m.Times, decision: Decision
    ) -> None:
        verdict = m.Verdict(
            session=session.id,
            generation=session.generation,
            start=window_state.start,
            accepted=decision.accepted,
            token=decision.token,
            times=times,
            notes=list(decision.notes),
        )
        frames = [*decision.frames]
        if session.logprobs is not None:
            frames.append(session.logprobs.commit())
        # send the verdict before the bookkeeping, since the device waits for it
        self.send_with_prompt_logprobs(session, window_state.client, verdict, frames)
        draft = window_state.draft
        window_state.set_verdict(verdict, frames)
        accepted = [int(draft.ids[node - 1]) for node in draft.path(decision.accepted)]
        token = [] if decision.token is None else [decision.token]
        session.committed.extend([*draft.pending.tolist(), *accepted, *token])
        self._draft_cost.record_tokens(len(accepted) + 1)
        session.awaits_pending = not token
        if session.protocol is not None:
            spent = (
                times if window_state.states_request is None else window_state.states_request.times
            )
            self._metrics.record_window(
                session.protocol,
                len(draft.ids),
                len(accepted),
                decision.notes,
                spent.queue_ns * 1e-9,
                spent.verify_ns * 1e-9,
            )

    def _finish_stream_pass(
        self, session: SessionState, stream: Stream, job: Job, decision: Decision
    ) -> None:
        start, token = len(session.committed), decision.token
        assert token is not None  # `_verify_stream` always samples a token
        drafts = job.tokens[start : start + decision.accepted].tolist()
        # the device may have lowered its request during the pass; one token is always committed
        ids = _cut_at_end(self._ends, [*drafts, token])[: max(1, stream.remaining)]
        session.committed.extend(ids)
        session.ended = ids[-1] in self._ends
        stream.remaining = 0 if session.ended else stream.remaining - len(ids)
        self._metrics.streamed += len(ids)
        self._draft_cost.record_tokens(len(ids))
        attached, accepted = NO_HINTS, min(decision.accepted, len(ids))
        if session.hints is not None:
            attached = session.hints.record_pass(ids, accepted)
            self._metrics.record_hints(attached, accepted)
        logprobs = None if session.logprobs is None else session.logprobs.commit(len(ids))
        times = _times(job, stream.received_ns)
        self._metrics.record_times(times.queue_ns * 1e-9, times.verify_ns * 1e-9)
        self.send_tokens(session, start, ids, times, attached, accepted, logprobs)
        stream.received_ns = time.monotonic_ns()
        self.queue_stream_token(session)

    def _fail(self, session: SessionState, error: Exception) -> None:
        """Cancel the session's jobs and send the error of a failed pass; the device may retry."""
        if not (isinstance(error, PilotfishError) and is_client_error(error)):
            error = InternalError("The target failed in this round; see the edge's log.")
        waiting = session.window_state or session.stream
        start = len(session.committed)
        # also cancels the session's other jobs, since the device repeats the round
        self.stop(session)
        if waiting is not None:
            failure = m.Failure(
                code=error.code,
                message=str(error)[:1024],
                session=session.id,
                generation=session.generation,
                start=start,
            )
            self._send(waiting.client, failure, ())


class _StreamHints:
    """Hints of a stream's next pass, in the form that the scheduler attaches to a job."""

    def __init__(
        self,
        session: SessionState,
        hints: HintSources,
        sampling_params: SamplingParams,
        draft_cost: DraftCost,
        context: int,
    ) -> None:
        self._session, self._hints, self._sampling_params = session, hints, sampling_params
        self._draft_cost, self._context = draft_cost, context

    @property
    def tokens_per_pass(self) -> float:
        return self._hints.tokens_per_pass

    def propose(self) -> Sequence[float]:
        stream, length = self._session.stream, len(self._session.committed)
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
        session = self._session
        job.verify = partial(
            _verify_stream,
            self._sampling_params,
            text,
            session.logits_processor,
            session.logprobs,
            drafts,
        )


def _verify_window(
    protocol: SpeculationProtocol[Any],
    draft: Draft,
    sampling_params: SamplingParams,
    text: Ids,
    logits_processor: LogitsProcessor | None,
    logprobs: Logprobs | None,
    logits: Floats,
    hidden: Floats,
) -> Decision | StatesNeeded:
    dead: Sequence[int] = ()
    if logits_processor is not None:
        dead = _process_logits(
            logits_processor, logits, text, node_paths(draft.ids.tolist(), draft.parents)
        )
    decision = protocol.verify(draft, logits, sampling_params, round_start=len(text), hidden=hidden)
    if dead:
        _expect_no_dead_end(draft, decision, dead)
    if logprobs is not None:
        logprobs.record(draft, logits, decision)
    return decision


def _expect_no_dead_end(
    draft: Draft, decision: Decision | StatesNeeded, dead: Sequence[int]
) -> None:
    """Raise `BadGrammarError` if the decision uses a dead end, a row that no token may follow."""
    # before a head's decision any row may still be used
    on_path = {0, *draft.path(decision.accepted)} if isinstance(decision, Decision) else {*dead}
    if on_path.intersection(dead):
        raise BadGrammarError(DEAD_END)


def _process_logits(
    logits_processor: LogitsProcessor, logits: Floats, text: Ids, paths: Sequence[Sequence[int]]
) -> Sequence[int]:
    try:
        return logits_processor.process(logits, text, paths)
    except GrammarBusyError as error:
        raise BusyError(str(error)) from error
    except GrammarError as error:
        raise BadGrammarError(str(error)) from error


def _verify_stream(
    sampling_params: SamplingParams,
    text: Ids,
    logits_processor: LogitsProcessor | None,
    logprobs: Logprobs | None,
    drafts: Sequence[int],
    logits: Floats,
    hidden: Floats,
) -> Decision:
    dead: Sequence[int] = ()
    if logits_processor is not None:
        dead = _process_logits(logits_processor, logits, text, node_paths(drafts, None))
    position = len(text)
    decision = Decision(
        *count_agreed(
            drafts,
            lambda index: choose(logits[index], sampling_params, position + index, Purpose.TARGET),
        )
    )
    if dead and min(dead) <= decision.accepted:
        raise BadGrammarError(DEAD_END)
    if logprobs is not None:
        logprobs.record_stream(drafts, logits, decision)
    return decision


def _cut_at_end(ends: Collection[int], ids: list[int]) -> list[int]:
    """Return the ids up to the first end token, with that token."""
    end = next((at for at, id in enumerate(ids) if id in ends), len(ids))
    return ids[: end + 1]


def _times(job: Job, received_ns: int) -> m.Times:
    return m.Times(
        received_ns=received_ns,
        held_ns=time.monotonic_ns() - received_ns,
        queue_ns=max(0, job.started_ns - job.queued_ns),
        verify_ns=job.done_ns - job.started_ns,
    )
