"""The process behind `KernelPath`: two network namespaces, and the path between them.

`python path_forwarder.py DESCRIPTOR` makes both namespaces, each with a tun interface, and forwards
IPv4 packets from one to the other as `PathConditions` say. It holds the namespaces as open
descriptors, so nothing with a name remains when it ends, for whatever reason. DESCRIPTOR is a
`wire.tie`: requests are JSON objects, one a line, and when the other end closes, the process ends.

A packet waits in a queue of so many bytes (what has no room is dropped, the newest first), leaves
at the rate or with an opportunity of the trace, and arrives half an RTT later. The kernel's own TCP
runs over that: handshakes take round trips, what is lost is sent again, `TCP_INFO` tells of it.
"""

import ctypes
import fcntl
import heapq
import math
import os
import select
import socket
import struct
import subprocess
import sys
from collections import Counter, deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from random import Random
from time import monotonic
from typing import Any

from pilotfish.wire.emulation.traces import Trace, TraceClock
from pilotfish.wire.tie import Tie

EDGE, DEVICE = "10.99.0.1", "10.99.0.2"
INTERFACE = "path0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKETS_PER_TURN = 64
_EARLY_S = 0.0001  # what is due so soon goes now
_FIN, _SYN, _RST = 0x01, 0x02, 0x04


@dataclass(frozen=True, kw_only=True)
class PathConditions:
    """What a path is like; the default is an ideal one. "up" is from the device to the edge.

    rtt_s: seconds, half of them each way. up_bps, down_bps: bit/s of whole packets; None: no limit.
    trace_up, trace_down: paths of Mahimahi traces instead. queue_bytes: what waits for the
    bottleneck, each way. loss: share of packets that vanish. reorder: share that arrives
    ``reorder_s`` late, behind others. mtu_up, mtu_down: longer packets vanish without a word (an
    MTU black hole), though both interfaces have 1500. seed: of loss and reordering.
    """

    rtt_s: float = 0.0
    up_bps: float | None = None
    down_bps: float | None = None
    trace_up: str | None = None
    trace_down: str | None = None
    queue_bytes: int = 64 * 1024
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
class Connection:
    """One TCP connection as the path saw it; times are monotonic seconds.

    ended_by: "device FIN", "edge RST", … the first such packet sent. up_bytes, down_bytes: payload
    sent, with repetitions. up_s, down_s: when its latest packet arrived that way.
    """

    device: str
    edge_port: int
    begun_s: float
    ended_s: float | None = None
    ended_by: str = ""
    up_bytes: int = 0
    down_bytes: int = 0
    up_s: float = -math.inf
    down_s: float = -math.inf
    quiet_up_s: float | None = None  # at its end: how long nothing had arrived
    quiet_down_s: float | None = None
    after_end: int = 0  # packets that arrived after that, but for those of the end


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
                arrival = (self._left_s + rules.rtt_s / 2 + late_s, self._order, packet)
                heapq.heappush(self._arriving, arrival)
            self._schedule()

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


class Connections:
    """What happened to each TCP connection over the path."""

    def __init__(self) -> None:
        self.all: list[Connection] = []
        self._open: dict[tuple[bytes, int, int], Connection] = {}

    def sent(self, packet: bytes, *, up: bool, now: float) -> None:
        """Note a packet that entered the path."""
        parsed = _parse(packet, up=up)
        if parsed is None:
            return
        key, flags, payload = parsed
        known = self._open.get(key)
        if up and flags & _SYN and (known is None or known.ended_s is not None):
            known = Connection(f"{socket.inet_ntoa(key[0])}:{key[1]}", key[2], now)
            self._open[key] = known
            self.all.append(known)
        if known is None:
            return
        if up:
            known.up_bytes += payload
        else:
            known.down_bytes += payload
        if flags & (_FIN | _RST) and known.ended_s is None:
            known.ended_s = now
            known.ended_by = f"{'device' if up else 'edge'} {'RST' if flags & _RST else 'FIN'}"
            known.quiet_up_s, known.quiet_down_s = now - known.up_s, now - known.down_s

    def arrived(self, packet: bytes, *, up: bool, now: float) -> None:
        """Note a packet that has crossed."""
        parsed = _parse(packet, up=up)
        known = parsed and self._open.get(parsed[0])
        if not parsed or not known:
            return
        if known.ended_s is not None and not parsed[1] & (_FIN | _RST):
            known.after_end += 1
        if up:
            known.up_s = now
        else:
            known.down_s = now


