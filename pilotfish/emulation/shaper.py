"""One direction of an emulated link: when each segment arrives. No clock, no sockets.

In: bytes of TCP connections (`Flow`), with their time of arrival. Out: a deque of segments for each
flow, and the time at which the first is due.

Bytes are cut into segments of at most 1500 bytes. The segments of all flows share one queue, in
order of arrival. A segment starts when it has arrived and the segment before it has left. It leaves
after size·8/rate seconds, or at its delivery opportunity in a trace. It is due rtt/2 plus jitter
later, and not before the segment ahead of it. All times are computed from earlier times, not from
the time of a call of `advance`, so that the delays of late calls do not add up.

Loss shows as TCP's retransmissions. A lost segment arrives one RTT after the third segment that
follows it on its flow (three duplicate acknowledgements, RFC 5681 §3.2), or after a time-out of RTT
+ 200 ms (RFC 6298; Linux adds at least 200 ms to the RTT) if fewer segments follow before then.
Later segments of its flow wait for it. A retransmission is never lost.
"""

import math
from collections import deque
from random import Random
from typing import Generic, NamedTuple, TypeVar

from pilotfish.emulation.emulator import Conditions
from pilotfish.emulation.traces import OPPORTUNITY_BYTES, Trace, TraceClock

SEGMENT_BYTES = OPPORTUNITY_BYTES
FOLLOWERS = 3
RETRANSMISSION_VARIANCE_S = 0.2

MAX_WAITING_BYTES = 512 * 1024  # largest queue of a direction without `Conditions.buffer_bytes`
BUFFER_S = 0.25  # default queue: the bytes of this time (s), as in a modem of moderate size
# bytes; with a smaller queue the link would idle between two segments
_LEAST_BUFFER = 2 * SEGMENT_BYTES
# maximum memory of a flow: the bytes in transit at 1 Gbit/s and 250 ms
MAX_HELD_BYTES = 32 * 1024 * 1024
_OBJECT_BYTES = 256  # memory of a segment without its data (bytes)

# Data of two special segments: the sender has finished (FIN), the connection is broken (RST).
FIN = b""
RESET = None
_DEPARTURES_S = 0.001  # longest time (s) that a due departure may wait for `advance`


class Segment(NamedTuple):
    """Bytes in transit (or FIN, RESET).

    left_s: departure. due_s: arrival, if the segment is not lost. repair_s: the RTT, which a
    retransmission takes; None: not lost.
    """

    data: bytes | None
    left_s: float
    due_s: float
    repair_s: float | None


class Flow:
    """One direction of a connection: the segments in transit, in order."""

    def __init__(self) -> None:
        self.in_transit: deque[Segment] = deque()
        self.held_bytes = 0  # memory of the segments from `LinkShaper.put` until `take`
        self.dead = False  # the receiver has ended; new bytes are dropped

    @property
    def full(self) -> bool:
        """Whether the sender must wait."""
        return self.held_bytes >= MAX_HELD_BYTES

    def due_s(self) -> float:
        """Return the arrival time of the next segment, as known now; inf: none is in transit."""
        if not self.in_transit:
            return math.inf
        first = self.in_transit[0]
        if first.repair_s is None:
            return first.due_s
        arrives = first.due_s + first.repair_s + RETRANSMISSION_VARIANCE_S
        if len(self.in_transit) > FOLLOWERS:
            noticed = self.in_transit[FOLLOWERS].left_s - first.left_s
            arrives = min(arrives, first.due_s + noticed + first.repair_s)
        return arrives

    def take(self) -> bytes | None:
        """Remove the next segment and return its data."""
        data = self.in_transit.popleft().data
        self.held_bytes -= _memory_bytes(data)
        return data

    def drop(self) -> None:
        """Drop the segments in transit and all later segments."""
        self.dead = True
        self.in_transit.clear()
        self.held_bytes = 0


class LinkShape(NamedTuple):
    """The `Conditions` of one direction."""

    rtt_s: float
    jitter_s: float
    rate_bps: float | None
    trace: Trace | None
    loss: float
    random: Random
    buffer_bytes: int | None

    def queue_bytes(self) -> int:
        """Return the payload bytes that may wait for the link."""
        if self.buffer_bytes is not None:
            return self.buffer_bytes
        rate_bps = self.rate_bps if self.trace is None else self.trace.mean_bps
        if rate_bps is None:
            return MAX_WAITING_BYTES
        return min(max(_LEAST_BUFFER, int(rate_bps / 8 * BUFFER_S)), MAX_WAITING_BYTES)


