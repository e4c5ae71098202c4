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

# request, its envelope, and its time of arrival (monotonic clock, ns)
ReceivedRequest = tuple[Request, Envelope, int]


@dataclass(slots=True)
class WindowState:
    """State of a window: under way or, if it has a ``verdict``, the last answered window."""

    client: bytes
    start: int  # position of the window's first token, after the pending token if there is one
    frames: Sequence[Buffer]  # frames as received; empty after the verdict
    draft: Draft  # after the verdict, without distributions
    received_ns: int
    verdict: Verdict | None = None
    reply_frames: Sequence[Buffer] = ()  # frames of the verdict, or of the states request before it
    states_request: StatesRequest | None = None  # request for hidden states, sent to the device
    states_needed: StatesNeeded | None = None  # description of the states that the decision needs
    _checksums: Sequence[tuple[int, int]] = ()  # after the verdict: checksums of the frames

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
        """Return whether a window with these frames is a retry of this window."""
        if self.verdict is not None:
            return _checksums(frames) == self._checksums
        return [*map(bytes, frames)] == [*map(bytes, self.frames)]


def _checksums(frames: Sequence[Buffer]) -> list[tuple[int, int]]:
    """Return checksums that recognise repeated frames; a forged frame harms only its sender."""
    return [(len(frame), crc32(frame)) for frame in frames]


@dataclass
class Stream:
    """Stream under way; ``remaining``: number of requested tokens that are not computed yet."""

    client: bytes
    remaining: int
    received_ns: int


@dataclass(eq=False, slots=True)
class QueuedGeneration:
    """Generation that waits for its grammar, with the messages that wait for it.

    new: tokens after the session's kept tokens, u32 [n]. request: the latest window, states or
    pull. hints: the latest hints.
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
        """All waiting messages, in the order in which they will be served."""
        return self.hints if self.request is None else [self.request, *self.hints]

    @property
    def size(self) -> int:
        """Size of all waiting messages, bytes."""
        return sum(envelope.size for _, envelope, _ in self.requests)


@dataclass
class SessionState:
    """State of one session at the edge: committed tokens and running generation."""

    id: bytes
    owner: bytes
    slot: int
    displaced_busy: bool = False  # whether it displaced another owner's busy session at its start
    committed: CommittedTokens = field(default_factory=CommittedTokens)
    generation: int = -1
    sampling_params: SamplingParams | None = None
    logprobs: Logprobs | None = None  # log-probabilities of the answer's tokens, if requested
    prompt_logprobs: PromptLogprobs | None = None  # log-probabilities of the prompt, if requested
    logits_processor: LogitsProcessor | None = None  # None: logits are not changed
    protocol: SpeculationProtocol[Any] | None = None  # None: the generation is a `stream`
    hints: HintSources | None = None  # sources of hints, only under protocol `ahead`
    window_state: WindowState | None = None
    awaits_pending: bool = False  # whether the next window must bring a pending token (`dssd`)
    stream: Stream | None = None
    ended: bool = False  # whether the generation's stream has reached an end token
    verify_cpu_s: float = 0.0  # processor seconds of the last verification
    queued: QueuedGeneration | None = None  # next generation, which waits for its grammar
    jobs: list[Job] = field(default_factory=list)  # jobs in the scheduler
    touched_s: float = field(default_factory=time.monotonic)

    @property
    def undecided(self) -> bool:
        """Whether a window waits for its verdict (for a pass, or for states from the device)."""
        return self.window_state is not None and self.window_state.verdict is None

    @property
    def busy(self) -> bool:
        """Whether the session has jobs, or an undecided window."""
        return self.is_waiting or self.undecided

    @property
    def is_waiting(self) -> bool:
        """Whether the session waits for a pass or a grammar; a waiting session is not idle."""
        return bool(self.jobs) or self.queued is not None

    def cancel_jobs(self) -> None:
        """Cancel the session's jobs."""
        for job in self.jobs:
            job.cancelled = True
        self.jobs.clear()


class Sessions:
    """Open sessions, limited in total and per owner (by the law in the module's docstring).

    per_owner: upper limit of an owner's sessions. idle_s: seconds without use after which a session
    is idle. Both may be changed at any time. on_end: function that is called with each session that
    ends.
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
        self._costly_ends: deque[tuple[float, bytes]] = deque()  # (end, owner), ``displaced_busy``

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[SessionState]:
        return iter(list(self._by_id.values()))

    def get(self, session_id: bytes) -> SessionState | None:
        """Return the session of any owner with this id, and mark it as in use; None if unknown."""
        session = self._by_id.get(session_id)
        if session is not None:
            session.touched_s = self._clock()
        return session

    def find(self, session_id: bytes, owner: bytes) -> SessionState:
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

    def use(self, session_id: bytes, owner: bytes) -> SessionState:
        """Return the owner's session, as `find` does, and mark it as in use."""
        session = self.find(session_id, owner)
        session.touched_s = self._clock()
        return session

    def open(self, session_id: bytes, owner: bytes) -> SessionState:
        """Open a new, empty session; raise `TooManySessionsError` if there is no room."""
        if session_id in self._by_id:  # it is another owner's session, which is not revealed
            raise UnknownSessionError("This session id cannot be used; choose another.")
        mine = [session for session in self._by_id.values() if session.owner == owner]
        costly = False
        if len(mine) >= self.per_owner:
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
        """Close the sessions that have not been in use for ``after_s`` seconds."""
        now = self._clock()
        for session in self:
            if not session.is_waiting and now - session.touched_s >= after_s:
                self.close(session)
                self._metrics.sessions_ended["expired"] += 1

    def _idle(self, candidates: Iterable[SessionState]) -> list[SessionState]:
        """Return the idle sessions: not in use for ``idle_s``."""
        # a session that waits for the edge is not idle, even after a long wait
        before = self._clock() - self.idle_s
        return [each for each in candidates if not each.is_waiting and each.touched_s <= before]

    def _beyond_share(self, owner: bytes, mine: int) -> list[SessionState]:
        """Return the busy sessions that a new session of ``owner`` may displace.

        mine: number of sessions of ``owner``. The result is the sessions of the owners with most
        sessions, if such an owner then still has at least as many as ``owner``. So two greedy
        owners end with half of the slots each, and cease to displace each other.
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
        """End the candidate that was unused longest, preferably one without work under way."""
        if not candidates:
            raise TooManySessionsError(
                f"{reason}, and no session has been idle for {self.idle_s:g} s; try again later."
            )
        self._free_slot(min(candidates, key=lambda each: (each.busy, each.touched_s)))
        self._metrics.sessions_ended["displaced"] += 1
