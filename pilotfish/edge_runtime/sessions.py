"""Sessions of the edge, and the choice of the session that ends when there is no room.

Law: when all slots are taken, a new session displaces an idle session. Without an idle session it
displaces a session of the owner with most sessions, as long as the new session's owner has fewer.
So no owner can keep all others out. An owner cannot drive out others by opening and closing
sessions repeatedly, either: if ``per_owner`` of its sessions that displaced a busy session have
ended within ``idle_s``, it displaces only idle sessions.

A session belongs to the key that opened it (without keys, to the connection). Other clients get the
same reply as for an unknown session. Used by the serving loop only.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pilotfish.base.errors import DivergedError, TooManySessionsError, UnknownSessionError
from pilotfish.edge_runtime.edge_config import EdgeLimits
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.generation import Generation, QueuedGeneration
from pilotfish.edge_runtime.logits_processors import RowProcessor
from pilotfish.edge_runtime.scheduler import AttachableHints, Job
from pilotfish.speculation.distributions import Floats
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.protocols import Decision, Draft, StatesNeeded
from pilotfish.wire.protocols.protocol import Ids

# function of a pass's logits [rows, V] and hidden states [rows, d]; None: no decision is due
Verify = Callable[[Floats, Floats], Decision | StatesNeeded | None]
Submit = Callable[[Job], None]  # function that queues a job in the scheduler

# Rows of a pass that scores a prompt: more than `NARROW`, so that the scheduler treats the pass as
# a prompt's, not as a window's.
_SCORED_ROWS = 48


@dataclass(eq=False, slots=True)
class Session:
    """One session at the edge: its committed tokens, and its running generation.

    submit: function that queues a job.
    """

    id: bytes
    owner: bytes
    slot: int
    submit: Submit
    displaced_busy: bool = False  # whether it displaced another owner's busy session at its start
    committed: CommittedTokens = field(default_factory=CommittedTokens)
    generation: Generation | None = None  # None: none has begun
    queued: QueuedGeneration | None = None  # next generation, which waits for its grammar
    touched_s: float = field(default_factory=time.monotonic)

    @property
    def busy(self) -> bool:
        """Whether the session has jobs, or an undecided window."""
        return self.is_waiting or (self.generation is not None and self.generation.undecided)

    @property
    def is_waiting(self) -> bool:
        """Whether the session waits for a pass or a grammar; a waiting session is not idle."""
        return self.queued is not None or (
            self.generation is not None and bool(self.generation.jobs)
        )

    @property
    def generation_number(self) -> int:
        """Number of the running generation; -1 if none has begun."""
        return -1 if self.generation is None else self.generation.number

    def find_generation(self, number: int) -> Generation:
        """Return the running generation; raise `DivergedError` if it has another number."""
        if self.generation is None or self.generation.number != number:
            raise DivergedError(
                f"The edge is at generation {self.generation_number} of this session, the device "
                f"at {number}: begin again."
            )
        return self.generation

    def stop(self) -> None:
        """Cancel the work of the running generation, but keep the committed tokens."""
        if self.generation is not None:
            self.generation.stop()
            trace, self.generation.trace = self.generation.trace, None
            if trace is not None:
                trace.end(len(self.committed))

    def queue_job(
        self,
        generation: Generation,
        tokens: Ids,
        rows: int,
        verify: Verify | None,
        *,
        draft: Draft | None = None,
        hints: AttachableHints | None = None,
        processor: RowProcessor | None = None,
    ) -> None:
        """Queue a job of the running generation for the session's slot.

        tokens, rows, verify, draft, hints, processor: as in `Job`.
        """
        job = Job(self.id, self.slot, tokens, rows, verify, draft, self.owner)
        job.hints, job.processor = hints, processor
        if verify is not None:
            job.temperature = generation.temperature
            job.expected_cpu_s = generation.verify_cpu_s
        generation.jobs.append(job)
        self.submit(job)

    def queue_prompt(self, generation: Generation) -> None:
        """Queue a job that reads the committed tokens except the last, while the device drafts."""
        tokens = self.committed.ids[:-1].copy()  # a copy, since the committed tokens may change
        self.queue_job(generation, tokens, 0, None)

    def queue_prompt_scores(self, generation: Generation) -> None:
        """Queue jobs for the prompt's requested log-probabilities that no job computes.

        Parts of the prompt that an earlier pass has computed are skipped. After the first tokens of
        the answer there is nothing to do, since the log-probabilities were sent with them.
        """
        prompt = generation.prompt_logprobs
        if prompt is None or generation.jobs or prompt.start != len(self.committed):
            return
        tokens = prompt.ids[:-1]
        for begin in range(0, len(tokens), _SCORED_ROWS):
            part = tokens[: begin + _SCORED_ROWS]
            if prompt.covers(begin, len(part)):
                continue

            def verify(logits: Floats, _: Floats, end: int = len(part)) -> None:
                prompt.record(end, logits)

            self.queue_job(generation, part, len(part) - begin, verify)


class Sessions:
    """Open sessions, limited in total and per owner (by the law in the module's docstring).

    limits: the edge's limits; all but the number of slots may be changed at any time. submit:
    function that queues a job. on_end: function that is called with each session that ends.
    """

    def __init__(
        self,
        limits: EdgeLimits,
        submit: Submit,
        clock: Callable[[], float] = time.monotonic,
        metrics: EdgeMetrics | None = None,
    ) -> None:
        self.limits = limits
        self._submit = submit
        self._by_id: dict[bytes, Session] = {}
        self._free = list(range(limits.sessions))
        self.on_end: Callable[[Session], None] = lambda session: None
        self._clock = clock
        self._metrics = metrics or EdgeMetrics()
        self._costly_ends: deque[tuple[float, bytes]] = deque()  # (end, owner), ``displaced_busy``

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def get(self, session_id: bytes) -> Session | None:
        """Return the session of any owner with this id, and mark it as in use; None if unknown."""
        session = self._by_id.get(session_id)
        if session is not None:
            session.touched_s = self._clock()
        return session

    def find(self, session_id: bytes, owner: bytes) -> Session:
        """Return the owner's session without a change of its idle time.

        Raises `UnknownSessionError` if there is no such session, or if it has another owner.
        """
        session = self._by_id.get(session_id)
        if session is None or session.owner != owner:
            raise UnknownSessionError(
                "The edge does not know this session: the edge restarted, or dropped the session "
                "as idle."
            )
        return session

    def use(self, session_id: bytes, owner: bytes) -> Session:
        """Return the owner's session, as `find` does, and mark it as in use."""
        session = self.find(session_id, owner)
        session.touched_s = self._clock()
        return session

    def open(self, session_id: bytes, owner: bytes) -> Session:
        """Open a new, empty session; raise `TooManySessionsError` if there is no room."""
        if session_id in self._by_id:  # it is another owner's session, which is not revealed
            raise UnknownSessionError("This session id cannot be used; choose another.")
        mine = [session for session in self._by_id.values() if session.owner == owner]
        costly = False
        if len(mine) >= self.limits.sessions_per_client:
            reason = f"This client has {len(mine)} open sessions, the limit per client"
            self._displace(self._idle(mine), reason)
        elif not self._free:
            reason = f"All {len(self)} sessions of this edge are in use"
            idle = self._idle(self)
            self._displace(idle or self._beyond_share(owner, len(mine)), reason)
            costly = not idle
        # the lowest free slot, since a batch of adjacent slots is cheapest
        slot = min(self._free)
        self._free.remove(slot)
        session = Session(
            session_id, owner, slot, self._submit, displaced_busy=costly, touched_s=self._clock()
        )
        self._by_id[session_id] = session
        return session

    def close(self, session: Session) -> None:
        """Forget a session and free its slot."""
        if session.displaced_busy:
            self._costly_ends.append((self._clock(), session.owner))
        self._free_slot(session)

    def _free_slot(self, session: Session) -> None:
        session.stop()
        self.on_end(session)
        del self._by_id[session.id]
        self._free.append(session.slot)

    def expire(self) -> None:
        """Close the sessions that have not been in use for ``limits.expire_s`` seconds."""
        now = self._clock()
        for session in self:
            if not session.is_waiting and now - session.touched_s >= self.limits.expire_s:
                self.close(session)
                self._metrics.sessions_ended["expired"] += 1

    def _idle(self, candidates: Iterable[Session]) -> list[Session]:
        """Return the idle sessions: not in use for ``idle_s``."""
        # a session that waits for the edge is not idle, even after a long wait
        before = self._clock() - self.limits.idle_s
        return [each for each in candidates if not each.is_waiting and each.touched_s <= before]

    def _beyond_share(self, owner: bytes, mine: int) -> list[Session]:
        """Return the busy sessions that a new session of ``owner`` may displace.

        mine: number of sessions of ``owner``. The result is the sessions of the owners with most
        sessions, if such an owner then still has at least as many as ``owner``. So two greedy
        owners end with half of the slots each, and cease to displace each other.
        """
        before = self._clock() - self.limits.idle_s
        while self._costly_ends and self._costly_ends[0][0] <= before:
            self._costly_ends.popleft()
        if sum(each == owner for _, each in self._costly_ends) >= self.limits.sessions_per_client:
            return []
        counts = Counter(each.owner for each in self)
        most = max(counts.values())
        return [each for each in self if counts[each.owner] == most] if most > mine + 1 else []

    def _displace(self, candidates: list[Session], reason: str) -> None:
        """End the candidate that was unused longest, preferably one without work under way."""
        if not candidates:
            raise TooManySessionsError(
                f"{reason}, and no session has been idle for {self.limits.idle_s:g} s; try again "
                "later."
            )
        self._free_slot(min(candidates, key=lambda each: (each.busy, each.touched_s)))
        self._metrics.sessions_ended["displaced"] += 1
