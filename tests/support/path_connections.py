"""What happened to each TCP connection over a `KernelPath`, as its packets tell."""

from __future__ import annotations

import math
import socket
import struct
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

_FIN, _SYN, _RST = 0x01, 0x02, 0x04
_WRAP = 1 << 32


@dataclass
class Stream:
    """One direction of a connection.

    sent_bytes: payload as it was sent, with what TCP repeats. length: of the stream, so what the
    application sent; no byte of it counts twice. arrived_s: when the latest packet did (monotonic).
    quiet_s: how long nothing had arrived when the connection ended.
    """

    sent_bytes: int = 0
    length: int = 0
    arrived_s: float = -math.inf
    quiet_s: float | None = None
    start: int = 0  # the first sequence number, of the SYN

    def note(self, packet: _Parsed) -> None:
        """Note a packet that was sent this way."""
        if packet.flags & _SYN:
            self.start = packet.sequence
            return
        self.sent_bytes += packet.payload
        if packet.payload:
            end = (packet.sequence + packet.payload - self.start - 1) % _WRAP
            self.length = max(self.length, end)


@dataclass
class Connection:
    """One TCP connection as the path saw it; times are monotonic seconds.

    ended_by: "device FIN", "edge RST", … the first such packet sent. after_end: packets that
    arrived later, but for those of the end.
    """

    device: str
    edge_port: int
    begun_s: float
    ended_s: float | None = None
    ended_by: str = ""
    after_end: int = 0
    up: Stream = field(default_factory=Stream)
    down: Stream = field(default_factory=Stream)

    @classmethod
    def read(cls, message: dict[str, Any]) -> Connection:
        """Make one of what `dataclasses.asdict` makes of it."""
        return cls(**{**message, "up": Stream(**message["up"]), "down": Stream(**message["down"])})


class Connections:
    """All of a path's."""

    def __init__(self) -> None:
        self._all: list[Connection] = []
        self._latest: dict[tuple[bytes, int, int], Connection] = {}

    def read(self) -> list[dict[str, Any]]:
        """Return them in the order of their beginning."""
        return [asdict(each) for each in self._all]

    def sent(self, packet: bytes, *, up: bool, now: float) -> None:
        """Note a packet that entered the path."""
        parsed = _parse(packet, up=up)
        if parsed is None:
            return
        known = self._latest.get(parsed.key)
        if up and parsed.flags & _SYN and (known is None or known.ended_s is not None):
            host, port, edge_port = parsed.key
            known = Connection(f"{socket.inet_ntoa(host)}:{port}", edge_port, now)
            self._latest[parsed.key] = known
            self._all.append(known)
        if known is None:
            return
        (known.up if up else known.down).note(parsed)
        if parsed.flags & (_FIN | _RST) and known.ended_s is None:
            known.ended_s = now
            end = "RST" if parsed.flags & _RST else "FIN"
            known.ended_by = f"{'device' if up else 'edge'} {end}"
            for stream in (known.up, known.down):
                stream.quiet_s = now - stream.arrived_s

    def arrived(self, packet: bytes, *, up: bool, now: float) -> None:
        """Note a packet that has crossed."""
        parsed = _parse(packet, up=up)
        known = parsed and self._latest.get(parsed.key)
        if not parsed or not known:
            return
        if known.ended_s is not None and not parsed.flags & (_FIN | _RST):
            known.after_end += 1
        (known.up if up else known.down).arrived_s = now


class _Parsed(NamedTuple):
    """A TCP packet; ``key``: its connection, as the device's address and port, and the edge's."""

    key: tuple[bytes, int, int]
    sequence: int
    flags: int
    payload: int


def _parse(packet: bytes, *, up: bool) -> _Parsed | None:
    if packet[9] != socket.IPPROTO_TCP:
        return None
    header = 4 * (packet[0] & 15)
    source, sink, sequence = struct.unpack_from("!HHI", packet, header)
    payload = len(packet) - header - 4 * (packet[header + 12] >> 4)
    key = (packet[12:16], source, sink) if up else (packet[16:20], sink, source)
    return _Parsed(key, sequence, packet[header + 13], payload)