def split_conditions(conditions: Conditions) -> tuple[LinkShape, LinkShape]:
    """Split conditions into the two directions, up first; raises TraceError."""
    up, down = (
        LinkShape(
            conditions.rtt_s,
            conditions.jitter_s,
            rate_bps,
            None if trace is None else Trace.load(trace),
            conditions.loss,
            Random(f"{conditions.seed} {way}"),
            conditions.buffer_bytes,
        )
        for way, rate_bps, trace in (
            ("up", conditions.up_bps, conditions.trace_up),
            ("down", conditions.down_bps, conditions.trace_down),
        )
    )
    return up, down


F = TypeVar("F", bound=Flow)


class LinkShaper(Generic[F]):
    """One direction of a link. Times are seconds of one monotonic clock."""

    def __init__(self, shape: LinkShape, now: float) -> None:
        self._waiting: deque[tuple[F, bytes | None, float]] = deque()
        self._left_s = now  # departure time of the last segment
        self._next_s = math.inf  # departure time of the first waiting segment
        self._apply_shape(shape, now)
        self.waiting_bytes = 0  # memory of the waiting segments (bytes)
        self._queued_bytes = 0  # payload of the waiting segments (bytes)
        self.lost = 0
        self.moved: set[F] = set()  # flows with new segments in transit; the caller clears the set

    def _apply_shape(self, shape: LinkShape, now: float) -> None:
        self._shape = shape
        self._trace = None if shape.trace is None else TraceClock(shape.trace, now)
        self._unlimited = shape.rate_bps is None and shape.trace is None
        self.buffer_bytes = shape.queue_bytes()

    def change(self, shape: LinkShape, now: float) -> None:
        """Change the link at ``now``; the first waiting segment starts again."""
        self.advance(now)
        self._apply_shape(shape, now)
        self._left_s = max(now, self._left_s)
        self._schedule()

    @property
    def full(self) -> bool:
        """Whether senders must wait."""
        most = max(MAX_WAITING_BYTES, 2 * self.buffer_bytes)
        return self.waiting_bytes >= most or self.room < min(SEGMENT_BYTES, self.buffer_bytes)

    @property
    def room(self) -> int:
        """The payload bytes that still fit into the queue; may be below 0."""
        return self.buffer_bytes - self._queued_bytes

    def wake_s(self) -> float:
        """Return the latest time for the next `advance`; inf if no segment waits."""
        return self._next_s + min(self._shape.rtt_s / 2, _DEPARTURES_S)

    def put(self, flow: F, data: bytes | None, now: float) -> None:
        """Queue bytes (or FIN, RESET) that arrived ``now`` on this flow."""
        whole = self._unlimited and not self._shape.loss
        size = len(data) if data else 0
        step = size if whole else SEGMENT_BYTES
        if not data or size <= step:
            self._append(flow, data, now)
        else:
            for start in range(0, size, step):
                self._append(flow, data[start : start + step], now)
        if math.isinf(self._next_s):
            self._schedule()
        if self._unlimited:
            self.advance(now)

    def _append(self, flow: F, data: bytes | None, now: float) -> None:
        cost = _memory_bytes(data)
        flow.held_bytes += cost
        self.waiting_bytes += cost
        self._queued_bytes += len(data or b"")
        self._waiting.append((flow, data, now))

    def _schedule(self) -> None:
        """Compute the departure time of the first waiting segment."""
        if not self._waiting:
            self._next_s = math.inf
            return
        _, data, came_s = self._waiting[0]
        start_s = max(came_s, self._left_s)
        if not data or self._unlimited:
            self._next_s = start_s
        elif self._trace is not None:
            self._next_s = self._trace.leave(start_s, len(data))
        else:
            assert self._shape.rate_bps is not None
            self._next_s = start_s + len(data) * 8 / self._shape.rate_bps

    def advance(self, now: float) -> None:
        """Move the segments that have left by ``now`` into transit."""
        rtt_s, jitter_s, _, _, loss, random, _ = self._shape
        while self._next_s <= now:
            flow, data, _ = self._waiting.popleft()
            self.waiting_bytes -= _memory_bytes(data)
            self._queued_bytes -= len(data or b"")
            self._left_s = self._next_s
            if not flow.dead:
                lost = bool(data) and loss > 0.0 and random.random() < loss
                self.lost += lost
                delay_s = rtt_s / 2 + (random.random() * jitter_s / 2 if jitter_s else 0.0)
                flow.in_transit.append(
                    Segment(data, self._left_s, self._left_s + delay_s, rtt_s if lost else None)
                )
                self.moved.add(flow)
            self._schedule()


def _memory_bytes(data: bytes | None) -> int:
    return _OBJECT_BYTES + (len(data) if data else 0)
