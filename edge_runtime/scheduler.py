"""Batches the work of all sessions into target passes.

In:  jobs: "make the target hold this sequence, show me what it makes of its last rows, and rule".
Out: the same jobs, done, in the order of the passes.

One pass takes the oldest job's next piece and every other session's piece of like width: the
windows of several devices share a pass, and a long prompt advances in chunks between them, so that
it holds nobody up for longer than one chunk. Jobs of one slot never overtake each other.

A pass that leaves without a device that was about to arrive costs it a whole pass. So the scheduler
remembers how soon each device came back after its last verdict, and waits for those that are due
within a share of a pass. A device that is alone, or far from ready, is waited for by nobody.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_runtime.tally import Tally
from engines.decoder import Decoder, Output, Pass
from speculation.distributions import Floats
from wire.protocols import Draft, Ruling, Wanted

_log = logging.getLogger("pilotfish.edge")

CHUNK = 128  # tokens of a prompt per pass
NARROW = 32  # a pass of at most so many tokens a session is a window's, not a prompt's
_PATIENCE = 0.125  # of a pass: how long the jobs at hand wait for devices that are due
_OWNERS = 1024  # whose last pass is remembered
_LATE = 1.25  # times its last turnaround, and a device is not waited for any more


@dataclass(eq=False)
class Job:
    """Work for the target on the slot of one session; ``session`` names whose.

    tokens: the whole sequence, u32 [n], of which the slot may hold a part already.
    rule: turns logits [rows, V] and hidden states [rows, d] of the last ``rows`` tokens into a
    ruling, or says what is needed for one; None for a prefill.
    draft: the window that ends the sequence; if it is a tree, the slot keeps the accepted path.
    owner: whose session it is.
    """

    session: bytes
    slot: int
    tokens: NDArray[np.uint32]
    rows: int
    rule: Callable[[Floats, Floats], Ruling | Wanted] | None
    draft: Draft | None = None
    owner: bytes = b""
    queued_ns: int = field(default_factory=time.monotonic_ns)
    started_ns: int = 0
    done_ns: int = 0
    ruling: Ruling | Wanted | None = None
    error: Exception | None = None
    cancelled: bool = False


class Piece(NamedTuple):
    """One pass of a job: it goes on after ``base`` tokens of its slot, with these i64 [S].

    The last ``nodes`` of them are a tree; its parents, and the chain before it, are i64 [S].
    """

    base: int
    tokens: NDArray[np.int64]
    nodes: int = 0
    parents: NDArray[np.int64] | None = None


class Scheduler:
    """Owns the target's decoder. One owner, except that `submit` may be called while it runs."""

    def __init__(
        self,
        decoder: Decoder,
        clock: Callable[[], int] = time.monotonic_ns,
        tally: Tally | None = None,
    ) -> None:
        self._decoder = decoder
        self._clock = clock
        self._tally = tally or Tally()
        self._inbox: deque[Job] = deque()
        self._waiting: dict[int, deque[Job]] = {}  # by slot
        self._held: dict[int, tuple[bytes, NDArray[np.uint32]]] = {}  # whose tokens a slot holds
        self._answered_ns: dict[int, int] = {}  # when a slot's last window was decided on
        self._turnaround_ns: dict[int, int] = {}  # from there to the slot's next job, last time
        self._pass_ns = 0  # how long the last pass over windows took
        self._free_ns = 0  # when the last pass ended
        self._served_ns: dict[bytes, int] = {}  # when an owner was last in a pass, oldest first
        self.passes = 0

    def submit(self, job: Job) -> None:
        """Queue a job; `run` hands it back when it is done, unless it was cancelled before."""
        self._inbox.append(job)

    def wait_s(self) -> float | None:
        """Seconds for which it pays to wait for more jobs before the next pass; None: no job."""
        self._take_in()
        if not self._waiting:
            return None
        now_ns = self._clock()
        due = [
            at
            for slot, answered_ns in self._answered_ns.items()
            if (at := answered_ns + int(_LATE * self._turnaround_ns.get(slot, 0))) > now_ns
        ]
        if not due:
            return 0.0
        first = min((queue[0] for queue in self._waiting.values()), key=self._turn)
        limit_ns = max(first.queued_ns, self._free_ns) + int(_PATIENCE * self._pass_ns)
        latest_ns = max((at for at in due if at <= limit_ns), default=now_ns)
        return (latest_ns - now_ns) * 1e-9 if _is_narrow(self._piece(first)) else 0.0

    def run(self) -> list[Job]:
        """Make one pass, if there is a job, and return the jobs that it completed."""
        self._take_in()
        batch = self._next_batch()
        return self._pass(batch) if batch else []

    def _take_in(self) -> None:
        while self._inbox:
            job = self._inbox.popleft()
            if job.cancelled:
                continue
            self._waiting.setdefault(job.slot, deque()).append(job)
            answered_ns = self._answered_ns.pop(job.slot, None)
            if answered_ns is not None:
                self._turnaround_ns[job.slot] = job.queued_ns - answered_ns

    def _next_batch(self) -> list[tuple[Job, Piece]]:
        """The jobs of the next pass: the one whose turn it is and all that fit beside it."""
        for slot in list(self._waiting):
            queue = self._waiting[slot]
            while queue and queue[0].cancelled:
                queue.popleft()
            if not queue:
                del self._waiting[slot]
        heads = sorted((queue[0] for queue in self._waiting.values()), key=self._turn)
        batch = [(job, self._piece(job)) for job in heads]
        if batch and not _is_narrow(batch[0][1]):
            return batch[:1]
        return [(job, piece) for job, piece in batch if _is_narrow(piece)]

    def _turn(self, job: Job) -> tuple[int, int]:
        """Jobs go in this order: by when their owner was in a pass last, then by their age."""
        return self._served_ns.get(job.owner, 0), job.queued_ns

    def _piece(self, job: Job) -> Piece:
        """What the job's next pass does.

        What the slot holds of the same session and sequence is not run again. The rows that are
        wanted come in one pass, however long.
        """
        whose, held = self._held.get(job.slot, (b"", job.tokens[:0]))
        base = 0
        if whose == job.session:
            shared = min(len(held), len(job.tokens) - max(job.rows, 1))
            differing = (held[:shared] != job.tokens[:shared]).nonzero()[0]
            base = int(differing[0]) if len(differing) else shared
        left = len(job.tokens) - base
        size = left if left <= max(CHUNK, job.rows) else min(CHUNK, left - job.rows)
        tokens = job.tokens[base : base + size].astype(np.int64)
        parents = job.draft.parents if job.draft is not None and size == left else None
        if parents is None:
            return Piece(base, tokens)
        # the tree hangs on the last token of the chain before it
        chain = size - len(parents)
        parents = np.concatenate([np.arange(-1, chain - 1), parents + chain])
        return Piece(base, tokens, size - chain, parents)

    def _pass(self, batch: list[tuple[Job, Piece]]) -> list[Job]:
        started_ns = self._clock()
        passes = []
        for job, piece in batch:
            self._decoder.rollback(job.slot, piece.base)
            self._held[job.slot] = (job.session, job.tokens[: piece.base])
            job.started_ns = job.started_ns or started_ns
            rows = job.rows if piece.base + len(piece.tokens) == len(job.tokens) else 0
            passes.append(
                Pass(slot=job.slot, tokens=piece.tokens, rows=rows, parents=piece.parents)
            )
        done = []
        try:
            outputs = self._decoder.forward(passes)
        except Exception as error:
            _log.exception("a target pass failed")
            self._tally.failed_passes += 1
            for job, _ in batch:
                job.error = error
                done.append(job)
        else:
            for (job, piece), output in zip(batch, outputs, strict=True):
                end = piece.base + len(piece.tokens)
                # of a tree nothing is held as long as no path is chosen
                self._held[job.slot] = (job.session, job.tokens[: end - piece.nodes])
                if end == len(job.tokens):
                    self._settle(job, piece, output)
                    done.append(job)
                else:
                    job.queued_ns = self._clock()  # behind the windows that wait
        self.passes += 1
        self._free_ns = self._clock()
        self._tally.batch.add(len(batch))
        self._tally.pass_tokens.add(sum(len(piece.tokens) for _, piece in batch))
        if _is_narrow(batch[0][1]):
            self._pass_ns = self._free_ns - started_ns
        for job in done:
            self._hand_back(job)
        self._remember({job.owner for job, _ in batch})
        return done

    def _remember(self, owners: set[bytes]) -> None:
        """Note who was in the pass."""
        for owner in owners:
            self._served_ns.pop(owner, None)
            self._served_ns[owner] = self._free_ns
        while len(self._served_ns) > _OWNERS:
            del self._served_ns[next(iter(self._served_ns))]

    def _settle(self, job: Job, piece: Piece, output: Output) -> None:
        """Decide on a job; if that fails, the other jobs of the pass are none the worse."""
        try:
            job.ruling = None if job.rule is None else job.rule(output.logits, output.hidden)
            if piece.nodes and isinstance(job.ruling, Ruling):
                self._keep_path(job, piece, job.ruling)
        except Exception as error:
            _log.exception("a rule failed")
            job.error = error
            self._decoder.rollback(job.slot, len(self._held[job.slot][1]))

    def _keep_path(self, job: Job, piece: Piece, ruling: Ruling) -> None:
        """Of a tree, the slot keeps the chain before it and the accepted path."""
        assert job.draft is not None
        chain = len(piece.tokens) - piece.nodes
        path = [*range(chain), *(chain + node - 1 for node in job.draft.path(ruling.accepted))]
        self._decoder.keep(job.slot, path)
        kept = piece.tokens[path].astype(np.uint32)
        self._held[job.slot] = (job.session, np.concatenate([job.tokens[: piece.base], kept]))

    def _hand_back(self, job: Job) -> None:
        queue = self._waiting[job.slot]
        queue.popleft()
        if not queue:
            del self._waiting[job.slot]
            self._answered_ns[job.slot] = self._free_ns
        job.done_ns = self._free_ns


def _is_narrow(piece: Piece) -> bool:
    return len(piece.tokens) <= NARROW
