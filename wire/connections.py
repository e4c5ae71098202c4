"""Who is connected to a listening socket: how many, from where, and what they leave unfinished.

In:  what ZeroMQ's monitor tells of the socket, and which message came over which connection.
Out: connections cut, and counts of why.

ZeroMQ bounds neither connections nor, where a message has many parts, what a peer may send before
its message is complete. Here both have bounds: a connection beyond them is shut down on its
descriptor, which ZeroMQ names, as if the network had done it. Law: a peer that has said something
gives way to nobody who has not; among strangers the address with most of them gives way first, and
there nobody who is still shaking hands to somebody who has just come.
"""

import math
import socket
import struct
import time
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

# Reasons for which a connection is cut.
CROWD: Final = "crowd"  # too many that have not said anything yet, or too many at all
UNFINISHED: Final = "unfinished-message"  # too much of a message that does not end
OF_ONE_KEY: Final = "too-many-of-one-key"
REVOKED: Final = "revoked-key"
CLOSING: Final = "closing"  # it came when the edge was about to stop
SHREDDED: Final = "too-many-frames"  # a message in so many parts that to take it in held others up

_HEARD = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH
_BURST = 256  # events taken in one turn
_UNFINISHED_IN_ALL = 4  # messages of full size that may be under way at once
_SLACK_BYTES = 1 << 16  # of a message: what encryption and framing add, and the handshake
_HEARTBEATS_BPS = 400.0  # bytes a second of an idle device's heartbeats, which are no message
_HANDSHAKE_S = 3.0  # with its first message a handshake takes four round trips, rarely so long
_TOLD_S = 1.0  # in which the bearer of a revoked key may learn so, by asking
_SRCFD = int(zmq.SRCFD)
_AT_ONCE = struct.pack("ii", 1, 0)  # struct linger
_TCP_INFO = 11  # Linux's; the socket module lacks the name before Python 3.14
_RECEIVED_AT = 8 + 24 * 4 + 3 * 8  # struct tcp_info of linux/tcp.h: tcpi_bytes_received, u64


class Bounds(NamedTuple):
    """Of connections in all and of one key; of the bytes of one message."""

    connections: int
    per_owner: int
    message_bytes: int


@dataclass(slots=True)
class _Connection:
    descriptor: int
    peer: str  # an address without its port
    client: bytes = b""  # ZeroMQ's name for it, once it has said something
    owner: bytes = b""
    messages: int = 0
    messages_then: int = 0  # when last looked at
    bytes_then: int = 0  # received when a message was last seen to be complete
    since_s: float = field(default_factory=time.monotonic)  # when that was
    unfinished: int = 0  # bytes received since
    revoked_s: float = math.inf  # when its key was first seen to be off the list
    cut: bool = False

    def hoarded(self, now_s: float) -> int:
        """Bytes that may be of a message under way, where these are worth a thought."""
        hoarded = self.unfinished - int(_HEARTBEATS_BPS * (now_s - self.since_s))
        return hoarded if hoarded > _SLACK_BYTES else 0


