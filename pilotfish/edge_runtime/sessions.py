"""The edge's sessions, and which of them end when there is no room.

Law: when all slots are taken, a new session displaces an idle one, or else a session of the owner
with most sessions, until the new one's owner has as many. So no owner can keep all others out. Nor
can it drive them out by opening and closing sessions repeatedly: once ``per_owner`` of its sessions
that displaced a busy one have ended within ``idle_s``, it displaces idle sessions only.

A session belongs to the key (or, without keys, the connection) that opened it; to others it does
not exist. Used by the serving loop only.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from pilotfish.base.errors import TooManySessionsError, UnknownSessionError
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.grammar_compiler import Compilation
from pilotfish.edge_runtime.hint_sources import HintSources
from pilotfish.edge_runtime.reply_logprobs import Logprobs, PromptLogprobs
from pilotfish.edge_runtime.scheduler import Job
from pilotfish.speculation.logits_options import LogitsProcessor
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.messages import Begin, Buffer, Request, StatesRequest, Verdict
from pilotfish.wire.protocols import Draft, SamplingParams, SpeculationProtocol, StatesNeeded
from pilotfish.wire.protocols.protocol import Ids
from pilotfish.wire.transport import Envelope

# a request, its envelope, and when it came (monotonic clock, ns)
ReceivedRequest = tuple[Request, Envelope, int]


@dataclass(slots=True)
class WindowState:
    """The window under way or, with a ``verdict``, the last one answered."""

    client: bytes
    start: int  # position of the window's first token, after a pending one
    frames: Sequence[Buffer]  # as received; none after the answer
    draft: Draft  # without distributions after the answer
    received_ns: int
    verdict: Verdict | None = None
    reply_frames: Sequence[Buffer] = ()  # frames of the verdict, or of the states request before it
    states_request: StatesRequest | None = None  # sent to the device
    states_needed: StatesNeeded | None = None  # states needed for the decision
    _checksums: Sequence[tuple[int, int]] = ()  # checksums of the frames, after the answer

    @property
    def committed_before(self) -> int:
        """Number of committed tokens before the window."""
        return self.start - len(self.draft.pending)

    def set_verdict(self, verdict: Verdict, answer: Sequence[Buffer]) -> None:
        """Store the verdict, and drop the distributions, which may take megabytes."""
        self._checksums = _checksums(self.frames)
        self.verdict, self.reply_frames, self.frames = verdict, answer, ()
        self.draft = Draft(self.draft.ids, pending=self.draft.pending)

    def matches(self, frames: Sequence[Buffer]) -> bool:
        """Whether a window with these frames is a retry of this one."""
        if self.verdict is not None:
            return _checksums(frames) == self._checksums
        return [*map(bytes, frames)] == [*map(bytes, self.frames)]


def _checksums(frames: Sequence[Buffer]) -> list[tuple[int, int]]:
    """Return checksums to recognise frames; forging them would harm only the sender."""
    return [(len(frame), crc32(frame)) for frame in frames]


@dataclass
class Stream:
    """A `stream` under way. remaining: requested tokens that are still to come."""

    client: bytes
    remaining: int
    received_ns: int


@dataclass(eq=False, slots=True)
class QueuedGeneration:
    """A generation that waits for its grammar, and the messages that wait with it.

    new: tokens after the kept ones, u32 [n]. request: the latest window, states or pull.
    """

    begin: Begin
    envelope: Envelope
    new: Ids
    sampling_params: SamplingParams
    protocol: SpeculationProtocol[Any] | None
    compilation: Compilation
    request: ReceivedRequest | None = None
    hints: list[ReceivedRequest] = field(default_factory=list)

    @property
    def requests(self) -> list[ReceivedRequest]:
        """All waiting messages, in the order in which they are served."""
        return self.hints if self.request is None else [self.request, *self.hints]

    @property
    def size(self) -> int:
        """Bytes of the waiting messages."""
        return sum(envelope.size for _, envelope, _ in self.requests)


@dataclass
class SessionState:
    """The edge's state of one session: its committed tokens and the running generation."""

    id: bytes
    owner: bytes
    slot: int
    displaced_busy: bool = False  # it displaced a session of another owner that was not idle
    committed: CommittedTokens = field(default_factory=CommittedTokens)
    generation: int = -1
    sampling_params: SamplingParams | None = None
    logprobs: Logprobs | None = None  # log-probabilities of its tokens, if requested
    prompt_logprobs: PromptLogprobs | None = None  # those of its prompt, if requested
    logits_processor: LogitsProcessor | None = None  # None: logits are not changed
    protocol: SpeculationProtocol[Any] | None = None  # None: the generation is a `stream`
    hints: HintSources | None = None  # only under `ahead`
    window_state: WindowState | None = None
    awaits_pending: bool = False  # the next window brings a pending token (`dssd`)
    stream: Stream | None = None
    ended: bool = False  # the generation's stream has reached an end token
    verify_cpu_s: float = 0.0  # processor seconds of the last verification
    queued: QueuedGeneration | None = None  # next generation, waiting for its grammar
    jobs: list[Job] = field(default_factory=list)  # jobs in the scheduler
    touched_s: float = field(default_factory=time.monotonic)

    @property
    def undecided(self) -> bool:
        """Whether a window awaits the target, or states from the device."""
        return self.window_state is not None and self.window_state.verdict is None

    @property
    def busy(self) -> bool:
        """Whether the session has jobs, or an undecided window."""
        return self.is_waiting or self.undecided

    @property
    def is_waiting(self) -> bool:
        """Whether the session waits for a pass or a grammar, and so is not idle."""
        return bool(self.jobs) or self.queued is not None

    def cancel_jobs(self) -> None:
        """Cancel the session's jobs."""
        for job in self.jobs:
            job.cancelled = True
        self.jobs.clear()


