"""Batches the work of all sessions into target passes, in a thread of its own.

In:  jobs: "make the target hold this sequence, show me the logits of its last rows, and rule".
Out: the same jobs, done, in the order of the passes.

One pass takes the oldest job's next piece and every other session's piece of like width: the
windows of several devices share a pass, and a long prompt advances in chunks between them, so that
it holds nobody up for longer than one chunk. Jobs of one slot never overtake each other.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from engines.decoder import Decoder, Pass
from speculation.distributions import Floats
from wire.protocols import Ruling

_log = logging.getLogger("pilotfish.edge")

CHUNK = 128  # tokens of a prompt per pass
NARROW = 32  # a pass of at most so many tokens a session is a window's, not a prompt's
_LINGER_SHARE = 0.1  # of the last pass: how long to wait for the sessions that were in it
_LINGER_LIMIT_S = 0.003


@dataclass(eq=False)
class Job:
    """Work for the target on the slot of one session; ``session`` names whose.

    tokens: the whole sequence, int64 [n], of which the slot may hold a part already.
    rule: turns the logits [rows, V] of the last ``rows`` tokens into a ruling; None for a prefill.
    """

    session: bytes
    slot: int
    tokens: NDArray[np.int64]
    rows: int
    rule: Callable[[Floats], Ruling] | None
    queued_ns: int = field(default_factory=time.monotonic_ns)
    started_ns: int = 0
    done_ns: int = 0
    ruling: Ruling | None = None
    error: Exception | None = None
    cancelled: bool = False


class Scheduler(threading.Thread):
    """Owns the target's decoder. `submit` and `stop` may be called from another thread."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(name="target", daemon=True)
        self._decoder = decoder
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self._waiting: dict[int, deque[Job]] = {}
        self._held: dict[int, tuple[bytes, NDArray[np.int64]]] = {}  # whose tokens a slot holds
        self._last_pass_s = 0.0
        self._last_width = 0  # sessions in the last pass
        self._stopping = False
        self.outbox: SimpleQueue[Job] = SimpleQueue()
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable: look at the outbox
        self.passes = 0

    def submit(self, job: Job) -> None:
        """Queue a job; it comes back through ``outbox``, unless it is cancelled before its turn."""
        self._inbox.put(job)

    def stop(self) -> None:
        """Finish the current pass, then end the thread."""
        self._inbox.put(None)

    def run(self) -> None:
        """The thread: gather, run one pass, hand back."""
        while self._gather():
            batch = self._next_batch()
            if batch:
                self._pass(batch)

    def _gather(self) -> bool:
        """Take in new jobs; waits while there is nothing to do. False when it is time to stop."""
        if not self._waiting:
            self._take(self._inbox.get())
        self._drain()
        # The sessions of the last pass answer within moments of each other: a pass that leaves
        # without the slowest of them costs it a whole pass.
        deadline = time.monotonic() + min(_LINGER_SHARE * self._last_pass_s, _LINGER_LIMIT_S)
        while len(self._waiting) < self._last_width and not self._stopping:
            try:
                self._take(self._inbox.get(timeout=max(0.0, deadline - time.monotonic())))
            except Empty:
                break
        return not self._stopping

    def _drain(self) -> None:
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, job: Job | None) -> None:
        if job is None:
            self._stopping = True
        elif not job.cancelled:
            self._waiting.setdefault(job.slot, deque()).append(job)

    def _next_batch(self) -> list[Job]:
        """The jobs of the next pass: the one that waits longest and all that fit beside it."""
        for slot in list(self._waiting):
            queue = self._waiting[slot]
            while queue and queue[0].cancelled:
                queue.popleft()
            if not queue:
                del self._waiting[slot]
        heads = sorted(
            (queue[0] for queue in self._waiting.values()), key=lambda job: job.queued_ns
        )
        if not heads:
            return []
        if len(self._piece(heads[0])[1]) > NARROW:
            return heads[:1]
        return [job for job in heads if len(self._piece(job)[1]) <= NARROW]

    def _piece(self, job: Job) -> tuple[int, NDArray[np.int64]]:
        """Where the job's next pass goes on in its slot, and the tokens that it appends there.

        What the slot holds of the same session and sequence is not run again. The rows that are
        wanted come in one pass, however long.
        """
        whose, held = self._held.get(job.slot, (b"", job.tokens[:0]))
        base = 0
        if whose == job.session:
            shared = min(len(held), len(job.tokens) - max(job.rows, 1))
            differing = np.flatnonzero(held[:shared] != job.tokens[:shared])
            base = int(differing[0]) if len(differing) else shared
        left = len(job.tokens) - base
        size = left if left <= max(CHUNK, job.rows) else min(CHUNK, left - job.rows)
        return base, job.tokens[base : base + size]

    def _pass(self, batch: list[Job]) -> None:
        started_ns = time.monotonic_ns()
        passes, ends, last = [], [], []
        for job in batch:
            base, piece = self._piece(job)
            self._decoder.rollback(job.slot, base)
            self._held[job.slot] = (job.session, job.tokens[:base])
            ends.append(base + len(piece))
            job.started_ns = job.started_ns or started_ns
            last.append(ends[-1] == len(job.tokens))
            passes.append(Pass(slot=job.slot, tokens=piece, rows=job.rows if last[-1] else 0))
        try:
            outputs = self._decoder.forward(passes)
        except Exception as error:
            _log.exception("a target pass failed")
            for job in batch:
                job.error = error
            last = [True] * len(batch)
        else:
            for job, end, complete, output in zip(batch, ends, last, outputs, strict=True):
                self._held[job.slot] = (job.session, job.tokens[:end])
                if complete:
                    _rule(job, output.logits)
        self.passes += 1
        self._last_pass_s = (time.monotonic_ns() - started_ns) * 1e-9
        self._last_width = len(batch)
        for job, complete in zip(batch, last, strict=True):
            if complete:
                self._hand_back(job)
            else:
                job.queued_ns = time.monotonic_ns()  # to the end of the line, behind the windows

    def _hand_back(self, job: Job) -> None:
        slot = job.slot
        self._waiting[slot].popleft()
        if not self._waiting[slot]:
            del self._waiting[slot]
        job.done_ns = time.monotonic_ns()
        self.outbox.put(job)
        os.eventfd_write(self.wake, 1)


def _rule(job: Job, logits: Floats) -> None:
    """Decide on a job; if that fails, the other jobs of the pass are none the worse."""
    try:
        job.ruling = None if job.rule is None else job.rule(logits)
    except Exception as error:
        _log.exception("a rule failed")
        job.error = error
