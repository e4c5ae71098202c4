"""One direction of an emulated link: when each segment arrives. No clock, no sockets.

in: bytes of TCP connections (`ChunkFlow`), with the time at which they came. out: on each flow, a deque
of segments and when the first of them is due.

Bytes are cut into segments of at most 1500. Those of all flows share one queue, first come first
served. A segment starts when the one before it has left and it has arrived itself; it has left
after size·8/rate seconds, or at its delivery opportunity in a trace; it is due rtt/2 plus jitter
after that, and not before the one ahead of it. All times follow from the schedule and not from when
`advance` is called, so that late calls do not add up.

Loss shows as TCP's retransmissions. A lost segment arrives one RTT after the third segment that
follows it on its flow (three duplicate acknowledgements, RFC 5681 §3.2), or after a time-out of RTT
+ 200 ms (RFC 6298 with Linux's least variance) when fewer follow until then. All behind it on its
flow waits. The retransmission itself is never lost.
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

MAX_WAITING_BYTES = 512 * 1024  # of a direction, unless `Conditions.buffer_bytes` says more
BUFFER_S = 0.25  # of a direction's rate may wait, as in a modem of moderate size
_LEAST_BUFFER = 2 * SEGMENT_BYTES  # with less the link would idle between two segments
MAX_HELD_BYTES = 32 * 1024 * 1024  # of a flow; so much is under way at 1 Gbit/s in 250 ms
_OBJECT_BYTES = 256  # what a segment takes here besides its bytes

# as bytes of a segment: the sender will send no more (FIN), the connection is broken (RST)
FIN = b""
RESET = None
_DEPARTURES_S = 0.001  # departures need not be processed at once, since arrivals are later


class Segment(NamedTuple):
    """Bytes on their way (or FIN, RESET).

    left_s, due_s: when they left and arrive, lost or not. repair_s: None, or the RTT when lost.
    """

    data: bytes | None
    left_s: float
    due_s: float
    repair_s: float | None


class Flow:
    """One direction of one connection: what has left and not yet arrived, in order."""

    def __init__(self) -> None:
        self.in_transit: deque[Segment] = deque()
        self.held_bytes = 0  # from `LinkShaper.put` until `take`
        self.dead = False  # the receiver is gone; what comes is dropped

    @property
    def full(self) -> bool:
        """Whether the sender has to wait."""
        return self.held_bytes >= MAX_HELD_BYTES

    def due_s(self) -> float:
        """Return when the next segment arrives, as known now; inf if there is none."""
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
        """Remove the next segment."""
        data = self.in_transit.popleft().data
        self.held_bytes -= _memory_bytes(data)
        return data

    def drop(self) -> None:
        """Deliver nothing any more."""
        self.dead = True
        self.in_transit.clear()
        self.held_bytes = 0


class LinkShape(NamedTuple):
    """One direction's share of `Conditions`."""

    rtt_s: float
    jitter_s: float
    rate_bps: float | None
    trace: Trace | None
    loss: float
    random: Random
    buffer_bytes: int | None

    def queue_bytes(self) -> int:
        """Return how many payload bytes may wait for the link."""
        if self.buffer_bytes is not None:
            return self.buffer_bytes
        rate_bps = self.rate_bps if self.trace is None else self.trace.mean_bps
        if rate_bps is None:
            return MAX_WAITING_BYTES
        return min(max(_LEAST_BUFFER, int(rate_bps / 8 * BUFFER_S)), MAX_WAITING_BYTES)


def split_conditions(conditions: Conditions) -> tuple[LinkShape, LinkShape]:
    """Split conditions into the two directions, up first. Raises TraceError."""
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
    """One direction of a link. Times are seconds of one clock and never go back."""

    def __init__(self, shape: LinkShape, now: float) -> None:
        self._waiting: deque[tuple[F, bytes | None, float]] = deque()
        self._left_s = now  # when the last segment left
        self._next_s = math.inf  # when the first that waits will have left
        self._apply_shape(shape, now)
        self.waiting_bytes = 0  # of memory
        self._queued_bytes = 0  # of payload
        self.lost = 0
        self.moved: set[F] = set()  # flows on which something has left; the owner empties it

    def _apply_shape(self, shape: LinkShape, now: float) -> None:
        self._shape = shape
        self._trace = None if shape.trace is None else TraceClock(shape.trace, now)
        self._unlimited = shape.rate_bps is None and shape.trace is None
        self.buffer_bytes = shape.queue_bytes()

    def change(self, shape: LinkShape, now: float) -> None:
        """Change the link from ``now`` on; the segment that is leaving starts again."""
        self.advance(now)
        self._apply_shape(shape, now)
        self._left_s = max(now, self._left_s)
        self._schedule()

    @property
    def full(self) -> bool:
        """Whether senders have to wait."""
        most = max(MAX_WAITING_BYTES, 2 * self.buffer_bytes)
        return self.waiting_bytes >= most or self.room < min(SEGMENT_BYTES, self.buffer_bytes)

    @property
    def room(self) -> int:
        """Payload bytes that the queue can take; may be below 0."""
        return self.buffer_bytes - self._queued_bytes

    def wake_s(self) -> float:
        """Return when `advance` should be called at the latest; inf if nothing waits."""
        return self._next_s + min(self._shape.rtt_s / 2, _DEPARTURES_S)

    def put(self, flow: F, data: bytes | None, now: float) -> None:
        """Queue bytes (or FIN, RESET) that came ``now`` on this flow."""
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
        """Compute when the first waiting segment will have left."""
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
        """Move on what has left by ``now``."""
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
