"""A connection through the emulator: two sockets, and a flow in each direction."""

import select
import socket
import struct
from contextlib import suppress

from pilotfish.emulation.shaper import FIN, RESET, SEGMENT_BYTES, Flow, LinkShaper

# Bounds of the kernel's receive buffer (bytes a socket); bytes pass it before the emulated queue.
# A small buffer blocks the sender soon, so that it notices the link's rate.
_LEAST_RECEIVED, _MOST_RECEIVED = 2304, 256 * 1024
_READ_BYTES = 43 * SEGMENT_BYTES
_SEND_BYTES = 256 * 1024
_SEND_PARTS = 1024  # maximum number of buffers in one `sendmsg` (IOV_MAX)
_LINGER_0 = struct.pack("ii", 1, 0)  # SO_LINGER with 0 s: `close` sends a reset


class DirectedFlow(Flow):
    """A flow with its shaper and its two ends."""

    source: "SocketEnd"
    sink: "SocketEnd"

    def __init__(self, shaper: "LinkShaper[DirectedFlow]") -> None:
        super().__init__()
        self.shaper = shaper
        self.finished = False  # the flow's FIN was delivered

    def take_due(self, now: float) -> list[bytes]:
        """Remove and return the bytes that are due, up to a FIN, a RESET or `_SEND_BYTES`."""
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
    """One socket: bytes read go into the flow ``out``, bytes of the flow ``into`` are sent."""

    def __init__(self, sock: socket.socket, out: DirectedFlow, into: DirectedFlow) -> None:
        self.socket = sock
        self.descriptor = sock.fileno()
        self.out = out
        self.into = into
        self.connecting = False
        self.finished = False  # no more bytes can be read
        self.broken = False  # the connection was reset, or the kernel gave up on it
        self.hung = False  # both sides have sent FIN; some bytes are unread
        self.blocked = False  # the kernel's send buffer is full
        self._rest = b""  # bytes that the kernel did not accept
        self._watched: int | None = None  # events registered with epoll; None: not registered
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def peer(self) -> "SocketEnd":
        """The other socket of the connection."""
        return self.out.sink

    @property
    def has_rest(self) -> bool:
        """Whether some due bytes did not fit into the kernel's send buffer yet."""
        return bool(self._rest)

    def watch(self, epoll: select.epoll, *, paused: bool) -> None:
        """Register the events of this end with epoll."""
        reads = not (self.finished or self.connecting or paused)
        writes = self.blocked or self.connecting
        wanted: int | None = select.EPOLLIN * reads | select.EPOLLOUT * writes
        # epoll reports errors even if no event is registered; a paused end needs these reports
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

    @property
    def must_wait(self) -> bool:
        """Whether this end must pause because the link's queue, its flow or the peer is full."""
        shaper, held = self.out.shaper, self.out.held_bytes
        stuck = self.peer.blocked and held >= shaper.buffer_bytes
        return shaper.full or self.out.full or stuck

    def receive(self) -> bytes | None:
        """Return received bytes, FIN or RESET; raises BlockingIOError if nothing has arrived."""
        room = self.out.shaper.room
        size = max(SEGMENT_BYTES, min(_READ_BYTES, room - room % SEGMENT_BYTES))
        try:
            data = self.socket.recv(size)
        except BlockingIOError:
            raise
        except OSError:  # a reset, or the kernel gave up on the peer
            return RESET
        self.finished = data == FIN
        return data

    def send(self, parts: list[bytes]) -> int:
        """Send the rest of the last call and ``parts``; return the number of bytes sent.

        Raises OSError if the connection was reset.
        """
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
        """Send FIN."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """Make `close` reset the connection."""
        with suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)


def limit_received(sock: socket.socket, shaper: LinkShaper[DirectedFlow]) -> None:
    """Bound the kernel's receive buffer by the link's queue.

    Accepted connections inherit both options from their listener. TCP's segments get the emulated
    size: with the loopback's 64 KiB, a sender would wait until a whole segment fits.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
    size = max(_LEAST_RECEIVED, min(shaper.buffer_bytes // 2, _MOST_RECEIVED))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


def reset(sock: socket.socket) -> None:
    """Close a socket with a reset."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
    sock.close()


def join_sockets(
    near: socket.socket,
    far: socket.socket,
    up: "LinkShaper[DirectedFlow]",
    down: "LinkShaper[DirectedFlow]",
) -> tuple[SocketEnd, SocketEnd]:
    """Make the two ends of a new connection, near first; ``far`` is still connecting."""
    outward, inward = DirectedFlow(up), DirectedFlow(down)
    outward.source = inward.sink = SocketEnd(near, outward, inward)
    outward.sink = inward.source = SocketEnd(far, inward, outward)
    limit_received(far, down)
    outward.sink.connecting = True
    return outward.source, outward.sink
