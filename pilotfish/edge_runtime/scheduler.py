"""Batch the jobs of all sessions into target passes.

In:  jobs: "bring the target's slot to this sequence, compute its last rows, and verify them".
Out: the finished jobs, in the order in which their passes finish.

Windows of several devices share a pass. A long prompt is read in chunks, between the passes of the
windows; so it delays a window by at most one chunk. Jobs of one slot keep their order.

Owners share the target's time fairly (`fair_shares`). If windows of several owners wait, a pass
takes at most `CHUNK` tokens from each owner.

A local target computes one pass at a time. Other targets have several lanes, and stages that work
on different passes at the same time. Their passes start as soon as a lane has room, and waiting
jobs are spread over several passes.

A window that arrives just after the start of a pass waits for the whole pass. So the scheduler
records how soon each device sends its next window after a verdict, and delays a pass for devices
whose next window is expected soon, by at most a share of the pass's duration. It does not wait for
a device whose window is expected later, for a device that is alone, or if the next pass can start
before this one ends.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish.edge_runtime.client_errors import is_client_error, log_failure
from pilotfish.edge_runtime.draft_cost import DraftCost
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.fair_shares import FairShares
from pilotfish.edge_runtime.logits_processors import RowProcessor
from pilotfish.edge_runtime.targets.target import Scores, Target
from pilotfish.engines.engine import CHUNK, Work
from pilotfish.engines.language_model import Output
from pilotfish.speculation.distributions import Floats
from pilotfish.wire.protocols import Decision, Draft, StatesNeeded

_COSTLY_S = 0.01  # processor time (s) above which a verification is costly; one such job per pass
_POSTPONED_S = 0.02  # interval (s) between checks whether an owner still owes time
NARROW = 32  # upper limit of a session's tokens in a pass over windows; more count as a prompt
_PATIENCE = 0.125  # longest wait for devices that are due, as a share of a pass's duration
_LATE = 1.25  # time until a device counts as overdue, as a multiple of its last turnaround


class AttachableHints(Protocol):
    """Interface of drafts that may be attached to a job when its pass starts."""

    @property
    def tokens_per_pass(self) -> float:
        """Recent average of the session's tokens per pass."""

    def propose(self) -> Sequence[float]:
        """Return the path acceptances of the drafts that have arrived."""

    def attach(self, job: "Job", count: int) -> None:
        """Attach the first ``count`` drafts to the job: change its tokens, rows and ``verify``."""


@dataclass(eq=False, slots=True)
class Job:
    """What one session asks of the target; a long job takes several works.

    tokens: the whole sequence, u32 [n]; the slot may have cached a part of it. rows: number of last
    tokens that need logits. verify: function of the logits [rows, V] and hidden states [rows, d] of
    these tokens; it returns a decision, or a request for states, or None. A prefill has no
    function. draft: the window at the end of the sequence. owner: key of the session's client.
    temperature: sampling temperature in ``verify``. hints: drafts that may be attached. processor:
    processes the rows' logits in ``verify``, unless an ensemble's models do.
    """

    session: bytes
    slot: int
    tokens: NDArray[np.uint32]
    rows: int
    verify: Callable[[Floats, Floats], Decision | StatesNeeded | None] | None
    draft: Draft | None = None
    owner: bytes = b""
    temperature: float = 0.0
    hints: AttachableHints | None = None
    processor: RowProcessor | None = None
    work: Work = field(init=False)  # its work in the next pass or in the pass under way
    size: int = field(init=False)  # number of tokens that this work computes
    pass_ns: int = 0  # start of the pass with this work
    queued_ns: int = field(default_factory=time.monotonic_ns)
    started_ns: int = 0  # start of its first pass
    done_ns: int = 0
    verify_cpu_s: float = 0.0  # processor seconds that ``verify`` took
    expected_cpu_s: float = 0.0  # processor seconds that ``verify`` is expected to take
    decision: Decision | StatesNeeded | None = None
    error: Exception | None = None
    cancelled: bool = False
    omitted: NDArray[np.float64] | None = None  # `Output.omitted` of its rows


