"""Measure the link by the edge's replies, with a `LinkMeter` that follows the connection.

In: replies with their sizes and times. Out: the stages of rounds, and the link's state.
One thread measures, any may read.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

from pilotfish.device_runtime.record import Probing, Timings
from pilotfish.wire.link.meter import LinkMeter, Transit
from pilotfish.wire.link.state import LinkState, signal_dbm
from pilotfish.wire.link.tcp import Segments
from pilotfish.wire.messages import Buffer, Reply, Times


class TimedReply(NamedTuple):
    """A reply, the bytes both ways, and when the request left and the reply came (monotonic).

    resent: the request went out more than once, so the times say nothing about the link.
    connection: that of the reply. late: the reply had arrived before it was waited for, so its time
    of arrival is unknown, and the times say nothing about the link either. stood: nor do they if
    this process stood still meanwhile: a suspended or paused machine, or an overloaded one.
    behind_bytes: of older replies, which came first.
    """

    reply: Reply
    frames: Sequence[Buffer]
    uplink_bytes: int
    downlink_bytes: int
    sent_ns: int
    received_ns: int
    resent: bool
    connection: int
    late: bool = False
    stalled: bool = False
    behind_bytes: int = 0


class LinkEstimator:
    """Feeds the meter of one link: tells connections apart, and counts bytes sent ahead."""

    def __init__(self) -> None:
        self._meter = LinkMeter()
        self._connection = 0  # the one that the meter knows
        self._sent_bytes = 0  # since the last reply that was measured
        self.echoes = True  # the edge sends the bytes of a ping back
        self._lock = threading.Lock()
        self.probing = Probing()

    def on_sent(self, size: int) -> None:
        """Count bytes that were sent: those without a reply, or whose reply nobody waited for, are
        in the way of the next request.
        """
        self._sent_bytes += size

    def next_answer(self) -> None:
        """Note that the next answer begins; see `rtt_is_new`."""
        with self._lock:
            self._meter.begin_answer()

    @property
    def rtt_is_new(self) -> bool:
        """Whether an RTT was measured since `begin_answer`."""
        with self._lock:
            return self._meter.rtt_is_new

    def measure(self, answer: TimedReply, edge_received_ns: int, held_ns: int) -> Transit:
        """Return the seconds that an exchange spent on the link each way, and feed the meter."""
        ahead, self._sent_bytes = max(0, self._sent_bytes - answer.uplink_bytes), 0
        with self._lock:
            if self._connection != answer.connection:  # maybe another path and clock
                self._meter, self._connection = LinkMeter(), answer.connection
            return self._meter.record_exchange(
                up_bytes=answer.uplink_bytes,
                down_bytes=answer.downlink_bytes,
                ahead_bytes=ahead,
                behind_bytes=answer.behind_bytes,
                sent_ns=answer.sent_ns,
                received_ns=answer.received_ns,
                edge_received_ns=edge_received_ns,
                held_ns=held_ns,
                learn=not (answer.resent or answer.late or answer.stalled),
            )

    def timings(self, answer: TimedReply, times: Times, ready_ns: int) -> Timings:
        """Return the stages of an exchange whose encoding began at ``ready_ns``.

        Without `settle`; `draft` holds only the drafter's work after the reply had arrived.
        """
        # the edge's times are not trusted to fit
        held_ns = min(times.held_ns, answer.received_ns - answer.sent_ns)
        verify_ns = min(times.verify_ns, held_ns)
        up_s, down_s = self.measure(answer, times.received_ns, held_ns)
        # it arrived while the drafter was at work: assume downlink ≤ uplink
        lain_s = max(0.0, down_s - up_s) if answer.late else 0.0
        return Timings(
            draft=lain_s,
            encode=(answer.sent_ns - ready_ns) * 1e-9,
            uplink=up_s,
            queue=(held_ns - verify_ns) * 1e-9,
            verify=verify_ns * 1e-9,
            downlink=down_s - lain_s,
        )

    def on_ping(self, answer: TimedReply, edge_received_ns: int, held_ns: int) -> None:
        """Feed the meter with the reply to a ping."""
        self.measure(answer, edge_received_ns, held_ns)
        pings, up, down = self.probing
        self.probing = Probing(pings + 1, up + answer.uplink_bytes, down + answer.downlink_bytes)

    def on_transfer(self, *, up_bps: float | None = None, down_bps: float | None = None) -> None:
        """Note the rate at which the link carried a message in chunks, where it is known."""
        with self._lock:
            self._meter.record_rates(up_bps, down_bps)

    def rates_bps(self) -> tuple[float | None, float | None]:
        """The best of the last rates up and down; None where they are unknown."""
        with self._lock:
            return self._meter.rates_bps

    def state(self, segments: Segments | None) -> LinkState:
        """Return the link's state, with the age of each reading."""
        with self._lock:
            return self._meter.state(segments, signal_dbm())
