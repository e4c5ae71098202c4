"""Decide whether a connection is alive, from the kernel's counters.

ZeroMQ's heartbeats (pings) keep bytes moving on an idle connection. Late answers to them prove
nothing: on a slow link a ping waits until a large message has crossed. So moving bytes decide. A
connection is quiet if

- no bytes have arrived, and no large amount was acknowledged (an acknowledged ping does not count:
  the kernel of a process that hangs acknowledges pings), or
- no sent bytes are acknowledged (the path drops large segments),

for longer than the path explains: two of TCP's retransmission time-outs, or the recent pauses of
this connection.
"""

import math
import time
from socket import socket
from typing import Final

from pilotfish.wire.link.tcp import Volume, limit_retransmission_pause, read_volume

HEARTBEAT_S: Final = 0.3
_MARGIN_S: Final = 0.25  # delay (s) by the schedulers of device and edge
_LEAST_RTO_S: Final = 0.2  # Linux's retransmission time-out (s) is at least the RTT plus this
_LONGEST_LIMIT_S: Final = 10.0
_PAUSE_TIMES, _LONGEST_PAUSE_S, _PAUSE_MEMORY_S = 1.25, 4.0, 60.0
_DENSE_S: Final = 0.6  # updates further apart than this (s) do not measure a pause
# Longest pause (s) between the kernel's retransmissions that we set; the longest retransmission
# time-out (s) for which we set it; the kernel's default pause (s).
_RETRY_S, _RETRY_RTO_S, _KERNELS_RETRY_S = 1.0, 0.5, 120.0
LARGE_BYTES: Final = 4096  # more outstanding bytes than heartbeats cause
# A rate (bytes/s) that heartbeats do not reach: they have 80, or 400 if encrypted.
_MESSAGES_BPS: Final = 800.0
_WINDOW_S: Final = 0.5
# A handshake's next step is due within 3 RTT plus twice the longest step so far. The connection is
# ended after this time without a step, but not before 5 s.
_STEP_RTTS, _STEP_TIMES, HANDSHAKE_STEP_S = 3.0, 2.0, 5.0


