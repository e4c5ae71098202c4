"""The process behind `KernelPath`: two network namespaces, and the path between them.

`main(DESCRIPTOR)` makes both namespaces, each with a tun interface, and forwards IPv4 packets from
one to the other as `PathConditions` say. It holds the namespaces as open descriptors, so nothing
with a name remains when it ends, for whatever reason. DESCRIPTOR is a `base.child`: requests are
JSON objects, one a line, and when the other end closes, the process ends.

The kernel's own TCP runs over that: handshakes take round trips, what is lost is sent again,
`TCP_INFO` tells of it.
"""

import ctypes
import fcntl
import math
import os
import select
import socket
import struct
import subprocess
from contextlib import suppress
from dataclasses import asdict
from time import monotonic
from typing import Any

from pilotfish.base.child import ChildPipe
from tests.support.path_connections import Connections
from tests.support.path_nat import Nat
from tests.support.path_ways import PathConditions, Way

EDGE, DEVICE = "10.99.0.1", "10.99.0.2"
FIRST_OUTSIDE = "10.99.0.101"  # of the NAT
INTERFACE = "path0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKETS_PER_TURN = 64
_EARLY_S = 0.0001  # what is due so soon goes now


class Forwarder:
    """Moves packets between the namespaces until the tie closes."""

    def __init__(self, tie: ChildPipe, descriptor: int, conditions: PathConditions) -> None:
        self._tie, self._descriptor = tie, descriptor
        self.edge, edge_tun = _namespace(EDGE)
        self.device, device_tun = _namespace(DEVICE)
        self._up = Way("up", device_tun, edge_tun)
        self._down = Way("down", edge_tun, device_tun)
        self._ways = {device_tun: self._up, edge_tun: self._down}
        self._connections = Connections()
        self._nat = Nat(FIRST_OUTSIDE)
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
                self._send(way, packet)

    def _send(self, way: Way, packet: bytes) -> None:
        up, now = way is self._up, monotonic()
        inside = packet if up else self._nat.inward(packet)
        if inside is not None:
            self._connections.sent(inside, up=up, now=now)
            way.put(inside, now)

    def _deliver(self, way: Way, until_s: float) -> None:
        while (packet := way.take(until_s)) is not None:
            self._connections.arrived(packet, up=way is self._up, now=monotonic())
            with suppress(OSError):
                os.write(way.sink, self._nat.outward(packet) if way is self._up else packet)

    def _converse(self) -> bool:
        wanted = self._tie.receive()
        if wanted is None:
            return False
        if "set" in wanted:
            self.shape(PathConditions(**wanted["set"]))
        if "rebind" in wanted:
            self._nat.rebind()
        if "cut" in wanted:
            for way in self._ways.values():
                way.cut = way.name in wanted["cut"]
                if way.cut:
                    way.forget()
        answer: dict[str, Any] = {"since_s": self.since_s}
        if "figures" in wanted:
            answer |= {way.name: asdict(way.figures) for way in self._ways.values()}
        if "connections" in wanted:
            answer["connections"] = self._connections.read()
        if "timeline" in wanted:
            answer |= {way.name: sorted(way.timeline.items()) for way in self._ways.values()}
        self._tie.send(answer)
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
        tie = ChildPipe(connection)
        first = tie.receive()
        if first is None:
            return
        try:
            forwarder = Forwarder(tie, descriptor, PathConditions(**first))
        except (OSError, subprocess.CalledProcessError) as error:
            tie.send({"impossible": str(error)})
            return
        # real-time priority keeps the forwarder from adding jitter of its own
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        tie.send({"since_s": forwarder.since_s, "edge": forwarder.edge, "device": forwarder.device})
        forwarder.run()
