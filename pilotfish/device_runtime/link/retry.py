"""Policies for a lost edge: how long to wait, how to end a wait, and a log of the losses.

``fail``: the edge has 2.2 s to come back; then the answer ends in a typed error. ``wait``: the edge
has the time that the caller allows. ``local``: after a second the drafter continues alone until the
edge is back; its tokens are marked as local.

An edge is away if there is no connection, or if nothing moves on the connection
(`wire.link.liveness`). A new connection does not yet prove that the link works: some paths carry
the handshake but never a prompt. So the seconds without the edge add up across reconnections until
the edge makes progress on this device's work (`AbsenceClock`). While a message is crossing the
link, however slowly, the edge is not away.

An edge also counts as away if it answers but accepts no work: it drains, is full, gets too many
requests, or lacks a part of its target.
"""

import enum
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from pilotfish.base.errors import (
    AccessDeniedError,
    BusyError,
    DrainingError,
    EdgeLostError,
    InterruptedGenerationError,
    PairMismatchError,
    PilotfishError,
    RateLimitedError,
    TargetLostError,
    TooManySessionsError,
    UnsupportedError,
    VersionMismatchError,
)
from pilotfish.device_runtime.record import Recovery, Round
from pilotfish.wire.protocols import LOCAL

OnLinkLoss = Literal["wait", "local", "fail"]

CONNECT_S = 2.2  # seconds after which an edge that does not answer counts as absent
GRACE_S = 1.0  # like `CONNECT_S`, under `local`: the drafter can continue at once
RESEND_S = 10.0  # seconds until a missing reply is requested again; doubles each time
SILENT_S = 120.0  # seconds after which a missing reply is given up

BUSY = (BusyError, DrainingError, TooManySessionsError, RateLimitedError, TargetLostError)
# After these errors the drafter continues alone under `local`: there is no edge, or it takes no
# work, or it is unsuitable.
AWAY: tuple[type[PilotfishError], ...] = (
    EdgeLostError,
    *BUSY,
    AccessDeniedError,
    VersionMismatchError,
    PairMismatchError,
)

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.25, 4.0


@dataclass(frozen=True)
class RetryPolicy:
    """The maximum times for which an edge may be away or silent.

    absent_s: seconds to come back. silent_s: seconds to answer over an open connection.
    """

    policy: OnLinkLoss
    absent_s: float
    silent_s: float

    @property
    def starts_without_edge(self) -> bool:
        """Whether the device may start without the edge."""
        return self.policy != "fail"

    def consequence(self, *, refused: bool) -> str:
        """Describe what happens to requests while the edge is away, or refuses the device."""
        if self.policy == "local":
            return "Meanwhile the drafter answers alone."
        if self.policy == "wait" and not refused:
            return f"Meanwhile requests wait for up to {self.absent_s:g} s."
        return "Meanwhile requests fail."

    @classmethod
    def from_policy(cls, policy: OnLinkLoss, patience_s: float) -> "RetryPolicy":
        """Return the policy of this name; `UnsupportedError` for an unknown name."""
        if policy not in get_args(OnLinkLoss):
            known = ", ".join(get_args(OnLinkLoss))
            raise UnsupportedError(
                f"There is no policy {policy!r} for a lost link; use one of {known}."
            )
        if not patience_s > 0:
            raise UnsupportedError(f"patience_s must be more than 0 s, not {patience_s}.")
        if policy == "wait":
            return cls(policy, patience_s, patience_s)
        if policy == "local":
            return cls(policy, GRACE_S, RESEND_S)
        return cls(policy, CONNECT_S, SILENT_S)


FAIL = RetryPolicy.from_policy("fail", SILENT_S)


def backoff() -> Iterator[float]:
    """Yield the seconds to wait before each further attempt."""
    wait_s = _FIRST_BACKOFF_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, _LONGEST_BACKOFF_S)


class LinkPhase(enum.Enum):
    """The present activity of the link to the edge.

    AWAY: there is no connection, or it is quiet. CONNECTING: a handshake makes progress. BLOCKED:
    packets arrive from the edge, but the device's do not reach the edge, perhaps because a queue on
    the way is full. CARRYING: a message is crossing, however slowly. IDLE: the connection is alive.
    """

    AWAY = enum.auto()
    CONNECTING = enum.auto()
    BLOCKED = enum.auto()
    CARRYING = enum.auto()
    IDLE = enum.auto()


# Seconds for which each phase is tolerated before the edge counts as away: handshakes take at most
# four round trips of three seconds, and queues of routers hold seconds of traffic.
_TOLERATED_S = {LinkPhase.CONNECTING: 15.0, LinkPhase.BLOCKED: 5.0}


