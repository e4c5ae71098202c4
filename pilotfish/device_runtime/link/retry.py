"""Policies for a lost edge: how long to wait, how to end a wait, and a log of the losses.

``fail``: the edge has 2.2 s to come back; then the answer ends in a typed error. ``wait``: the edge
has the time that the caller allows. ``local``: after a second the drafter continues alone until the
edge is back; its tokens are marked as local.

An edge is away if there is no connection, or if nothing moves on the connection
(`wire.link.liveness`). The seconds add up across reconnections (`device_runtime.link.absence`).
While a message is crossing the link, however slowly, the edge is not away.

An edge also counts as away if it answers but accepts no work: it drains, is full, gets too many
requests, or lacks a part of its target.
"""

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


class CancelToken:
    """Lets another thread end the waits of the answering thread. Thread-safe.

    last_checked_s: time of the answering thread's last `check` (monotonic), a sign of life.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.last_checked_s = time.monotonic()

    def reset(self) -> None:
        """Clear earlier cancellations, at the start of an answer."""
        self._event.clear()
        self.last_checked_s = time.monotonic()

    def cancel(self) -> None:
        """Make the next check raise."""
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