def _parse(packet: bytes, *, up: bool) -> tuple[tuple[bytes, int, int], int, int] | None:
    """Return a TCP packet's connection (device's address and port, edge's), flags and payload."""
    if packet[9] != socket.IPPROTO_TCP:
        return None
    header = 4 * (packet[0] & 15)
    source, sink = struct.unpack_from("!HH", packet, header)
    payload = len(packet) - header - 4 * (packet[header + 12] >> 4)
    key = (packet[12:16], source, sink) if up else (packet[16:20], sink, source)
    return key, packet[header + 13], payload


class Forwarder:
    """Moves packets between the namespaces until the tie closes."""

    def __init__(self, tie: Tie, descriptor: int, conditions: PathConditions) -> None:
        self._tie, self._descriptor = tie, descriptor
        self.edge, edge_tun = _namespace(EDGE)
        self.device, device_tun = _namespace(DEVICE)
        self._up = Way("up", device_tun, edge_tun)
        self._down = Way("down", edge_tun, device_tun)
        self._ways = {device_tun: self._up, edge_tun: self._down}
        self._connections = Connections()
        self.shape(conditions)

    def shape(self, conditions: PathConditions) -> None:
        """Change the path for what has not left by now."""
        self.since_s = monotonic()
        for way in self._ways.values():
            way.shape(conditions, self.since_s)

    def run(self) -> None:
        """Forward until the tie closes."""
        watched = [self._descriptor, *self._ways]
        while True:
            now = monotonic()
            for way in self._ways.values():
                self._deliver(way, now + _EARLY_S)
            due_s = min(way.due_s() for way in self._ways.values())
            wait_s = None if math.isinf(due_s) else max(0.0, due_s - monotonic())
            ready, _, _ = select.select(watched, [], [], wait_s)
            for descriptor in ready:
                if (way := self._ways.get(descriptor)) is not None:
                    self._read(way)
                elif not self._converse():
                    return

    def _read(self, way: Way) -> None:
        for _ in range(_PACKETS_PER_TURN):
            try:
                packet = os.read(way.source, 65536)
            except BlockingIOError:
                return
            if packet[0] >> 4 == 4:
                now = monotonic()
                self._connections.sent(packet, up=way is self._up, now=now)
                way.put(packet, now)

    def _deliver(self, way: Way, until_s: float) -> None:
        while (packet := way.take(until_s)) is not None:
            self._connections.arrived(packet, up=way is self._up, now=monotonic())
            with suppress(OSError):
                os.write(way.sink, packet)

    def _converse(self) -> bool:
        asked = self._tie.receive()
        if asked is None:
            return False
        if "set" in asked:
            self.shape(PathConditions(**asked["set"]))
        if "cut" in asked:
            for way in self._ways.values():
                way.cut = way.name in asked["cut"]
                if way.cut:
                    way.forget()
        answer: dict[str, Any] = {"since_s": self.since_s}
        if "figures" in asked:
            answer |= {way.name: asdict(way.figures) for way in self._ways.values()}
        if "connections" in asked:
            answer["connections"] = [asdict(each) for each in self._connections.all]
        if "timeline" in asked:
            answer |= {way.name: sorted(way.timeline.items()) for way in self._ways.values()}
        self._tie.tell(answer)
        return True


def _namespace(address: str) -> tuple[int, int]:
    """Enter a new namespace with a tun interface; return descriptors of both."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(tun, _TUNSETIFF, request)
    for command in (
        "link set lo up",
        f"address add {address}/24 dev {INTERFACE}",
        f"link set {INTERFACE} up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return os.open("/proc/self/ns/net", os.O_RDONLY), tun


def main(descriptor: int) -> None:
    """Run until the parent is gone."""
    with socket.socket(fileno=descriptor) as connection:
        tie = Tie(connection)
        first = tie.receive()
        if first is None:
            return
        forwarder = Forwarder(tie, descriptor, PathConditions(**first))
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, -10)
        tie.tell({"since_s": forwarder.since_s, "edge": forwarder.edge, "device": forwarder.device})
        forwarder.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