class Scheduler:
    """Chooses the jobs of each pass, and verifies them with the pass's logits.

    Used by the serving thread; any thread may call `submit` and cancel jobs. over_budget: function
    that returns whether an owner owes time of the serving thread; the windows of this owner wait.
    """

    def __init__(
        self,
        target: Target,
        clock: Callable[[], int] = time.monotonic_ns,
        metrics: EdgeMetrics | None = None,
        draft_cost: DraftCost | None = None,
    ) -> None:
        self.target = target
        self.draft_cost = draft_cost or DraftCost({})
        self._clock = clock
        self._metrics = metrics or EdgeMetrics()
        self.over_budget: Callable[[bytes], bool] = lambda owner: False
        self._postponed = False  # whether jobs wait for their owner's budget
        self._inbox: deque[Job] = deque()
        self._waiting: dict[int, deque[Job]] = {}  # slot → jobs; the first may be in a batch
        self._numbers = count()
        self._batches: dict[int, list[Job]] = {}  # number of a pass under way → its jobs
        self._computing: set[int] = set()  # slots of batches under way
        self._under_way = [0] * target.lanes  # number of batches under way in each lane
        self._sessions: dict[int, tuple[bytes, bytes]] = {}  # slot → owner and session
        self._answered_ns: dict[int, int] = {}  # slot → time of its last verdict
        self._turnaround_ns: dict[int, int] = {}  # slot → last time from a verdict to the next job
        # lane → duration of the last pass over windows; lane → end of the last pass
        self._pass_ns: dict[int, int] = {}
        self._free_ns: dict[int, int] = {}
        self._shares = FairShares()
        # lane → next job of each of its slots, as `wait_s` found them; {} after a change
        self._heads: Mapping[int, list[Job]] = {}
        self.passes = 0

    def submit(self, job: Job) -> None:
        """Queue a job; `finish_pass` returns the job, unless it is cancelled before its pass."""
        self._inbox.append(job)

    def wait_s(self) -> float | None:
        """Return the seconds to wait for more jobs before the next pass; None: no job waits."""
        self._read_inbox()
        self._heads = self._find_heads()
        if not self._heads:
            return _POSTPONED_S if self._postponed else None
        return self._next(self._heads)[0]

    def _next(self, heads: Mapping[int, Sequence[Job]]) -> tuple[float, int]:
        """Return the seconds that the next pass should wait, and its lane."""
        wait_s, _, lane = min(
            (self._lane_wait_s(lane, jobs[0]), self._priority(jobs[0]), lane)
            for lane, jobs in heads.items()
        )
        return wait_s, lane

    def _lane_wait_s(self, lane: int, first: Job) -> float:
        """Return the seconds that a lane's first job should wait for devices that are due."""
        if self.target.depth > 1 or not self._answered_ns:
            return 0.0
        now_ns = self._clock()
        due = [
            at
            for slot, answered_ns in self._answered_ns.items()
            if slot % self.target.lanes == lane
            and (at := answered_ns + int(_LATE * self._turnaround_ns.get(slot, 0))) > now_ns
        ]
        if not due:
            return 0.0
        since_ns = max(first.queued_ns, self._free_ns.get(lane, 0))
        limit_ns = since_ns + int(_PATIENCE * self._pass_ns.get(lane, 0))
        latest_ns = max((at for at in due if at <= limit_ns), default=now_ns)
        self._plan(first)
        return (latest_ns - now_ns) * 1e-9 if first.size <= NARROW else 0.0

    def next_batch(self, *, patient: bool = False) -> tuple[int, list[Job]] | None:
        """Choose the jobs of the next pass, and record its start.

        Return the pass's number and its jobs, or None if no pass can start. patient: whether to
        return None also while the pass should wait for devices that are due. If nothing has changed
        since `wait_s`, the heads that it found are not looked up again.
        """
        self._read_inbox()
        heads, self._heads = self._heads, {}
        if not heads or any(job.cancelled for jobs in heads.values() for job in jobs):
            heads = self._find_heads()
        if not heads:
            return None
        wait_s, lane = self._next(heads)
        if patient and wait_s > 0.0:
            return None
        jobs = self._choose(lane, heads[lane])
        now_ns = self._clock()
        for job in jobs:
            self._give_slot(job)
            if not self.target.model_logits:
                _state_options(job, self.target.vocab_size)
            self._computing.add(job.slot)
            job.pass_ns = now_ns
            job.started_ns = job.started_ns or now_ns
        self._shares.start_pass((job.owner for job in jobs), now_ns)
        self._under_way[lane] += 1
        number = next(self._numbers)
        self._batches[number] = jobs
        return number, jobs

    def _give_slot(self, job: Job) -> None:
        """Empty the job's slot if its tokens are another session's, so that nothing leaks to it.

        Without this, the time of a pass could tell an owner what another session has read.
        """
        if self._sessions.get(job.slot) != (job.owner, job.session):
            self.target.clear(job.slot)
            self._sessions[job.slot] = (job.owner, job.session)

    def _read_inbox(self) -> None:
        while self._inbox:
            job = self._inbox.popleft()
            if job.cancelled:
                continue
            self._heads = {}
            self._waiting.setdefault(job.slot, deque()).append(job)
            answered_ns = self._answered_ns.pop(job.slot, None)
            if answered_ns is not None:
                self._turnaround_ns[job.slot] = job.queued_ns - answered_ns

    def _find_heads(self) -> dict[int, list[Job]]:
        """Return lane → next job of each of its slots, by priority; drop cancelled jobs.

        Lanes without room for a pass are left out.
        """
        heads: dict[int, list[Job]] = {}
        self._postponed = False
        for slot, queue in list(self._waiting.items()):
            if slot in self._computing:
                continue
            while queue and queue[0].cancelled:
                queue.popleft()
            if not queue:
                del self._waiting[slot]
            elif queue[0].verify is not None and self.over_budget(queue[0].owner):
                self._postponed = True
            elif self._under_way[lane := slot % self.target.lanes] < self.target.depth:
                heads.setdefault(lane, []).append(queue[0])
        self._shares.update_least(job.owner for jobs in heads.values() for job in jobs)
        for jobs in heads.values():
            jobs.sort(key=self._priority)
        return heads

    def _choose(self, lane: int, heads: list[Job]) -> list[Job]:
        """Choose the first job of a lane and all jobs that fit into the same pass.

        If a lane computes several passes at once, the passes that can start now share the jobs
        evenly.
        """
        for job in heads:
            self._plan(job)
        if heads[0].size > NARROW:
            return heads[:1]
        windows = _limit_owner_tokens([job for job in heads if job.size <= NARROW])
        windows = _limit_costly(windows)
        passes = max(1, self.target.concurrent_passes - self._under_way[lane])
        windows = windows[: -(-len(windows) // passes)]
        self._attach_hints(windows)
        return windows

    def _attach_hints(self, jobs: Sequence[Job]) -> None:
        """Attach hints to jobs, as many as are worth their cost to all sessions of the pass."""
        proposals = [() if job.hints is None else job.hints.propose() for job in jobs]
        if not any(proposals):
            return
        tokens_per_pass = [1.0 if job.hints is None else job.hints.tokens_per_pass for job in jobs]
        positions = sum(job.size for job in jobs)
        counts = self.draft_cost.allocate(positions, proposals, tokens_per_pass)
        for job, drafts in zip(jobs, counts, strict=True):
            if job.hints is not None and drafts:
                job.hints.attach(job, drafts)
                self._plan(job)

    def _priority(self, job: Job) -> tuple[int, int, int]:
        """Return a job's sort key: its owner's priority, then its age."""
        return *self._shares.priority(job.owner), job.queued_ns

    def _plan(self, job: Job) -> None:
        """Set the job's work in the next pass: the whole job, or one chunk of a long prompt.

        Tokens that the slot has cached are not computed again. All rows of a job are computed in
        one pass, even if they are more than a chunk.
        """
        cached = 0
        if self._sessions.get(job.slot) == (job.owner, job.session):
            cached = self.target.cached(job.slot, job.tokens, job.rows)
        left, most = len(job.tokens) - cached, CHUNK * self.target.chunks_per_pass
        if left <= max(most, job.rows):
            parents = None if job.draft is None else job.draft.parents
            job.work = Work(job.slot, job.tokens, job.rows, parents, job.temperature)
            job.size = left
        else:
            job.size = min(most, left - job.rows)
            job.work = Work(job.slot, job.tokens[: cached + job.size], 0)

    def finish_pass(self, scores: Scores) -> list[Job]:
        """Verify the jobs that a pass has completed; return these jobs in order."""
        jobs = self._batches.pop(scores.number)
        self._heads = {}
        done = []
        if scores.error is not None:
            error = log_failure(scores.error, "a target pass failed")
            self._metrics.failed_passes += 1
            for job in jobs:
                job.error = error
                done.append(job)
        else:
            for job, output in zip(jobs, scores.outputs, strict=True):
                if len(job.work.tokens) == len(job.tokens):
                    _decide(job, output)
                    done.append(job)
                else:
                    job.queued_ns = self._clock()  # puts its next chunk after the waiting windows
        now_ns = self._clock()
        self._record_pass(jobs, now_ns)
        for job in done:
            job.done_ns = now_ns
            self._finish_job(job)
        return done

    def _record_pass(self, jobs: Sequence[Job], now_ns: int) -> None:
        """Record a finished pass's duration, and free its slots and lane."""
        self.passes += 1
        lane = jobs[0].slot % self.target.lanes
        self._free_ns[lane] = now_ns
        self._under_way[lane] -= 1
        took_ns = now_ns - jobs[0].pass_ns
        self._shares.charge([(job.owner, job.size) for job in jobs], took_ns)
        self._computing.difference_update(job.slot for job in jobs)
        tokens = sum(job.size for job in jobs)
        narrow = max(job.size for job in jobs) <= NARROW
        if narrow:
            self._pass_ns[lane] = took_ns
        # prompts are left out: a token of a prompt costs less than a draft
        if narrow and all(job.verify is not None for job in jobs):
            self.draft_cost.record_pass(tokens, took_ns * 1e-9)
        else:
            self.draft_cost.skip_pass()
        self._metrics.batch_sessions.add(len(jobs))
        self._metrics.pass_tokens.add(tokens)

    def _finish_job(self, job: Job) -> None:
        queue = self._waiting[job.slot]
        queue.popleft()
        if not queue:
            del self._waiting[job.slot]
            self._answered_ns[job.slot] = job.done_ns


def sum_omitted(omitted: NDArray[np.float64] | None, rows: Sequence[int]) -> float | None:
    """Sum what an ensemble left out of these rows of a job. omitted: `Job.omitted`."""
    # rounding can make a worker's retained mass a little more than 1
    return None if omitted is None else float(np.clip(omitted[[*rows]], 0.0, 1.0).sum())


def _state_options(job: Job, vocab: int) -> None:
    """Add to a job's work the options by which an ensemble's models process its rows."""
    if job.processor is not None and job.work.rows:
        begun_s = time.thread_time()
        job.work = job.work._replace(options=job.processor.state(vocab))
        job.verify_cpu_s += time.thread_time() - begun_s


def _decide(job: Job, output: Output) -> None:
    """Verify one job of a pass; an error affects only this job."""
    begun_s = time.thread_time()
    try:
        job.decision = None if job.verify is None else job.verify(output.logits, output.hidden)
        job.omitted = output.omitted
    except Exception as error:
        known = is_client_error(error)
        job.error = error if known else log_failure(error, "a verification failed")
    finally:
        job.verify_cpu_s += time.thread_time() - begun_s


def _limit_costly(jobs: list[Job]) -> list[Job]:
    """Keep at most one job with a costly verification, which delays all verdicts of the pass."""
    costly = [job for job in jobs if job.expected_cpu_s > _COSTLY_S]
    return [job for job in jobs if job not in costly[1:]]


def _limit_owner_tokens(windows: list[Job]) -> list[Job]:
    """Limit a pass with windows of several owners to `CHUNK` tokens of each owner."""
    if len({job.owner for job in windows}) == 1:
        return windows
    tokens: Counter[bytes] = Counter()
    chosen = []
    for job in windows:
        if tokens[job.owner] + job.size <= CHUNK:
            tokens[job.owner] += job.size
            chosen.append(job)
    return chosen
