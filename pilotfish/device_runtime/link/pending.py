"""A request whose reply is waited for: what of it has crossed, and how often it was sent."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pilotfish.device_runtime.link.line import ReceivedReply
from pilotfish.device_runtime.link.link_estimator import TimedReply
from pilotfish.device_runtime.link.retry import RESEND_S
from pilotfish.wire.link.liveness import Liveness
from pilotfish.wire.messages import Buffer, Request

SOON_S = 0.005  # what this end may take without being mistaken for a slow link


class SentRequest(NamedTuple):
    """A request as sent: its message, frames, bytes, and time (monotonic).

    position: where it begins in the connection's stream, about; None: unknown. chunked: it went in
    chunks, so the time until its reply says nothing about the link. stood: nor does it if this
    process stood still while it was sent.
    """

    message: Request
    frames: Sequence[Buffer]
    size: int
    sent_ns: int
    position: int | None = None
    chunked: bool = False
    stalled: bool = False


class PendingRequest:
    """One request. late, stood and behind_bytes: as in `TimedReply`."""

    def __init__(self, sent: SentRequest, *, late: bool) -> None:
        self.sent = sent
        self.late = late or time.monotonic_ns() - sent.sent_ns > SOON_S * 1e9
        self.stalled = sent.stalled
        self.behind_bytes = 0
        self._size = sent.size  # bytes sent in all
        self._resent = sent.chunked
        self._position = sent.position
        self._acknowledged = self._furthest = (
            0  # bytes acknowledged over this connection, and over any
        )
        self._overdue_s = RESEND_S

    def advances(self, liveness: Liveness | None) -> bool:
        """Whether the other end's kernel has more of it than ever before."""
        if liveness is None or self._position is None:
            return False
        self._acknowledged = min(self.sent.size, liveness.acknowledged - self._position)
        further = self._acknowledged > self._furthest
        self._furthest = max(self._furthest, self._acknowledged)
        return further

    def is_lost(self, owed_s: float) -> bool:
        """Whether request or reply may have been lost though the connection lives.

        TCP loses nothing, but an edge drops what it has no room for. While the request is under
        way, sending it again would only be in its own way.
        """
        crossing = self._position is not None and self._acknowledged < self.sent.size
        return owed_s >= self._overdue_s and not crossing

    def on_progress(self) -> None:
        """Note that a part of its reply came."""
        self._overdue_s = RESEND_S

    def on_resent(self, sent: SentRequest, owed_s: float) -> None:
        """Note that it was sent again, when its reply had been owed for so long."""
        self._overdue_s = owed_s + 2.0 * max(RESEND_S, self._overdue_s)
        self._size += sent.size
        self._resent, self._position, self._acknowledged = True, sent.position, 0

    def timed_reply(
        self, arrived: ReceivedReply, connection: int, queued_s: Callable[[], float]
    ) -> TimedReply:
        """Return its reply, which was just taken from this connection.

        lay_s: asks the kernel how long ago it came at least, which takes some 10 µs.
        """
        received_ns = time.monotonic_ns()
        useless = self.late or self.stalled or self._resent or arrived.sliced
        if not useless and received_ns - self.sent.sent_ns > SOON_S * 1e9:  # it may have lain
            self.late = queued_s() > SOON_S
        return TimedReply(
            reply=arrived.reply,
            frames=arrived.frames,
            uplink_bytes=self._size,
            downlink_bytes=arrived.size,
            sent_ns=self.sent.sent_ns,
            received_ns=received_ns,
            resent=self._resent or arrived.sliced,
            connection=connection,
            late=self.late,
            stalled=self.stalled,
            behind_bytes=self.behind_bytes,
        )
