"""A connection through the emulator: two sockets, and both directions between them."""

import select
import socket
import struct
from contextlib import suppress

from pilotfish.wire.emulation.shaper import FIN, RESET, SEGMENT_BYTES, Flow, LinkShaper

BUFFER_BYTES = 256 * 1024  # of the kernel, per socket: the emulated queue holds the rest
_READ_BYTES = 43 * SEGMENT_BYTES
_SEND_BYTES = 256 * 1024
_SEND_PARTS = 1024  # IOV_MAX
_LINGER_0 = struct.pack("ii", 1, 0)  # close() then sends a reset


class Way(Flow):
    """A flow with its shaper, and the two ends that it connects."""

    source: "SocketEnd"
    sink: "SocketEnd"

    def __init__(self, shaper: "LinkShaper[Way]") -> None:
        super().__init__()
        self.shaper = shaper
        self.done = False  # the FIN has been handed on

    def take_due(self, now: float) -> list[bytes]:
        """Remove bytes that are due, up to a FIN or RESET and up to a sensible size."""
        parts: list[bytes] = []
        size = 0
        while size < _SEND_BYTES and len(parts) < _SEND_PARTS - 1 and self.due_s() <= now:
            if not self.in_transit[0].data:
                break
            data = self.take()
            assert data
            parts.append(data)
            size += len(data)
        return parts


class SocketEnd:
    """One socket. What is read goes into ``out``; what arrives by ``into`` is sent to it."""

    def __init__(self, sock: socket.socket, out: Way, into: Way) -> None:
        self.socket = sock
        self.descriptor = sock.fileno()
        self.out = out
        self.into = into
        self.connecting = False
        self.finished = False  # nothing more can be read
        self.broken = False  # reset, or given up by the kernel
        self.hung = False  # both sides have sent FIN, but not all was read
        self.blocked = False  # the kernel takes no more
        self._rest = b""  # what it did not take
        self._watched: int | None = None  # what epoll watches for; None: not registered
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def peer(self) -> "SocketEnd":
        """The other socket of the connection."""
        return self.out.sink

    @property
    def has_rest(self) -> bool:
        """Whether bytes that were due wait for the kernel."""
        return bool(self._rest)

    def watch(self, epoll: select.epoll, *, paused: bool) -> None:
        """Register with epoll what this end waits for."""
        reads = not (self.finished or self.connecting or paused)
        writes = self.blocked or self.connecting
        wanted: int | None = select.EPOLLIN * reads | select.EPOLLOUT * writes
        # epoll reports errors even where nothing is awaited; while paused they are useful.
        if not wanted and (self.finished or self.hung):
            wanted = None
        if wanted == self._watched:
            return
        if wanted is None:
            epoll.unregister(self.descriptor)
        elif self._watched is None:
            epoll.register(self.descriptor, wanted)
        else:
            epoll.modify(self.descriptor, wanted)
        self._watched = wanted

    @property
    def reads(self) -> bool:
        """Whether epoll reports readable bytes."""
        return bool((self._watched or 0) & select.EPOLLIN)

    def receive(self) -> bytes | None:
        """Read bytes, FIN or RESET. Raises BlockingIOError if there are none yet."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            raise
        except OSError:  # a reset, or the kernel gave up on the other side
            return RESET
        self.finished = data == FIN
        return data

    def send(self, parts: list[bytes]) -> int:
        """Send these bytes after the rest; return how many were sent. Raises OSError on a reset."""
        if self._rest:
            parts = [self._rest, *parts]
        try:
            sent = self.socket.sendmsg(parts)
        except BlockingIOError:
            sent = 0
        self.blocked = sent < sum(map(len, parts))
        self._rest = b"".join(parts)[sent:] if self.blocked else b""
        return sent

    def finish(self) -> None:
        """Send FIN: no more bytes will follow."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """Make `close` reset the connection."""
        with suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)


def reset(sock: socket.socket) -> None:
    """Close a socket with a reset."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
    sock.close()


def joined(
    near: socket.socket, far: socket.socket, up: "LinkShaper[Way]", down: "LinkShaper[Way]"
) -> tuple[SocketEnd, SocketEnd]:
    """Return the two ends of a new connection, near first; far still has to connect."""
    outward, inward = Way(up), Way(down)
    outward.source = inward.sink = SocketEnd(near, outward, inward)
    outward.sink = inward.source = SocketEnd(far, inward, outward)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    outward.sink.connecting = True
    return outward.source, outward.sink
