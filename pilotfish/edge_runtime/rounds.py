"""Turn the sessions' requests into jobs, and finished jobs into replies.

Jobs read prompts, verify windows and generate streams. A finished job updates its session, and the
device gets its reply.
"""

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from pilotfish.base.errors import BadGrammarError, BusyError, InternalError, PilotfishError
from pilotfish.edge_runtime.faults import is_the_requests
from pilotfish.edge_runtime.hints import NOTHING, Hints, Taken
from pilotfish.edge_runtime.logprobs import Logprobs, PromptLogprobs
from pilotfish.edge_runtime.price import Price
from pilotfish.edge_runtime.scheduler import Job
from pilotfish.edge_runtime.sessions import EdgeRound, SessionState, Stream
from pilotfish.edge_runtime.tally import Tally
from pilotfish.engines.constraint import DEAD_END
from pilotfish.engines.errors import GrammarBusyError, GrammarError
from pilotfish.speculation.coupling import count_agreed
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.randomness import Purpose
from pilotfish.speculation.shaping import LogitsProcessor, node_paths
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
from pilotfish.wire.protocols.exchange import Ids

_SCORED = 48  # rows of a pass over a prompt that tells log-probabilities; wider than a window's
Send = Callable[[bytes, m.Reply, Sequence[m.Buffer]], bool]  # whether it was taken
Submit = Callable[[Job], None]


