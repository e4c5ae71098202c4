"""What happened to each TCP connection over a `KernelPath`, as its packets tell."""

import math
import socket
import struct
from dataclasses import dataclass

_FIN, _SYN, _RST = 0x01, 0x02, 0x04


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
