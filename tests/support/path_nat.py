"""The NAT of a `KernelPath`: devices appear to the edge under another address, which may change.

A NAT that has forgotten a connection, or was restarted, maps it anew: what the device goes on to
send comes from an address that the edge does not know, and what the edge sends to the one that it
knows is lost.
"""

import socket
import struct

_SOURCE, _DESTINATION = 12, 16  # where addresses stand in an IPv4 header


class Nat:
    """Translates the device's address; until the first `rebind` nothing is translated."""

    def __init__(self, first: str) -> None:
        self._next = socket.inet_aton(first)
        self._outside: bytes | None = None
        self._inside = b""

    def rebind(self) -> None:
        """Forget all connections: what is sent from now on comes from the next address."""
        self._outside = self._next
        self._next = struct.pack("!I", struct.unpack("!I", self._next)[0] + 1)

    def outward(self, packet: bytes) -> bytes:
        """Translate a packet of the device."""
        if self._outside is None:
            return packet
        self._inside = packet[_SOURCE : _SOURCE + 4]
        return _with_address(packet, _SOURCE, self._outside)

    def inward(self, packet: bytes) -> bytes | None:
        """Translate a packet of the edge; None if it goes to an address that is forgotten."""
        if self._outside is None:
            return packet
        if packet[_DESTINATION : _DESTINATION + 4] != self._outside:
            return None
        return _with_address(packet, _DESTINATION, self._inside)


def _with_address(packet: bytes, at: int, address: bytes) -> bytes:
    """Replace an address, and what it adds to the checksums of IP and TCP (RFC 1624)."""
    changed = bytearray(packet)
    places = [10]
    header = 4 * (packet[0] & 15)
    if packet[9] == socket.IPPROTO_TCP:
        places.append(header + 16)
    for place in places:
        total = ~struct.unpack_from("!H", packet, place)[0] & 0xFFFF
        for old, new in zip(
            struct.unpack_from("!HH", packet, at), struct.unpack("!HH", address), strict=True
        ):
            total += (~old & 0xFFFF) + new
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        struct.pack_into("!H", changed, place, ~total & 0xFFFF)
    changed[at : at + 4] = address
    return bytes(changed)
