"""Measure the link by the edge's replies, with one `LinkMeter` per connection.

In:  replies with their sizes and times. Out: the stages of rounds, and the link's state. One
     thread measures; any thread may read.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pilotfish.device_runtime.record import Probing, RttSample, Timings
from pilotfish.wire.link.meter import LinkMeter, Transit
from pilotfish.wire.link.state import LinkState, signal_dbm
from pilotfish.wire.link.tcp import Segments
from pilotfish.wire.messages import Buffer, Pong, Reply, Times

_MOST_RTTS = 1024  # samples of the RTT that are kept


class TimedReply(NamedTuple):
    """A reply, the bytes in both directions, and the times of sending and arrival (monotonic).

    connection: number of the reply's connection. behind_bytes: bytes of older replies that came
    first. If resent, late or stalled is true, the times do not measure the link. resent: the
    request was sent more than once. late: the reply arrived before the device waited for it, at an
    unknown time. stalled: this process was suspended (a paused or overloaded machine).
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
    """Measures one link, each connection separately; counts bytes sent ahead of requests.

    paced: whether this machine's TCP sends at a pace; see `wire.link.tcp.is_paced`.
    """

    def __init__(self, *, paced: bool = False) -> None:
        self._connection = 0  # number of the connection that the meter measures
        self._sent_bytes = 0  # bytes sent since the last measured reply
        self._paced, self._is_edge_paced = paced, False
        self._rtts: deque[tuple[int, float]] = deque(maxlen=_MOST_RTTS)  # time (ns) and seconds
        self._meter = self._new_meter()
        # connection and time (monotonic, s) of the last measurement of the rates
        self._rates_tried = 0, 0.0
        self._lock = threading.Lock()
        self.probing = Probing()

    def on_welcome(self, *, paced: bool) -> None:
        """Note whether the edge's TCP sends at a pace, which limits the rates to trust."""
        with self._lock:
            self._is_edge_paced = paced
            self._meter.paced = self._paced, paced

    def on_sent(self, size: int) -> None:
        """Count sent bytes: until a reply is measured, they delay the next request."""
        self._sent_bytes += size

    def next_answer(self) -> None:
        """Begin the next answer; see `rtt_is_new`."""
        with self._lock:
            self._meter.begin_answer()

    @property
    def rtt_is_new(self) -> bool:
        """Whether an RTT was measured since `next_answer`."""
        with self._lock:
            return self._meter.rtt_is_new

    def rtts_since(self, begun_ns: int) -> list[RttSample]:
        """Return the last samples of the RTT since a time (monotonic), also of lost connections."""
        with self._lock:
            taken = list(self._rtts)
        return [RttSample((at - begun_ns) * 1e-9, rtt_s) for at, rtt_s in taken if at >= begun_ns]

    def measure(self, answer: TimedReply, edge_received_ns: int, held_ns: int) -> Transit:
        """Return the seconds of an exchange on the link, up and down; update the meter."""
        ahead, self._sent_bytes = max(0, self._sent_bytes - answer.uplink_bytes), 0
        with self._lock:
            self._follow(answer.connection)
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

    def _follow(self, connection: int) -> None:
        """Measure anew on a new connection: path and clock may be others."""
        if self._connection != connection:
            self._meter, self._connection = self._new_meter(), connection

    def _new_meter(self) -> LinkMeter:
        meter = LinkMeter(on_rtt=lambda at_ns, rtt_s: self._rtts.append((at_ns, rtt_s)))
        meter.paced = self._paced, self._is_edge_paced
        return meter

    def timings(self, answer: TimedReply, times: Times, ready_ns: int) -> Timings:
        """Return the stages of an exchange; its encoding began at ``ready_ns``.

        `settle` is 0; `draft` is only the drafter's work after the reply had arrived.
        """
        # the edge's times are untrusted: limit them to possible values
        held_ns = min(times.held_ns, answer.received_ns - answer.sent_ns)
        verify_ns = min(times.verify_ns, held_ns)
        up_s, down_s = self.measure(answer, times.received_ns, held_ns)
        # the reply arrived while the drafter worked: assume downlink ≤ uplink
        queued_s = max(0.0, down_s - up_s) if answer.late else 0.0
        return Timings(
            draft=queued_s,
            encode=(answer.sent_ns - ready_ns) * 1e-9,
            uplink=up_s,
            queue=(held_ns - verify_ns) * 1e-9,
            verify=verify_ns * 1e-9,
            downlink=down_s - queued_s,
        )

    def on_ping(self, answer: TimedReply, pong: Pong) -> None:
        """Update the meter with the reply to a ping."""
        self.measure(answer, pong.received_ns, pong.sent_ns - pong.received_ns)
        if pong.segments:
            with self._lock:
                self._meter.record_segments_down(Segments(pong.segments, pong.repeated))
        pings, up, down = self.probing
        self.probing = Probing(pings + 1, up + answer.uplink_bytes, down + answer.downlink_bytes)

    def on_rates(
        self,
        connection: int,
        up_bps: float | None,
        down_bps: float | None,
        cost: Probing,
    ) -> None:
        """Update the meter with the rates that trains measured; None: they measured no rate."""
        self._sent_bytes = 0
        with self._lock:
            self._follow(connection)
            self._meter.record_rates(up_bps, down_bps)
        self.probing = Probing(*(old + new for old, new in zip(self.probing, cost, strict=True)))

    def begin_rates(self, connection: int, fresh_s: float) -> tuple[bool, bool]:
        """Begin a measurement of the rates, unless the last one on this connection is fresh.

        Returns whether it begins, and whether it is the first on this connection.
        """
        tried_on, tried_s = self._rates_tried
        is_first = tried_on != connection
        begins = is_first or time.monotonic() - tried_s > fresh_s
        if begins:
            self._rates_tried = connection, time.monotonic()
        return begins, is_first

    def on_transfer(self, *, up_bps: float | None = None, down_bps: float | None = None) -> None:
        """Update the meter with the rates at which the link carried a chunked message."""
        with self._lock:
            self._meter.record_rates(up_bps, down_bps)

    def rates_bps(self) -> tuple[float | None, float | None]:
        """Return the best recent rates up and down, in bit/s; None for an unknown rate."""
        with self._lock:
            return self._meter.rates_bps

    def state(self, segments: Segments | None) -> LinkState:
        """Return the link's state, with the age of each reading."""
        with self._lock:
            return self._meter.state(segments, signal_dbm())
