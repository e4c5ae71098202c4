"""A ZeroMQ peer without ZeroMQ and without encryption, which can send a part of a message."""

from __future__ import annotations

import socket
import struct
from urllib.parse import urlsplit

from pilotfish.wire import messages as m

# What a ZeroMQ peer without encryption says first.
_GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
_READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"


def greet(endpoint: str, host: str = "127.0.0.1") -> socket.socket:
    """Return a connection from this host; all that a handshake takes has been sent."""
    at = urlsplit(endpoint)
    connection = socket.create_connection((at.hostname, at.port), source_address=(host, 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_GREETING + b"\x04" + bytes([len(_READY)]) + _READY)
    connection.settimeout(30.0)
    return connection


def shake_hands(endpoint: str, host: str = "127.0.0.1") -> socket.socket:
    """Return a connection from this host, after its handshake."""
    connection, reply = greet(endpoint, host), b""
    while not reply.endswith(b"Identity\0\0\0\0"):  # a frame before its READY is an error
        new = connection.recv(4096)
        if not new:
            raise ConnectionError("hung up on within the handshake")
        reply += new
    return connection


def ping(*, more: bool = False) -> bytes:
    """Return the bytes of a ping; more: its frame is the first of a longer message."""
    frame = m.encode(m.Ping(nonce=1))
    return bytes([int(more), len(frame)]) + frame


def part(size: int) -> bytes:
    """Return a long frame of a message that goes on after it."""
    return b"\x03" + struct.pack(">Q", size) + b"x" * size
