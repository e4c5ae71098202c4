"""Windows: check a window, verify it with the target's logits, and reply with a verdict.

In:  a `Window` or `States` of a running generation. Out: a job for the scheduler; when the job is
     finished, a `Verdict`, or a `StatesRequest` if the decision needs hidden states of the drafter.

The last verdict is stored: a device that missed it sends the same window again.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import (
    BadGrammarError,
    ConflictError,
    DivergedError,
    MalformedError,
    TooLargeError,
)
from pilotfish.edge_runtime.draft_cost import DraftCost
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.generation import Generation, WindowState
from pilotfish.edge_runtime.logits_processors import RowProcessor
from pilotfish.edge_runtime.replies import Replies, job_times
from pilotfish.edge_runtime.scheduler import Job, sum_omitted
from pilotfish.edge_runtime.sessions import Session
from pilotfish.engines.constraint import DEAD_END
from pilotfish.engines.manifest import Manifest
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.logits_options import node_paths
from pilotfish.wire import messages as m
from pilotfish.wire.protocols import Decision, Draft, StatesNeeded
from pilotfish.wire.transport import Envelope


@dataclass(frozen=True, eq=False)
class WindowServer:
    """Serves the windows of all sessions. Used by the serving loop.

    manifest: the target's manifest. limits: the limits in the edge's `Welcome`.
    """

    replies: Replies
    metrics: EdgeMetrics
    draft_cost: DraftCost
    manifest: Manifest
    limits: m.Limits

    def serve_window(
        self,
        session: Session,
        generation: Generation,
        window: m.Window,
        envelope: Envelope,
        received_ns: int,
    ) -> None:
        """Check a window and queue its job; send its reply again if the window was repeated."""
        protocol = generation.protocol
        if protocol is None or protocol.streams:
            raise MalformedError("This generation streams tokens, so it accepts no windows.")
        last = generation.window_state
        if last is not None and last.start == window.start:
            self._retry(session, generation, last, window, envelope)
            return
        if last is not None and last.verdict is None:
            raise ConflictError(f"The window at position {last.start} is still being verified.")
        # check before the distributions are decoded, which costs more
        pending, drafted = protocol.count_tokens(envelope.frames, self.manifest.vocab_size)
        if pending != generation.awaits_pending:
            raise DivergedError(
                "The device must send a token that it sampled itself with the next window, and "
                "only with that window: begin again."
            )
        _expect_position(session, window.start - pending, window.hash)
        self._expect_room(session, pending, drafted)
        draft: Draft = protocol.decode_draft(envelope.frames, self.manifest.vocab_size)
        if len(draft.ids) > drafted:  # a tree may have more nodes than that
            self._expect_room(session, pending, len(draft.ids))
        generation.protocol = protocol.follow(draft)
        session.queue_prompt_scores(generation)  # if a pass over the prompt has failed
        generation.window_state = WindowState(
            envelope.client, window.start, envelope.frames, draft, received_ns
        )
        # [committed + pending + n]
        tokens = np.concatenate([session.committed.ids, draft.pending, draft.ids])
        text = tokens[: len(tokens) - len(draft.ids)]
        processor = None
        if generation.logits_processor is not None:
            paths = node_paths(draft.ids.tolist(), draft.parents)
            processor = RowProcessor(generation.logits_processor, text, paths)
        verify = partial(_verify, generation, draft, len(text), processor)
        session.queue_job(
            generation, tokens, len(draft.ids) + 1, verify, draft=draft, processor=processor
        )

    def _expect_room(self, session: Session, pending: int, drafted: int) -> None:
        if drafted > self.limits.window:
            raise TooLargeError(
                f"The window has {drafted} tokens; this edge accepts at most {self.limits.window}."
            )
        if len(session.committed) + pending + drafted + 1 > self.limits.context:
            raise TooLargeError(
                f"The session has {len(session.committed)} tokens, and the edge's context is "
                f"{self.limits.context} tokens: there is no room for a window of "
                f"{pending + drafted}."
            )

    def _retry(
        self,
        session: Session,
        generation: Generation,
        last: WindowState,
        window: m.Window,
        envelope: Envelope,
    ) -> None:
        """Answer a repeated window: send its reply again, or nothing while it is being verified."""
        if window.hash != session.committed.hash_at(last.committed_before):
            raise DivergedError(
                f"The edge holds other tokens before position {last.committed_before}: begin again."
            )
        if not last.matches(envelope.frames):
            raise ConflictError(f"Another window at position {last.start} was already verified.")
        last.client = envelope.client
        self._repeat(generation, last, envelope)

    def _repeat(self, generation: Generation, last: WindowState, envelope: Envelope) -> None:
        """Send the reply to a window again, if the window has a reply."""
        if last.verdict is None and last.states_request is None:
            return
        self.replies.expect_room(envelope)
        if last.verdict is not None:
            size = self.replies.send_result(
                generation, last.client, last.verdict, last.reply_frames
            )
            self.replies.charge(envelope, size)
        elif last.states_request is not None:
            self.replies.send_cheap(envelope, last.states_request, last.reply_frames)

    def serve_states(
        self,
        session: Session,
        generation: Generation,
        states: m.States,
        envelope: Envelope,
        received_ns: int,
    ) -> None:
        """Decide on a window with the requested hidden states, without another pass.

        If the window has been decided, its verdict is sent again.
        """
        last, protocol = generation.window_state, generation.protocol
        if last is None or last.start != states.start:
            raise DivergedError(
                f"The edge holds no window at position {states.start}: begin again."
            )
        if last.states_request is None:
            raise MalformedError("The edge did not request hidden states of this window.")
        last.client = envelope.client
        if last.verdict is not None:
            self._repeat(generation, last, envelope)
            return
        assert last.states_needed is not None
        assert protocol is not None
        decision = protocol.verify_with_states(last.draft, last.states_needed, envelope.frames)
        last.states_needed = None
        if generation.logprobs is not None:
            generation.logprobs.record_decision(decision)
        held_ns = time.monotonic_ns() - received_ns
        times = m.Times(received_ns=received_ns, held_ns=held_ns, queue_ns=0, verify_ns=held_ns)
        self._commit(session, generation, last, times, decision)

    def finish_job(
        self,
        session: Session,
        generation: Generation,
        job: Job,
        decision: Decision | StatesNeeded,
    ) -> None:
        """Send the verdict of a finished job and commit its tokens, or request states."""
        window_state = generation.window_state
        if window_state is None:
            return
        times = job_times(job, window_state.received_ns)
        if isinstance(decision, Decision):
            decision = _add_omitted(decision, window_state.draft, job.omitted)
            self._commit(session, generation, window_state, times, decision)
            return
        window_state.states_needed, window_state.reply_frames = decision, decision.frames
        window_state.states_request = m.StatesRequest(
            session=session.id,
            generation=generation.number,
            start=window_state.start,
            times=times,
        )
        self.replies.send(window_state.client, window_state.states_request, decision.frames)

    def _commit(
        self,
        session: Session,
        generation: Generation,
        window_state: WindowState,
        times: m.Times,
        decision: Decision,
    ) -> None:
        """Send the verdict of a decision, store it, and commit the accepted tokens."""
        verdict = m.Verdict(
            session=session.id,
            generation=generation.number,
            start=window_state.start,
            accepted=decision.accepted,
            token=decision.token,
            times=times,
            notes=list(decision.notes),
        )
        frames = [*decision.frames]
        if generation.logprobs is not None:
            frames.append(generation.logprobs.commit())
        # send the verdict before the bookkeeping, since the device waits for it
        self.replies.send_result(generation, window_state.client, verdict, frames)
        draft = window_state.draft
        window_state.set_verdict(verdict, frames)
        accepted = [int(draft.ids[node - 1]) for node in draft.path(decision.accepted)]
        token = [] if decision.token is None else [decision.token]
        session.committed.extend([*draft.pending.tolist(), *accepted, *token])
        self.draft_cost.record_tokens(len(accepted) + 1)
        generation.awaits_pending = not token
        if generation.protocol is not None:
            request = window_state.states_request
            spent = times if request is None else request.times
            self.metrics.record_window(
                generation.protocol,
                len(draft.ids),
                len(accepted),
                decision.notes,
                spent.queue_ns * 1e-9,
                spent.verify_ns * 1e-9,
            )


def _expect_position(session: Session, start: int, digest: bytes) -> None:
    length = len(session.committed)
    if start != length or digest != session.committed.hash:
        raise DivergedError(
            f"The round starts at {start}, but the edge holds {length} tokens"
            f"{'' if start != length else ' that differ from the device’s'}: begin again."
        )


def _verify(
    generation: Generation,
    draft: Draft,
    start: int,
    processor: RowProcessor | None,
    logits: Floats,
    hidden: Floats,
) -> Decision | StatesNeeded:
    """Decide on a window.

    start: number of tokens before the draft. logits, hidden: rows of root and draft.
    """
    protocol = generation.protocol
    assert protocol is not None
    dead = () if processor is None else processor.process(logits)
    decision = protocol.verify(
        draft, logits, generation.sampling_params, round_start=start, hidden=hidden
    )
    if dead:
        _expect_no_dead_end(draft, decision, dead)
    if generation.logprobs is not None:
        generation.logprobs.record(draft, logits, decision)
    return decision


def _add_omitted(decision: Decision, draft: Draft, omitted: NDArray[np.float64] | None) -> Decision:
    """Add the note `OMITTED_MASS` to a decision by an ensemble. omitted: `Output.omitted`."""
    path = draft.path(decision.accepted)
    bound = sum_omitted(omitted, [0, *path][: min(draft.depth, len(path) + 1)])
    return decision if bound is None else decision._replace(notes=(*decision.notes, bound))


def _expect_no_dead_end(
    draft: Draft, decision: Decision | StatesNeeded, dead: Sequence[int]
) -> None:
    """Raise `BadGrammarError` if the decision uses a dead end, a row that no token may follow."""
    # before a head's decision any row may still be used
    on_path = {0, *draft.path(decision.accepted)} if isinstance(decision, Decision) else {*dead}
    if on_path.intersection(dead):
        raise BadGrammarError(DEAD_END)