class Sessions:
    """The open sessions, bounded in all and per owner by the law above.

    ``per_owner`` and ``idle_s`` may be changed at any time; ``on_end`` is called with each session
    that ends.
    """

    def __init__(
        self,
        slots: int,
        per_owner: int,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
        metrics: EdgeMetrics | None = None,
    ) -> None:
        self._by_id: dict[bytes, SessionState] = {}
        self._free = list(range(slots))
        self.on_end: Callable[[SessionState], None] = lambda session: None
        self.per_owner = per_owner
        self.idle_s = idle_s
        self._clock = clock
        self._metrics = metrics or EdgeMetrics()
        self._costly_ends: deque[tuple[float, bytes]] = deque()  # end and owner of costly sessions

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[SessionState]:
        return iter(list(self._by_id.values()))

    def get(self, session_id: bytes) -> SessionState | None:
        """Return a session of any owner, and mark it as in use; None if unknown."""
        session = self._by_id.get(session_id)
        if session is not None:
            session.touched_s = self._clock()
        return session

    def find(self, session_id: bytes, owner: bytes) -> SessionState:
        """Return the owner's session, or raise `UnknownSessionError`; keeps its idle time."""
        session = self._by_id.get(session_id)
        if session is None or session.owner != owner:
            raise UnknownSessionError(
                "The edge does not know this session: it restarted, or dropped the session as idle."
            )
        return session

    def use(self, session_id: bytes, owner: bytes) -> SessionState:
        """Return the owner's session, as `find` does, and mark it as in use."""
        session = self.find(session_id, owner)
        session.touched_s = self._clock()
        return session

    def open(self, session_id: bytes, owner: bytes) -> SessionState:
        """Open a new, empty session; `TooManySessionsError` if there is no room."""
        if session_id in self._by_id:  # another owner's: reveal nothing more
            raise UnknownSessionError("This session id cannot be used; choose another.")
        mine = [session for session in self._by_id.values() if session.owner == owner]
        costly = False
        if len(mine) >= self.per_owner:
            reason = f"This client has {len(mine)} open sessions, its limit"
            self._displace(self._idle(mine), reason)
        elif not self._free:
            reason = f"All {len(self)} sessions of this edge are in use"
            idle = self._idle(self)
            self._displace(idle or self._beyond_share(owner, len(mine)), reason)
            costly = not idle
        # the lowest free slot: adjacent slots make the cheapest batch
        slot = min(self._free)
        self._free.remove(slot)
        session = SessionState(
            session_id, owner, slot, displaced_busy=costly, touched_s=self._clock()
        )
        self._by_id[session_id] = session
        return session

    def close(self, session: SessionState) -> None:
        """Forget a session and free its slot."""
        if session.displaced_busy:
            self._costly_ends.append((self._clock(), session.owner))
        self._free_slot(session)

    def _free_slot(self, session: SessionState) -> None:
        session.cancel_jobs()
        self.on_end(session)
        del self._by_id[session.id]
        self._free.append(session.slot)

    def expire(self, after_s: float) -> None:
        """Close the sessions that have been idle for ``after_s``."""
        now = self._clock()
        for session in self:
            if not session.is_waiting and now - session.touched_s >= after_s:
                self.close(session)
                self._metrics.sessions_ended["expired"] += 1

    def _idle(self, candidates: Iterable[SessionState]) -> list[SessionState]:
        """Return the sessions that have been idle for ``idle_s``."""
        # a session that waits for the edge is not idle, however long it waits
        before = self._clock() - self.idle_s
        return [each for each in candidates if not each.is_waiting and each.touched_s <= before]

    def _beyond_share(self, owner: bytes, mine: int) -> list[SessionState]:
        """Return the sessions that ``owner``, which has ``mine`` sessions, may displace.

        They belong to the owners with most sessions, if these keep at least as many as ``owner``
        then has: two greedy owners end with half each and stop displacing each other.
        """
        before = self._clock() - self.idle_s
        while self._costly_ends and self._costly_ends[0][0] <= before:
            self._costly_ends.popleft()
        if sum(each == owner for _, each in self._costly_ends) >= self.per_owner:
            return []
        counts = Counter(each.owner for each in self)
        most = max(counts.values())
        return [each for each in self if counts[each.owner] == most] if most > mine + 1 else []

    def _displace(self, candidates: list[SessionState], reason: str) -> None:
        """End one of these sessions, preferably one that is not busy, the idlest first."""
        if not candidates:
            raise TooManySessionsError(
                f"{reason}, and none has been idle for {self.idle_s:g} s; try again later."
            )
        self._free_slot(min(candidates, key=lambda each: (each.busy, each.touched_s)))
        self._metrics.sessions_ended["displaced"] += 1