class Liveness:
    """The liveness of one connection, from successive readings of its counters.

    Times are monotonic seconds. updated_s: time of the last reading. outstanding: bytes that were
    not acknowledged then. limit_s: longest time without a sign of life that this path explains.
    quiet_s: time from the last sign of life to the last reading. quiet: the last sign of life is
    older than the limit. overdue: a sign of life is late enough to doubt the path.
    """

    def __init__(self, now_s: float) -> None:
        self.updated_s = now_s
        self.outstanding = 0
        self.acknowledged = 0
        self._received = 0
        # Times of four events: the last sign of life (bytes received, or a large amount
        # acknowledged); the last bytes received; the last acknowledgement (or the last reading
        # without outstanding bytes); the last bytes of a message.
        self._life_s = self._received_s = self._acknowledged_s = now_s
        self._transfer_s = -math.inf
        self._arrived, self._arrived_s = 0, now_s  # packets received, and the time of the last
        self._counted, self._counted_s = 0, now_s
        self._rto_s, self._rtt_s = _LEAST_RTO_S, 0.0
        self._pause_s, self._pause_seen_s = 0.0, now_s  # longest recent pause, and its time
        self._longest_step_s = 0.0
        self._retry_s = 0.0
        self._judge()

    def poll(self, connection: socket | None) -> Volume | None:
        """Read and note the connection's counters; return them, or None if they cannot be read."""
        counters = read_volume(connection)
        if counters is not None:
            self.update(counters, time.monotonic())
            # on a slow path the kernel must not retransmit before the acknowledgement can arrive
            retry_s = _RETRY_S if self._rto_s < _RETRY_RTO_S else _KERNELS_RETRY_S
            if retry_s != self._retry_s:
                self._retry_s = retry_s
                limit_retransmission_pause(connection, retry_s)
        return counters

    def update(self, counters: Volume, now_s: float) -> None:
        """Note the counters at this time."""
        since_s, self.updated_s = now_s - self.updated_s, now_s
        self._rtt_s = counters.rtt_s
        self._rto_s = counters.rtt_s + max(_LEAST_RTO_S, 4.0 * counters.deviation_s)
        if counters.received > self._received:
            self._note_received(max(self._received_s, now_s - counters.idle_s), since_s)
        if counters.arrived != self._arrived:
            self._arrived, self._arrived_s = counters.arrived, now_s
        self._note_rate(counters.received, now_s)
        if counters.acknowledged > self.acknowledged:
            self._acknowledged_s = now_s
            if self.outstanding > LARGE_BYTES:
                self._life_s = self._transfer_s = now_s
        if not counters.outstanding:
            self._acknowledged_s = now_s
        self._received, self.acknowledged = counters.received, counters.acknowledged
        self.outstanding = counters.outstanding
        self._judge()

    def _judge(self) -> None:
        """Set what the last reading says; once, since a round reads these values several times."""
        limit_s = HEARTBEAT_S + _MARGIN_S + 2.0 * self._rto_s
        self.limit_s = min(_LONGEST_LIMIT_S, max(limit_s, _PAUSE_TIMES * self._pause_s))
        unheard_s = self.updated_s - self._life_s
        unacknowledged_s = self.updated_s - self._acknowledged_s
        self.quiet_s = max(unheard_s, unacknowledged_s)
        self.quiet = self.quiet_s > self.limit_s
        self.overdue = unheard_s > HEARTBEAT_S + self._rto_s or unacknowledged_s > self._rto_s

    def _note_rate(self, received: int, now_s: float) -> None:
        """Note whether bytes arrive at a higher rate than heartbeats."""
        came, since_s = received - self._counted, now_s - self._counted_s
        if came > LARGE_BYTES or since_s > _WINDOW_S:
            if came > _MESSAGES_BPS * since_s:
                self._transfer_s = now_s
            self._counted, self._counted_s = received, now_s

    def _note_received(self, came_s: float, since_s: float) -> None:
        pause_s = came_s - self._received_s
        self._longest_step_s = max(self._longest_step_s, pause_s)
        expired = came_s - self._pause_seen_s > _PAUSE_MEMORY_S
        if since_s < _DENSE_S and (expired or pause_s > self._pause_s):
            self._pause_s, self._pause_seen_s = min(pause_s, _LONGEST_PAUSE_S), came_s
        self._received_s = came_s
        self._life_s = max(self._life_s, came_s)

    @property
    def transfers(self) -> bool:
        """Whether a message is crossing now, not only heartbeats."""
        return self.updated_s - self._transfer_s < self.limit_s

    @property
    def blocked(self) -> bool:
        """Whether packets arrive from the peer, but no sent bytes are acknowledged in time.

        If other traffic fills a queue on the way to the peer, our acknowledgements wait in it, too.
        Then the peer's kernel retransmits old bytes and sends no new ones, so this property counts
        packets, not bytes.
        """
        return self._one_way(self._arrived_s, self._acknowledged_s)

    @property
    def only_receives(self) -> bool:
        """Whether bytes arrive from the peer, but no sent bytes are acknowledged."""
        return self._one_way(self._received_s, self._acknowledged_s)

    @property
    def only_sends(self) -> bool:
        """Whether sent bytes are acknowledged, but no bytes arrive from the peer."""
        return self._one_way(self._acknowledged_s, self._received_s)

    def _one_way(self, works_s: float, fails_s: float) -> bool:
        return self.updated_s - works_s < self.limit_s < self.updated_s - fails_s

    @property
    def has_received(self) -> bool:
        """Whether the peer has sent any bytes."""
        return self._received > 0

    @property
    def progresses(self) -> bool:
        """Whether the next step of the handshake may still come in time."""
        return self.updated_s - self._received_s < self._step_s

    @property
    def stuck(self) -> bool:
        """Whether the handshake has stalled, so that the connection should be ended."""
        return self.quiet_s > max(HANDSHAKE_STEP_S, self._step_s)

    @property
    def _step_s(self) -> float:
        return _STEP_RTTS * self._rtt_s + _STEP_TIMES * self._longest_step_s