class AbsenceClock:
    """Adds up the seconds for which the edge is away, and for which its reply is due.

    away_s: seconds for which the edge was away since its last progress on this device's work.
    owed_s: seconds for which the edge was connected but did not send the expected reply.
    """

    def __init__(self, patience: RetryPolicy, now_s: float) -> None:
        self._retry_policy = patience
        self._noted_s = now_s
        self._phase = LinkPhase.AWAY  # until the first connection
        self.away_s = self.owed_s = 0.0
        self._spent_s = dict.fromkeys(_TOLERATED_S, 0.0)

    def note(self, phase: LinkPhase, now_s: float, stalled_s: float = 0.0) -> None:
        """Set the phase of the link; the time since the last call counts as this phase.

        stalled_s: seconds for which this process was suspended; these do not count.
        """
        passed_s = max(0.0, now_s - self._noted_s - stalled_s)
        before, self._phase, self._noted_s = self._phase, phase, now_s
        if phase in _TOLERATED_S:
            self._spent_s[phase] += passed_s
            if self._spent_s[phase] > _TOLERATED_S[phase]:
                self.away_s += passed_s
        elif phase is LinkPhase.AWAY and before is not LinkPhase.IDLE:
            self.away_s += passed_s
        elif phase is LinkPhase.IDLE or (phase is LinkPhase.CARRYING and self.in_doubt):
            self.owed_s += passed_s  # after a break, crossing data may be a repetition

    def expect(self, now_s: float) -> None:
        """Start to measure the time until an expected reply."""
        self.owed_s, self._noted_s = 0.0, now_s
        if self._retry_policy.policy != "local":
            self._phase = LinkPhase.IDLE

    def on_progress(self) -> None:
        """Reset the absence: a reply has come, or more of a message has crossed than before."""
        self.away_s = 0.0
        self._spent_s = dict.fromkeys(_TOLERATED_S, 0.0)

    @property
    def in_doubt(self) -> bool:
        """Whether the edge was away and has made no progress since."""
        return self.away_s > 0.0

    @property
    def away(self) -> bool:
        """Whether the edge was away at the last `note`."""
        standing = self._phase
        if standing in _TOLERATED_S:
            return self._spent_s[standing] > _TOLERATED_S[standing]
        return standing is LinkPhase.AWAY

    @property
    def expired(self) -> bool:
        """Whether the edge has been away for longer than the policy allows."""
        return self.away and self.away_s > self._retry_policy.absent_s

    @property
    def overdue(self) -> bool:
        """Whether the edge's reply has been due for longer than the policy allows."""
        return self.owed_s > self._retry_policy.silent_s


class CancelToken:
    """Lets another thread end the waits of the answering thread. Thread-safe.

    last_checked_s: time of the answering thread's last `check` (monotonic), a sign of life.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._has_ended = False
        self.last_checked_s = time.monotonic()

    def reset(self) -> None:
        """Clear earlier cancellations, at the start of an answer; `end` is not one of them."""
        self._event.clear()
        if self._has_ended:  # checked after `clear`, since `end` may come between
            self._event.set()
        self.last_checked_s = time.monotonic()

    def cancel(self) -> None:
        """Make the next check raise."""
        self._event.set()

    def end(self) -> None:
        """Make every later check raise: no further answer begins."""
        self._has_ended = True
        self._event.set()

    def check(self) -> None:
        """Raise `InterruptedGenerationError` after `cancel`."""
        self.last_checked_s = time.monotonic()
        if self._event.is_set():
            raise InterruptedGenerationError("The answer was interrupted before its end.")

    def sleep(self, seconds: float) -> None:
        """Sleep; `cancel` ends the sleep with `InterruptedGenerationError`."""
        self._event.wait(seconds)
        self.check()


class RetryingLink(Protocol):
    """A link that can wait for a busy edge."""

    @property
    def connection(self) -> int:
        """Number of the present connection."""

    def wait_or_raise(self, error: PilotfishError, since_s: float) -> None:
        """Wait before asking a busy edge again, or raise ``error``."""


class RetryBudget:
    """Counts the failures of one request, and raises after too many."""

    _MAX_LOST_SESSIONS = 3  # lost sessions within one round, before the error is raised

    def __init__(self, link: RetryingLink) -> None:
        self._link = link
        self._since_s = time.monotonic()
        self._connection = 0
        self._lost_sessions = 0

    def add(self, error: PilotfishError) -> None:
        """Count a failure and wait until the next attempt, or raise ``error``."""
        if isinstance(error, BUSY):
            self._link.wait_or_raise(error, self._since_s)
            return
        if self._connection != self._link.connection:  # perhaps another edge
            self._connection, self._lost_sessions = self._link.connection, 0
        self._lost_sessions += 1
        if self._lost_sessions == self._MAX_LOST_SESSIONS:
            raise error


class OutageLog:
    """Collects a `Recovery` for every loss of the edge during one answer."""

    def __init__(self) -> None:
        self.recoveries: list[Recovery] = []
        self._at = 0
        self._since_ns: int | None = None
        self._local_tokens = 0

    def add(self, record: Round, lost_ns: int | None, now_ns: int) -> bool:
        """Add a round; True if it is the first verified one after a loss."""
        if lost_ns is None:
            return False
        if self._since_ns is None:
            self._at, self._since_ns, self._local_tokens = record.start, lost_ns, 0
        if record.protocol == LOCAL:
            self._local_tokens += len(record.tokens)
            return False
        self.end(now_ns)
        return True

    def end(self, now_ns: int) -> None:
        """Record the end of the present loss, if any: the edge is back, or the answer ends."""
        if self._since_ns is not None:
            lost_s = (now_ns - self._since_ns) * 1e-9
            self.recoveries.append(
                Recovery(at=self._at, lost_s=lost_s, local_tokens=self._local_tokens)
            )
            self._since_ns = None
