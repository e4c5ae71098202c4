"""One direction of a `KernelPath`: when each packet arrives, if it does. No sockets, no clock.

A packet waits in a queue of so many bytes (what has no room is dropped, the newest first), leaves
at the rate or with an opportunity of the trace, and arrives half an RTT and its jitter later.
"""

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

from pilotfish.emulation.traces import Trace, TraceClock


@dataclass(frozen=True, kw_only=True)
class PathConditions:
    """What a path is like; the default is an ideal one. "up" is from the device to the edge.

    rtt_s: seconds, half of them each way. up_bps, down_bps: bit/s of whole packets; None: no limit.
    trace_up, trace_down: paths of Mahimahi traces instead. queue_bytes: what waits for the
    bottleneck, each way. jitter_s: longest additional time of a round trip; each way a packet's
    share of it is uniform between 0 and half, and no packet overtakes another for it. loss: share
    of packets that vanish. reorder: share that arrives
    ``reorder_s`` late, behind others. mtu_up, mtu_down: longer packets vanish without a word (an
    MTU black hole), though both interfaces have 1500. seed: of loss and reordering.
    """

    rtt_s: float = 0.0
    up_bps: float | None = None
    down_bps: float | None = None
    trace_up: str | None = None
    trace_down: str | None = None
    queue_bytes: int = 64 * 1024
    jitter_s: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.01
    mtu_up: int = 1500
    mtu_down: int = 1500
    seed: int = 0


@dataclass
class WayFigures:
    """Packets and bytes (with headers) of one direction, by what became of them."""

    sent: int = 0
    sent_bytes: int = 0
    delivered: int = 0
    delivered_bytes: int = 0
    overflowed: int = 0  # no room in the queue
    lost: int = 0
    too_large: int = 0
    cut: int = 0


@dataclass
class Way:
    """One direction: a queue, a bottleneck and a delay."""

    name: str
    source: int  # descriptors of the tun interfaces
    sink: int
    figures: WayFigures = field(default_factory=WayFigures)
    timeline: Counter[int] = field(default_factory=Counter)  # bytes arrived, by tenth of a second
    cut: bool = False

    def __post_init__(self) -> None:
        self._left_s = -math.inf  # when the last packet left
        self._latest_s = -math.inf  # when the last packet arrives that was not reordered
        self._order = 0  # of packets that arrive at the same time
        self.forget()

    def shape(self, conditions: PathConditions, now: float) -> None:
        """Take these conditions for what has not left by now; a trace begins anew."""
        self._advance(now)
        up = self.name == "up"
        self._rules = conditions
        self._rate = conditions.up_bps if up else conditions.down_bps
        trace = conditions.trace_up if up else conditions.trace_down
        self._trace = TraceClock(Trace.load(trace), now) if trace else None
        self._mtu = conditions.mtu_up if up else conditions.mtu_down
        self._random = Random(f"{conditions.seed} {self.name}")
        self._left_s = max(self._left_s, now)
        self._schedule()

    def forget(self) -> None:
        """Lose what is under way."""
        self._waiting: deque[tuple[bytes, float]] = deque()  # packets, and when they came
        self._waiting_bytes = 0
        self._next_s = math.inf  # when the first of them will have left
        self._arriving: list[tuple[float, int, bytes]] = []

    def put(self, packet: bytes, now: float) -> None:
        """Take a packet that was sent now."""
        self._advance(now)
        seen, size = self.figures, len(packet)
        seen.sent += 1
        seen.sent_bytes += size
        if self.cut:
            seen.cut += 1
        elif size > self._mtu:
            seen.too_large += 1
        elif self._waiting_bytes + size > self._rules.queue_bytes:
            seen.overflowed += 1
        else:
            self._waiting.append((packet, now))
            self._waiting_bytes += size
            if math.isinf(self._next_s):
                self._schedule()
                self._advance(now)

    def _schedule(self) -> None:
        if not self._waiting:
            self._next_s = math.inf
            return
        packet, came_s = self._waiting[0]
        start_s = max(came_s, self._left_s)
        if self._trace is not None:
            self._next_s = self._trace.leave(start_s, len(packet))
        elif self._rate is not None:
            self._next_s = start_s + len(packet) * 8 / self._rate
        else:
            self._next_s = start_s

    def _advance(self, now: float) -> None:
        """Send off what has left by now."""
        while self._next_s <= now:
            packet, _ = self._waiting.popleft()
            self._waiting_bytes -= len(packet)
            self._left_s = self._next_s
            rules = self._rules
            if self._random.random() < rules.loss:
                self.figures.lost += 1
            else:
                late_s = rules.reorder_s if self._random.random() < rules.reorder else 0.0
                self._order += 1
                arrival = (self._next_arrival_s() + late_s, self._order, packet)
                heapq.heappush(self._arriving, arrival)
            self._schedule()

    def _next_arrival_s(self) -> float:
        """Return when the packet that has just left arrives, if it is not reordered."""
        arrives_s = self._left_s + self._rules.rtt_s / 2
        if self._rules.jitter_s:
            arrives_s += self._random.random() * self._rules.jitter_s / 2
            self._latest_s = arrives_s = max(self._latest_s, arrives_s)
        return arrives_s

    def due_s(self) -> float:
        """Return when something leaves or arrives next; inf if nothing is under way."""
        return min(self._next_s, self._arriving[0][0] if self._arriving else math.inf)

    def take(self, until_s: float) -> bytes | None:
        """Remove the packet that arrives next, if it does so by then."""
        self._advance(until_s)
        if not self._arriving or self._arriving[0][0] > until_s:
            return None
        packet = heapq.heappop(self._arriving)[2]
        self.figures.delivered += 1
        self.figures.delivered_bytes += len(packet)
        self.timeline[int(until_s * 10)] += len(packet)
        return packet