class Connections:
    """The connections of one listening socket. One owner: the thread that has the turn."""

    def __init__(self, listening: "zmq.Socket[bytes]", bounds: Bounds) -> None:
        self.monitor = listening.get_monitor_socket(_HEARD)
        self.bounds = bounds
        self.closing = False  # from now on, nobody new
        self.cuts: Counter[str] = Counter()
        self.broken = 0  # ended before a word was said, and not for a key that was refused
        self._listening = listening
        self._denied = 0  # keys refused whose connections have not ended yet
        self._open: dict[int, _Connection] = {}  # by descriptor
        self._strangers: dict[int, _Connection] = {}  # of these, who has not said anything yet
        self._known: dict[bytes, _Connection] = {}  # by ZeroMQ's name
        self._local: int | str | None = None  # our port or path, once bound

    def bound(self, endpoint: str) -> None:
        """The socket listens on this endpoint."""
        tcp = endpoint.startswith("tcp:")
        self._local = urlsplit(endpoint).port if tcp else endpoint.partition("://")[2]

    def __len__(self) -> int:
        return len(self._open)

    @property
    def devices(self) -> int:
        """The different keys (or, without keys, connections) that are connected."""
        return len({connection.owner for connection in list(self._known.values())})

    def has(self, client: bytes) -> bool:
        """Is ``client``, who has said something, still connected?"""
        return client in self._known

    def heard(self, client: bytes, owner: bytes, frame: zmq.Frame) -> None:
        """A message has come from ``client``; ``frame`` is a part of it."""
        connection = self._known.get(client)
        if connection is None:
            self.hear()  # the news that it came may still be unread
            with suppress(zmq.ZMQError):  # a peer of ZMTP 1.0, of whose descriptor ZeroMQ is silent
                connection = self._open.get(frame.get(_SRCFD))
            if connection is None:
                return
            self._introduce(connection, client, owner)
        connection.messages += 1

    def hear(self) -> bool:
        """Take note of who came and went; True if there is more to hear."""
        for _ in range(_BURST):
            if not self.monitor.poll(0):
                return False
            told = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            match told["event"]:
                case zmq.Event.ACCEPTED:
                    self._came(int(told["value"]))
                case zmq.Event.DISCONNECTED:
                    self._went(int(told["value"]))
                case zmq.Event.HANDSHAKE_FAILED_AUTH:
                    self._denied += 1
        return True

    def shredded(self, client: bytes) -> None:
        """A message of ``client`` had far more parts than any message has."""
        connection = self._known.get(client)
        if connection is not None:
            self._cut(connection, SHREDDED)

    def police(self, allowed: Container[bytes] | None) -> None:
        """Cut who sends and sends and never ends its message; call it every now and then.

        allowed: the keys that may be here; None: there are none. Whose key is not among them any
        more has had a moment to be told so.
        """
        now_s = time.monotonic()
        limit = self.bounds.message_bytes + _SLACK_BYTES
        hoards: list[tuple[bool, int, _Connection]] = []
        for connection in self._open.values():
            if connection.owner and allowed is not None and connection.owner not in allowed:
                connection.revoked_s = min(connection.revoked_s, now_s)
                if now_s - connection.revoked_s >= _TOLD_S:
                    self._cut(connection, REVOKED)
            received = self._received(connection.descriptor)
            if connection.messages != connection.messages_then:
                connection.messages_then = connection.messages
                connection.bytes_then, connection.since_s = received, now_s
            connection.unfinished = received - connection.bytes_then
            if connection.unfinished > limit:
                self._cut(connection, UNFINISHED)
            elif hoarded := connection.hoarded(now_s):
                hoards.append((bool(connection.client), -hoarded, connection))
        total = -sum(hoarded for _, hoarded, _ in hoards)
        for _, hoarded, connection in sorted(hoards, key=_stranger_first):
            if total <= _UNFINISHED_IN_ALL * limit:
                break
            total += hoarded
            self._cut(connection, UNFINISHED)

    def close(self) -> None:
        """Listen to the monitor no more."""
        with suppress(zmq.ZMQError):
            self._listening.disable_monitor()
        self.monitor.close(0)

    def _came(self, descriptor: int) -> None:
        with self._borrowed(descriptor) as borrowed:
            peer = "" if borrowed is None else _host(borrowed)
        connection = _Connection(descriptor, peer)
        self._open[descriptor] = self._strangers[descriptor] = connection
        most = self.bounds.connections
        if self.closing:
            self._cut(connection, CLOSING)
        elif len(self._strangers) > max(1, most // 2) or len(self._open) > most:
            crowd = Counter(stranger.peer for stranger in self._strangers.values())
            busiest, _ = crowd.most_common(1)[0]
            theirs = [s for s in self._strangers.values() if s.peer == busiest]
            # were it always the first, a fleet that comes at once would never be done with it
            late = connection.since_s - theirs[0].since_s > _HANDSHAKE_S
            self._cut(theirs[0 if late else -1], CROWD)

    def _went(self, descriptor: int) -> None:
        connection = self._open.pop(descriptor, None)
        self._strangers.pop(descriptor, None)
        if connection is None:
            return
        if self._known.get(connection.client) is connection:
            del self._known[connection.client]
        if not connection.client and not connection.cut:
            if self._denied:
                self._denied -= 1
            else:
                self.broken += 1

    def _introduce(self, connection: _Connection, client: bytes, owner: bytes) -> None:
        """A stranger has said something."""
        self._known.pop(connection.client, None)
        connection.client, connection.owner = client, owner
        self._known[client] = connection
        self._strangers.pop(connection.descriptor, None)
        same = [other for other in self._known.values() if other.owner == owner and not other.cut]
        if len(same) > self.bounds.per_owner:
            self._cut(same[0], OF_ONE_KEY)

    def _cut(self, connection: _Connection, reason: str) -> None:
        self._strangers.pop(connection.descriptor, None)
        if connection.cut:
            return
        connection.cut = True
        self.cuts[reason] += 1
        with self._borrowed(connection.descriptor) as borrowed, suppress(OSError):
            if borrowed is not None:
                # the kernel is to forget it at once, with all that is still on its way
                borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                borrowed.shutdown(socket.SHUT_RDWR)

    def _received(self, descriptor: int) -> int:
        """Bytes that the kernel has received on a TCP connection; 0 where it does not say."""
        with self._borrowed(descriptor) as borrowed:
            if borrowed is None or borrowed.family == socket.AF_UNIX:
                return 0
            with suppress(OSError):
                told = borrowed.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
                if len(told) >= _RECEIVED_AT + 8:
                    count: int = struct.unpack_from("=Q", told, _RECEIVED_AT)[0]
                    return count
        return 0

    @contextmanager
    def _borrowed(self, descriptor: int) -> Iterator[socket.socket | None]:
        """ZeroMQ's connection; None if the number by now stands for something else.

        Without a copy of the descriptor: when connections must be cut there may be none left.
        """
        try:
            borrowed = socket.socket(fileno=descriptor)
        except OSError:
            yield None
            return
        try:
            yield borrowed if self._is_ours(borrowed) else None
        finally:
            borrowed.detach()

    def _is_ours(self, borrowed: socket.socket) -> bool:
        try:
            name = borrowed.getsockname()
        except OSError:  # closed a moment ago
            return False
        return bool((name[1] if isinstance(name, tuple) else name) == self._local)


def _stranger_first(hoard: tuple[bool, int, _Connection]) -> tuple[bool, int]:
    return hoard[:2]


def _host(borrowed: socket.socket) -> str:
    try:
        peer = borrowed.getpeername()
    except OSError:  # gone already
        return ""
    return str(peer[0]) if isinstance(peer, tuple) else ""