class Rounds:
    """The sessions' work at the target. ends: the target's end tokens; context: its limit."""

    def __init__(
        self,
        submit: Submit,
        send: Send,
        tally: Tally,
        *,
        vocab_size: int,
        context: int,
        ends: Collection[int],
        price: Price,
    ) -> None:
        self._submit = submit
        self._price = price
        self._send = send
        self._tally = tally
        self._vocab = vocab_size
        self._context = context
        self._ends = frozenset(ends)

    def read(self, session: SessionState) -> None:
        """Queue all committed tokens but the last: the prompt is read while the device drafts."""
        tokens = session.committed.ids[:-1].copy()  # the committed tokens may change meanwhile
        self._queue(session, Job(session.id, session.slot, tokens, rows=0, rule=None))

    def score(self, session: SessionState, prompt: PromptLogprobs) -> None:
        """Queue the prompt but its last token, to tell how likely each next one was.

        Of what was told before a pass failed, nothing.
        """
        tokens = prompt.ids[:-1]
        for begin in range(0, len(tokens), _SCORED):
            part = tokens[: begin + _SCORED]
            if prompt.has_told(begin, len(part)):
                continue

            def rule(logits: Floats, _: Floats, end: int = len(part)) -> None:
                prompt.note(end, logits)

            rows = len(part) - begin
            self._queue(session, Job(session.id, session.slot, part, rows=rows, rule=rule))

    def verify(
        self,
        session: SessionState,
        round_: EdgeRound,
        exchange: SpeculationProtocol[Any],
        law: SamplingParams,
    ) -> None:
        """Queue a window."""
        self._score_again(session)
        session.round, draft = round_, round_.draft
        # [committed + pending + n]
        tokens = np.concatenate([session.committed.ids, draft.pending, draft.ids])
        text = tokens[: len(tokens) - len(draft.ids)]
        rule = partial(_rule, exchange, draft, law, text, session.shaper, session.logprobs)
        rows = len(draft.ids) + 1
        job = Job(session.id, session.slot, tokens, rows, rule, draft)
        job.temperature = law.sampling.temperature
        self._queue(session, job)

    def stream(self, session: SessionState) -> None:
        """Queue the stream's next token, if more are wanted; hints come to it at its pass."""
        stream, law, length = session.stream, session.law, len(session.committed)
        if stream is None or law is None:
            return
        if stream.remaining <= 0 or length >= self._context:
            session.stream = None
            return
        self._score_again(session)
        tokens = session.committed.ids.copy()
        rule = partial(_stream_rule, law, tokens, session.shaper, session.logprobs, ())
        job = Job(session.id, session.slot, tokens, rows=1, rule=rule)
        job.temperature = law.sampling.temperature
        if session.hints is not None:
            job.rider = _HintRider(session, session.hints, law, self._price, self._context)
        self._queue(session, job)

    def _score_again(self, session: SessionState) -> None:
        """Queue what of the prompt a failed pass has left untold."""
        prompt = session.prompt_logprobs
        if prompt is not None and not session.jobs and prompt.start == len(session.committed):
            self.score(session, prompt)

    def send_tokens(
        self,
        session: SessionState,
        start: int,
        ids: Sequence[int],
        times: m.Times,
        taken: Taken = NOTHING,
        accepted: int = 0,
        logprobs: m.Buffer | None = None,
    ) -> int:
        """Send tokens of a stream, from position ``start`` on; returns the bytes of their frames.

        taken: the drafts of their pass. logprobs: their frame, if they were asked for.
        """
        assert session.stream is not None
        tokens = m.Tokens(
            session=session.id,
            generation=session.generation,
            start=start,
            times=times,
            source=taken.account.name if taken.account is not None else "",
            drafted=len(taken.ids),
            accepted=accepted,
        )
        frame = encode_ids(np.asarray(ids, dtype=np.uint32), self._vocab)
        told = () if logprobs is None else (logprobs,)
        return self.send_telling(session, session.stream.client, tokens, (frame, *told))

    def send_telling(
        self,
        session: SessionState,
        client: bytes,
        reply: m.Verdict | m.Tokens,
        frames: Sequence[m.Buffer],
    ) -> int:
        """Send a reply, with the prompt's log-probabilities if they are due; returns the bytes.

        They go with the first reply, once: again only over another connection, or if they were not
        taken. What was sent over the same one is on its way.
        """
        told = session.prompt_logprobs
        if told is None or told.start != reply.start or told.sent_to == client:
            self._send(client, reply, frames)
        else:
            frames = (*frames, told.frame)
            if self._send(client, reply, frames):
                told.sent_to = client
        return sum(map(len, frames))

    def stop(self, session: SessionState) -> None:
        """Cancel the session's jobs; keeps the committed tokens."""
        session.cancel_jobs()
        session.stream = None
        if session.hints is not None:
            session.hints.pulled(0)
        if session.round is not None and session.round.verdict is None:
            session.round = None

    def finish(self, session: SessionState, job: Job) -> None:
        """Apply a finished job and reply."""
        session.jobs.remove(job)
        if job.error is not None:
            self._fail(session, job.error)
        elif job.ruling is None:
            return  # a prompt has been read
        elif isinstance(job.ruling, StatesNeeded):
            self._inquire(session, job, job.ruling)
        elif session.stream is not None:
            self._streamed(session, session.stream, job, job.ruling)
        elif session.round is not None:
            self._verified(
                session, session.round, _times(job, session.round.received_ns), job.ruling
            )

    def _queue(self, session: SessionState, job: Job) -> None:
        job.owner = session.owner
        job.expected_s = session.rule_s if job.rule is not None else 0.0
        session.jobs.append(job)
        self._submit(job)

    def _inquire(self, session: SessionState, job: Job, wanted: StatesNeeded) -> None:
        """Ask the device for the hidden states needed to decide on its window."""
        round_ = session.round
        if round_ is None:
            return
        round_.wanted, round_.answer = wanted, wanted.frames
        round_.inquiry = m.StatesRequest(
            session=session.id,
            generation=session.generation,
            start=round_.start,
            times=_times(job, round_.received_ns),
        )
        self._send(round_.client, round_.inquiry, round_.answer)

    def resolve(self, session: SessionState, frames: Sequence[m.Buffer], received_ns: int) -> None:
        """Decide on a window by the states that the device sent, without another pass."""
        round_, exchange = session.round, session.exchange
        assert round_ is not None
        assert round_.wanted is not None
        assert exchange is not None
        ruling = exchange.verify_with_states(round_.draft, round_.wanted, frames)
        round_.wanted = None
        if session.logprobs is not None:
            session.logprobs.decided(ruling)
        held_ns = time.monotonic_ns() - received_ns
        times = m.Times(received_ns=received_ns, held_ns=held_ns, queue_ns=0, verify_ns=held_ns)
        self._verified(session, round_, times, ruling)

    def _verified(
        self, session: SessionState, round_: EdgeRound, times: m.Times, ruling: Decision
    ) -> None:
        verdict = m.Verdict(
            session=session.id,
            generation=session.generation,
            start=round_.start,
            accepted=ruling.accepted,
            token=ruling.token,
            times=times,
            notes=list(ruling.notes),
        )
        frames = [*ruling.frames]
        if session.logprobs is not None:
            frames.append(session.logprobs.commit())
        # first of all: the device waits for it
        self.send_telling(session, round_.client, verdict, frames)
        draft = round_.draft
        round_.settle(verdict, frames)
        accepted = [int(draft.ids[node - 1]) for node in draft.path(ruling.accepted)]
        token = [] if ruling.token is None else [ruling.token]
        session.committed.extend([*draft.pending.tolist(), *accepted, *token])
        self._price.committed(len(accepted) + 1)
        session.awaits_pending = not token
        if session.exchange is not None:
            spent = times if round_.inquiry is None else round_.inquiry.times
            self._tally.verdict(
                session.exchange,
                len(draft.ids),
                len(accepted),
                ruling.notes,
                spent.queue_ns * 1e-9,
                spent.verify_ns * 1e-9,
            )

    def _streamed(self, session: SessionState, stream: Stream, job: Job, ruling: Decision) -> None:
        start, token = len(session.committed), ruling.token
        assert token is not None  # a stream's rule always samples one
        drafts = job.tokens[start : start + ruling.accepted].tolist()
        # less may be asked for than when the pass began; its first token is committed nevertheless
        ids = _until(self._ends, [*drafts, token])[: max(1, stream.remaining)]
        session.committed.extend(ids)
        session.ended = ids[-1] in self._ends
        stream.remaining = 0 if session.ended else stream.remaining - len(ids)
        self._tally.streamed += len(ids)
        self._price.committed(len(ids))
        taken, accepted = NOTHING, min(ruling.accepted, len(ids))
        if session.hints is not None:
            taken = session.hints.landed(ids, accepted)
            self._tally.hinted(taken, accepted)
        told = None if session.logprobs is None else session.logprobs.commit(len(ids))
        times = _times(job, stream.received_ns)
        self._tally.pass_times(times.queue_ns * 1e-9, times.verify_ns * 1e-9)
        self.send_tokens(session, start, ids, times, taken, accepted, told)
        stream.received_ns = time.monotonic_ns()
        self.stream(session)

    def _fail(self, session: SessionState, error: Exception) -> None:
        """Send the error of a failed pass; the device may send the same round again."""
        if not (isinstance(error, PilotfishError) and is_the_requests(error)):
            error = InternalError("The target failed at this round; see the edge's log.")
        waiting = session.round or session.stream
        start = len(session.committed)
        self.stop(session)  # its other jobs too: the same round comes again
        if waiting is not None:
            failure = m.Failure(
                code=error.code,
                message=str(error)[:1024],
                session=session.id,
                generation=session.generation,
                start=start,
            )
            self._send(waiting.client, failure, ())


