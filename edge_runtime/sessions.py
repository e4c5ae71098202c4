"""What the edge knows of each conversation, and how many it keeps.

Law: when all places are taken, a session that idles yields to a new one, and so does one of the
owner with most, until the newcomer has as many. So no owner keeps all others out. Nor does one that
begins and ends sessions over and over drive them out: `per_owner` times in ``idle_s`` may it end a
session for which another had to go; after that none gives way to it but those that idle.

A session belongs to the key (or, without keys, the connection) that began it: to any other it
does not exist. Only the serving loop touches this table.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from pilotfish.edge_runtime.scheduler import Job
from pilotfish.edge_runtime.tally import Tally
from pilotfish.wire.committed import Committed
from pilotfish.wire.errors import TooManySessionsError, UnknownSessionError
from pilotfish.wire.messages import Buffer, Inquiry, Verdict
from pilotfish.wire.protocols import Draft, Exchange, Law, Wanted


@dataclass(slots=True)
class EdgeRound:
    """A window on its way through the target, or the last one answered (``verdict``)."""

    client: bytes
    start: int  # of the window's first token, behind a pending one
    frames: Sequence[Buffer]  # as they came; none once it is answered
    draft: Draft  # then without distributions
    received_ns: int
    verdict: Verdict | None = None
    answer: Sequence[Buffer] = ()  # the verdict's frames, or the inquiry's as long as there is none
    inquiry: Inquiry | None = None  # what the device was asked, and
    wanted: Wanted | None = None  # what the edge needs to know to decide
    _trace: Sequence[tuple[int, int]] = ()  # of the frames, once it is answered

    @property
    def base(self) -> int:
        """The committed tokens that it builds on."""
        return self.start - len(self.draft.pending)

    def settle(self, verdict: Verdict, answer: Sequence[Buffer]) -> None:
        """It is answered. What may be megabytes of distributions is let go of."""
        self._trace = _trace_of(self.frames)
        self.verdict, self.answer, self.frames = verdict, answer, ()
        self.draft = Draft(self.draft.ids, pending=self.draft.pending)

    def came_as(self, frames: Sequence[Buffer]) -> bool:
        """Are these the frames that it came with? A retry is known by that."""
        if self.verdict is not None:
            return _trace_of(frames) == self._trace
        return [*map(bytes, frames)] == [*map(bytes, self.frames)]


def _trace_of(frames: Sequence[Buffer]) -> list[tuple[int, int]]:
    """By which frames are known again: not proof against forgery, which harms its sender alone."""
    return [(len(frame), crc32(frame)) for frame in frames]


@dataclass
class Stream:
    """A `stream` in progress: tokens that are still to be generated."""

    client: bytes
    remaining: int
    received_ns: int


@dataclass
class SessionState:
    """One conversation: its committed tokens and the generation that is running."""

    id: bytes
    owner: bytes
    slot: int
    costly: bool = False  # another owner's had to end for it, which did not idle
    committed: Committed = field(default_factory=Committed)
    generation: int = -1
    law: Law | None = None
    exchange: Exchange[Any] | None = None  # None: the generation is a `stream`
    round: EdgeRound | None = None
    due: bool = False  # the next window brings a token that the device samples (`dssd`)
    stream: Stream | None = None
    jobs: list[Job] = field(default_factory=list)  # its work in the scheduler
    touched_s: float = field(default_factory=time.monotonic)

    @property
    def undecided(self) -> bool:
        """A window is with the target, or with the device, which was asked for its states."""
        return self.round is not None and self.round.verdict is None

    @property
    def busy(self) -> bool:
        """The target works for it, or a window of it waits for the device's states."""
        return bool(self.jobs) or self.undecided

    def call_off(self) -> None:
        """Whatever the target still has to do for this session is of no use any more."""
        for job in self.jobs:
            job.cancelled = True
        self.jobs.clear()


