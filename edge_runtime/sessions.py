"""What the edge knows of each conversation, and how many it keeps.

A session belongs to the key (or, without keys, the connection) that began it: to anybody else it
does not exist. Only the serving loop touches this table.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_runtime.scheduler import Job
from edge_runtime.tally import Tally
from wire.committed import Committed
from wire.errors import TooManySessionsError, UnknownSessionError
from wire.messages import Buffer, Inquiry, Verdict
from wire.protocols import Draft, Exchange, Law, Wanted


@dataclass
class Round:
    """A window on its way through the target, or the last one answered (``verdict``)."""

    client: bytes
    start: int  # of the window's first token, behind a pending one
    frames: Sequence[Buffer]  # as they came: a retry is known by its bytes
    draft: Draft
    received_ns: int
    verdict: Verdict | None = None
    answer: Sequence[Buffer] = ()  # the verdict's frames, or the inquiry's as long as there is none
    inquiry: Inquiry | None = None  # what the device was asked, and
    wanted: Wanted | None = None  # what the edge needs to know to decide

    @property
    def base(self) -> int:
        """The committed tokens that it builds on."""
        return self.start - len(self.draft.pending)


@dataclass
class Stream:
    """A `stream` in progress: tokens that are still to be generated."""

    client: bytes
    remaining: int
    received_ns: int


@dataclass
class Session:
    """One conversation: its committed tokens and the generation that is running."""

    id: bytes
    owner: bytes
    slot: int
    committed: Committed = field(default_factory=Committed)
    generation: int = -1
    law: Law | None = None
    exchange: Exchange[Any] | None = None  # None: the generation is a `stream`
    round: Round | None = None
    due: bool = False  # the next window brings a token that the device samples (`dssd`)
    stream: Stream | None = None
    jobs: list[Job] = field(default_factory=list)  # its work in the scheduler
    touched_s: float = field(default_factory=time.monotonic)

    @property
    def undecided(self) -> bool:
        """A window is with the target, or with the device, which was asked for its states."""
        return self.round is not None and self.round.verdict is None

    def call_off(self) -> None:
        """Whatever the target still has to do for this session is of no use any more."""
        for job in self.jobs:
            job.cancelled = True
        self.jobs.clear()


class Sessions:
    """The open sessions: bounded in all, per owner, and in idle time when room is needed.

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
        self._by_id: dict[bytes, Session] = {}
        self._free = list(range(slots))
        self.per_owner = per_owner
        self.idle_s = idle_s
        self._clock = clock
        self._tally = tally or Tally()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def get(self, session_id: bytes) -> Session | None:
        """The session that the target has worked for, whoever owns it; that is not idling."""
        session = self._by_id.get(session_id)
        if session is not None:
            session.touched_s = self._clock()
        return session

    def find(self, session_id: bytes, owner: bytes) -> Session:
        """The owner's session, or `UnknownSessionError`."""
        session = self._by_id.get(session_id)
        if session is None or session.owner != owner:
            raise UnknownSessionError(
                "The edge does not know this session: it restarted, or dropped the session as idle."
            )
        session.touched_s = self._clock()
        return session

    def open(self, session_id: bytes, owner: bytes) -> Session:
        """A new, empty session; `TooManySessionsError` when there is no room."""
        if session_id in self._by_id:  # somebody else's: say no more than that it cannot be had
            raise UnknownSessionError("This session id cannot be used; choose another.")
        mine = [session for session in self._by_id.values() if session.owner == owner]
        if len(mine) >= self.per_owner:
            self._drop_idlest(mine, f"This client has {len(mine)} open sessions, its limit")
        elif not self._free:
            everyone = list(self._by_id.values())
            self._drop_idlest(everyone, f"All {len(everyone)} sessions of this edge are in use")
        # the lowest free slot: sessions side by side make the cheapest batch
        slot = min(self._free)
        self._free.remove(slot)
        session = Session(session_id, owner, slot, touched_s=self._clock())
        self._by_id[session_id] = session
        return session

    def close(self, session: Session) -> None:
        """Forget a session and free its slot."""
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

    def _drop_idlest(self, candidates: list[Session], reason: str) -> None:
        # what waits for its turn at the target does not idle, however long that takes
        idle = [session for session in candidates if not session.jobs]
        oldest = min(idle, key=lambda session: session.touched_s, default=None)
        if oldest is None or self._clock() - oldest.touched_s < self.idle_s:
            raise TooManySessionsError(
                f"{reason}, and none has been idle for {self.idle_s:g} s; try again later."
            )
        self.close(oldest)
        self._tally.displaced += 1