class _HintRider:
    """The hints of a stream's next pass."""

    def __init__(
        self, session: SessionState, hints: Hints, law: SamplingParams, price: Price, context: int
    ) -> None:
        self._session, self._hints, self._law = session, hints, law
        self._price, self._context = price, context

    @property
    def pace(self) -> float:
        return self._hints.pace

    def offer(self) -> Sequence[float]:
        stream, length = self._session.stream, len(self._session.committed)
        assert stream is not None
        most = min(stream.remaining, self._context - length) - 1
        return self._hints.offer(most, self._price.of_draft)

    def board(self, job: Job, count: int) -> None:
        drafts = self._hints.take(count)
        committed = self._session.committed.ids
        # [committed + drafts]
        job.tokens = np.concatenate([committed, np.array(drafts, np.uint32)])
        job.rows = 1 + len(drafts)
        text = job.tokens[: len(committed)]
        session = self._session
        job.rule = partial(_stream_rule, self._law, text, session.shaper, session.logprobs, drafts)


def _rule(
    exchange: SpeculationProtocol[Any],
    draft: Draft,
    law: SamplingParams,
    text: Ids,
    shaper: LogitsProcessor | None,
    logprobs: Logprobs | None,
    logits: Floats,
    hidden: Floats,
) -> Decision | StatesNeeded:
    dead: Sequence[int] = ()
    if shaper is not None:
        dead = _shape(shaper, logits, text, node_paths(draft.ids.tolist(), draft.parents))
    decided = exchange.verify(draft, logits, law, round_start=len(text), hidden=hidden)
    if dead:
        _expect_alive(draft, decided, dead)
    if logprobs is not None:
        logprobs.note(draft, logits, decided)
    return decided


def _expect_alive(draft: Draft, decided: Decision | StatesNeeded, dead: Sequence[int]) -> None:
    """Raise `BadGrammarError` if the decision goes by a row that nothing may follow."""
    # a decision head decides later, and may let any of them pass
    on_path = {0, *draft.path(decided.accepted)} if isinstance(decided, Decision) else {*dead}
    if on_path.intersection(dead):
        raise BadGrammarError(DEAD_END)


def _shape(
    shaper: LogitsProcessor, logits: Floats, text: Ids, paths: Sequence[Sequence[int]]
) -> Sequence[int]:
    try:
        return shaper.process(logits, text, paths)
    except GrammarBusyError as error:
        raise BusyError(str(error)) from error
    except GrammarError as error:
        raise BadGrammarError(str(error)) from error


def _stream_rule(
    law: SamplingParams,
    text: Ids,
    shaper: LogitsProcessor | None,
    logprobs: Logprobs | None,
    drafts: Sequence[int],
    logits: Floats,
    hidden: Floats,
) -> Decision:
    dead: Sequence[int] = ()
    if shaper is not None:
        dead = _shape(shaper, logits, text, node_paths(drafts, None))
    position = len(text)
    ruling = Decision(
        *count_agreed(
            drafts, lambda index: choose(logits[index], law, position + index, Purpose.TARGET)
        )
    )
    if dead and min(dead) <= ruling.accepted:
        raise BadGrammarError(DEAD_END)
    if logprobs is not None:
        logprobs.streamed(drafts, logits, ruling)
    return ruling


def _until(ends: Collection[int], ids: list[int]) -> list[int]:
    """Cut the ids behind the first end token."""
    end = next((at for at, id in enumerate(ids) if id in ends), len(ids))
    return ids[: end + 1]


def _times(job: Job, received_ns: int) -> m.Times:
    return m.Times(
        received_ns=received_ns,
        held_ns=time.monotonic_ns() - received_ns,
        queue_ns=max(0, job.started_ns - job.queued_ns),
        verify_ns=job.done_ns - job.started_ns,
    )