class Sessions:
    """The open sessions: bounded in all and per owner; see the law above for when room is needed.

    ``per_owner`` and ``idle_s`` may be changed at any time.
    """

    def __init__(
        self,
        slots: int,
        per_owner: int,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
        tally: Tally | None = None,
    ) -> None:
        self._by_id: dict[bytes, SessionState] = {}
        self._free = list(range(slots))
        self.per_owner = per_owner
        self.idle_s = idle_s
        self._clock = clock
        self._tally = tally or Tally()
        self._wasted: deque[tuple[float, bytes]] = deque()  # when a costly one ended, and whose

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[SessionState]:
        return iter(list(self._by_id.values()))

    def get(self, session_id: bytes) -> SessionState | None:
        """The session that the target has worked for, of any owner; that is not idling."""
        session = self._by_id.get(session_id)
        if session is not None:
            session.touched_s = self._clock()
        return session

    def find(self, session_id: bytes, owner: bytes) -> SessionState:
        """The owner's session, or `UnknownSessionError`. To look it up is no `use` of it."""
        session = self._by_id.get(session_id)
        if session is None or session.owner != owner:
            raise UnknownSessionError(
                "The edge does not know this session: it restarted, or dropped the session as idle."
            )
        return session

    def use(self, session_id: bytes, owner: bytes) -> SessionState:
        """The owner's session, which is being worked with; or `UnknownSessionError`."""
        session = self.find(session_id, owner)
        session.touched_s = self._clock()
        return session

    def open(self, session_id: bytes, owner: bytes) -> SessionState:
        """A new, empty session; `TooManySessionsError` when there is no room."""
        if session_id in self._by_id:  # of another owner: say no more than that it cannot be had
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
        # the lowest free slot: sessions side by side make the cheapest batch
        slot = min(self._free)
        self._free.remove(slot)
        session = SessionState(session_id, owner, slot, costly=costly, touched_s=self._clock())
        self._by_id[session_id] = session
        return session

    def close(self, session: SessionState) -> None:
        """Forget a session, which is over, and free its slot."""
        if session.costly:
            self._wasted.append((self._clock(), session.owner))
        self._free_slot(session)

    def _free_slot(self, session: SessionState) -> None:
        session.call_off()
        del self._by_id[session.id]
        self._free.append(session.slot)

    def expire(self, after_s: float) -> None:
        """Close the sessions that have been idle for so long."""
        now = self._clock()
        for session in self:
            if not session.jobs and now - session.touched_s >= after_s:
                self.close(session)
                self._tally.expired += 1

    def _idle(self, candidates: Iterable[SessionState]) -> list[SessionState]:
        """Those that have been idle for so long that they yield to any other."""
        # what waits for its turn at the target does not idle, however long that takes
        before = self._clock() - self.idle_s
        return [each for each in candidates if not each.jobs and each.touched_s <= before]

    def _beyond_share(self, owner: bytes, mine: int) -> list[SessionState]:
        """The sessions of the owners with most, if ``owner``, with ``mine``, is to have another.

        That is so as long as it does not end with more than the other keeps: two that want all
        there is settle at half, and do not take turns in driving each other out.
        """
        before = self._clock() - self.idle_s
        while self._wasted and self._wasted[0][0] <= before:
            self._wasted.popleft()
        if sum(whose == owner for _, whose in self._wasted) >= self.per_owner:
            return []
        held = Counter(each.owner for each in self)
        most = max(held.values())
        return [each for each in self if held[each.owner] == most] if most > mine + 1 else []

    def _displace(self, candidates: list[SessionState], reason: str) -> None:
        """End the one of these that is missed least: without work under way, then the idlest."""
        if not candidates:
            raise TooManySessionsError(
                f"{reason}, and none has been idle for {self.idle_s:g} s; try again later."
            )
        self._free_slot(min(candidates, key=lambda each: (each.busy, each.touched_s)))
        self._tally.displaced += 1
