"""A request that waits for its reply: its progress and its repetitions."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pilotfish.device_runtime.link.line import SLICE_S
from pilotfish.device_runtime.link.link_estimator import TimedReply
from pilotfish.device_runtime.link.reassembly import ReceivedReply
from pilotfish.device_runtime.link.retry import RESEND_S
from pilotfish.wire.link.liveness import Liveness
from pilotfish.wire.messages import Buffer, DeviceMessage

SOON_S = 0.005  # longest delay (s) at this end that does not distort a measurement of the link
_OVERRUN_S = 0.02  # longest excess (s) of a wait over `SLICE_S` that the scheduler explains


class SentRequest(NamedTuple):
    """A request as sent: its message, frames, bytes, and time (monotonic).

    position: approximate offset of the request in the connection's stream; None: unknown. chunked:
    the request was sent in chunks. stalled: this process was suspended while sending. If chunked or
    stalled is true, the time until the reply does not measure the link.
    """

    message: DeviceMessage
    frames: Sequence[Buffer]
    size: int
    sent_ns: int
    position: int | None = None
    chunked: bool = False
    stalled: bool = False


class PendingRequest:
    """One request and its repetitions. late, stalled, behind_bytes: as in `TimedReply`."""

    def __init__(self, sent: SentRequest, *, late: bool) -> None:
        self.sent = sent
        self.late = late or time.monotonic_ns() - sent.sent_ns > SOON_S * 1e9
        self.stalled = sent.stalled
        self.behind_bytes = 0
        self._size = sent.size  # total bytes sent, with repetitions
        self._resent = sent.chunked
        self._position = sent.position
        # bytes of the request that were acknowledged on this connection, and the maximum over all
        self._acknowledged = self._furthest = 0
        self._overdue_s = RESEND_S
        self._wait_s = time.monotonic()  # time at which the present wait began
        self._overran = False  # whether the last wait ended long after its time

    def on_wait_begin(self) -> None:
        """Record that a wait begins now; the first one begins with the request."""
        self._wait_s = time.monotonic()

    def on_wait_end(self) -> None:
        """Record that a wait of at most `SLICE_S` ended now."""
        self._overran = time.monotonic() - self._wait_s > SLICE_S + _OVERRUN_S

    def advances(self, liveness: Liveness | None) -> bool:
        """Whether the edge's kernel has acknowledged more of the request than ever before."""
        if liveness is None or self._position is None:
            return False
        self._acknowledged = min(self.sent.size, liveness.acknowledged - self._position)
        further = self._acknowledged > self._furthest
        self._furthest = max(self._furthest, self._acknowledged)
        return further

    def is_lost(self, owed_s: float) -> bool:
        """Whether request or reply may be lost although the connection is alive.

        TCP loses nothing, but an edge without room drops messages. While the request is still
        crossing the link, a repetition would only delay it.
        """
        crossing = self._position is not None and self._acknowledged < self.sent.size
        return owed_s >= self._overdue_s and not crossing

    def on_progress(self) -> None:
        """Reset the time until a repetition: a part of the reply arrived."""
        self._overdue_s = RESEND_S

    def on_resent(self, sent: SentRequest, owed_s: float) -> None:
        """Record that the request was sent again; its reply was due ``owed_s`` seconds ago."""
        self._overdue_s = owed_s + 2.0 * max(RESEND_S, self._overdue_s)
        self._size += sent.size
        self._resent, self._position, self._acknowledged = True, sent.position, 0

    def timed_reply(
        self, arrived: ReceivedReply, connection: int, queued_s: Callable[[], float]
    ) -> TimedReply:
        """Return the reply that was just received over this connection.

        queued_s: asks the kernel for the minimum time that the reply has been queued (takes 10 µs).
        """
        received_ns = time.monotonic_ns()
        self.stalled = self.stalled or self._overran  # the reply came at an unknown time
        useless = self.late or self.stalled or self._resent or arrived.sliced
        if (
            not useless and received_ns - self.sent.sent_ns > SOON_S * 1e9
        ):  # the reply may have been queued
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
