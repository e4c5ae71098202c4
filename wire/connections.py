"""The peers of a listening socket: how many, from where, and what they make it hold.

In:  what ZeroMQ's monitor tells of the socket, and which message came over which connection.
Out: connections cut, and counts of why.

ZeroMQ bounds neither connections nor the bytes that it holds of a peer's messages, complete or not.
Here both have bounds: a connection beyond them is shut down on its descriptor, which ZeroMQ names,
as if the network had done it. The warden (`wire.warden`) weighs them in its own thread. Law: a peer
that has said something never gives way to a stranger, which has not; among strangers the address
with most of them gives way first, and of these the newest, unless the oldest has had the time that
a handshake takes.
"""

import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from pilotfish.wire.link.tcp import Volume, borrowed, hang_up, volume
from pilotfish.wire.warden import SLACK_BYTES, WARDEN, Glance, Intake

# Reasons for which a connection is cut.
CROWD: Final = "crowd"  # too many that have not said anything yet, or too many at all
UNFINISHED: Final = "unfinished-message"  # too much of a message that does not end
HOARD: Final = "too-much-of-one-key"  # of messages that have not been taken in yet
OF_ONE_KEY: Final = "too-many-of-one-key"
REVOKED: Final = "revoked-key"
CLOSING: Final = "closing"  # it came when the edge was about to stop
SHREDDED: Final = "too-many-frames"  # a message in so many parts that to take it in held others up

_HEARD = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH
_BURST = 256  # events taken in one turn
# Messages of full size that may be under way at once: in all; and of one key where it has several,
# or of all strangers, whose keys are not told before they are heard.
_UNFINISHED_IN_ALL, _OF_ONE_KEY_TIMES = 4, 0.5
# Bytes of replies that a connection, and a key with all of its own, may leave untaken.
_UNREAD_EACH, _UNREAD_OF_ONE_KEY = 1 << 17, 8 << 20
_LEAST_FRAME_BYTES = {False: 2, True: 35}  # what a frame has on the wire besides; encrypted
_HANDSHAKE_S = 3.0  # with its first message a handshake takes four round trips, rarely so long
_TOLD_S = 1.0  # in which the bearer of a revoked key may learn so, by asking
_SRCFD = int(zmq.SRCFD)


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
    came_s: float = field(default_factory=time.monotonic)
    intake: Intake = field(default_factory=Intake)
    sent: int = 0  # bytes on the wire, at least
    acknowledged: int = 0  # of these, when last looked at
    revoked_s: float = math.inf  # when its key was first seen to be off the list
    cut: bool = False


class Connections:
    """The connections of one listening socket.

    One owner, the thread that has the turn; and the warden, which looks at them in between.
    """

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
        self._turn = threading.RLock()  # to change this table, and to read the news of it
        self.drained = False  # no message was there that had not been handed out
        self.encrypted = False

    def bound(self, endpoint: str) -> None:
        """The socket listens on this endpoint."""
        tcp = endpoint.startswith("tcp:")
        self._local = urlsplit(endpoint).port if tcp else endpoint.partition("://")[2]
        WARDEN.join(self)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def devices(self) -> int:
        """The different keys (or, without keys, connections) that are connected."""
        return len({connection.owner for connection in list(self._known.values())})

    def has(self, client: bytes) -> bool:
        """Is ``client``, who has said something, still connected?"""
        return client in self._known

    def heard(self, client: bytes, owner: bytes, frame: zmq.Frame, size: int, frames: int) -> None:
        """A message of so many bytes and frames has come from ``client``; ``frame`` is one."""
        connection = self._known.get(client)
        if connection is None:
            self.hear()  # the news that it came may still be unread
            with suppress(zmq.ZMQError):  # a peer of ZMTP 1.0, of whose descriptor ZeroMQ is silent
                connection = self._open.get(frame.get(_SRCFD))
            if connection is None:
                return
            self._introduce(connection, client, owner)
        connection.intake.took(size, frames, self.encrypted)

    def has_room(self, client: bytes, size: int) -> bool:
        """May a reply of so many bytes be sent, or have too many not been taken by its key yet?

        One reply may, whatever its length, and a connection's first so many bytes.
        """
        connection = self._known.get(client)
        if connection is None or connection.sent - connection.acknowledged + size <= _UNREAD_EACH:
            return True
        with self._turn:
            unread = self._unread(connection)
            if not unread or unread + size <= _UNREAD_EACH:
                return True
            theirs = [one for one in self._known.values() if one.owner == connection.owner]
            waiting = [one for one in theirs if one.sent - one.acknowledged > SLACK_BYTES]
            return size + sum(map(self._unread, waiting)) <= _UNREAD_OF_ONE_KEY

    def sent(self, client: bytes, size: int, frames: int) -> None:
        """A reply was sent."""
        connection = self._known.get(client)
        if connection is not None:
            connection.sent += size + frames * _LEAST_FRAME_BYTES[self.encrypted]

    def _unread(self, connection: _Connection) -> int:
        """Bytes that were sent and not taken in yet, as far as the kernel says so (TCP's does)."""
        crossed = self._volume(connection)
        # heartbeats and the handshake were acknowledged, too
        connection.sent = max(connection.sent, 0 if crossed is None else crossed.acknowledged)
        connection.acknowledged = connection.sent if crossed is None else crossed.acknowledged
        return connection.sent - connection.acknowledged

    def hear(self) -> bool:
        """Take note of who came and went; True if there is more to hear."""
        with self._turn:
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
            with self._turn:
                self._cut(connection, SHREDDED)

    def police(self, allowed: Container[bytes] | None) -> None:
        """Cut connections whose key was taken off the list; call it every now and then.

        allowed: the keys that may be here; None: there are none. Whose key is not among them any
        more has had a moment to be told so.
        """
        if allowed is None:
            return
        now_s = time.monotonic()
        with self._turn:
            for connection in self._open.values():
                if connection.owner and connection.owner not in allowed:
                    connection.revoked_s = min(connection.revoked_s, now_s)
                    if now_s - connection.revoked_s >= _TOLD_S:
                        self._cut(connection, REVOKED)

    def weigh(self, glance: Glance) -> bool:
        """Cut peers that make us hold too much: of messages without end, or too many of them."""
        with self._turn:
            self.hear()
            drained, self.drained = self.drained, False
            hoards = []
            for connection in self._open.values():
                crossed = None if connection.cut else self._volume(connection)
                if crossed is not None and connection.intake.weigh(
                    crossed.received, glance, drained=drained
                ):
                    hoards.append(connection)
            self._bound(hoards, glance)
        return False

    def _bound(self, hoards: list[_Connection], glance: Glance) -> None:
        """Cut those beyond what may be held: strangers first, then of the keys that have most."""
        limit = self.bounds.message_bytes + SLACK_BYTES
        by_key: Counter[bytes] = Counter()
        for connection in hoards:
            by_key[connection.owner] += connection.intake.hoarded

        def last_to_go(connection: _Connection) -> tuple[bool, int, int]:
            known, key = bool(connection.client), by_key[connection.owner]
            # of a key's messages the one goes on that is nearest to its end
            hoarded = connection.intake.hoarded
            return (known, -key, hoarded) if known else (known, 0, -hoarded)

        hoards.sort(key=last_to_go)
        total = by_key.total()
        swollen = [each for each in hoards if each.intake.swollen(glance, total)]
        for connection in swollen[:1]:  # the others may have grown by its doing
            self._cut(connection, UNFINISHED)
        for connection in hoards:
            hoarded = connection.intake.hoarded
            alone = hoarded > limit
            if alone or total > _UNFINISHED_IN_ALL * limit:
                self._cut(connection, UNFINISHED)
            elif hoarded < by_key[connection.owner] > _OF_ONE_KEY_TIMES * limit:
                self._cut(connection, HOARD)  # there are others of that key, or not known either
            if connection.cut:
                total -= hoarded
                by_key[connection.owner] -= hoarded

    def close(self) -> None:
        """Listen to the monitor no more."""
        WARDEN.leave(self)
        with suppress(zmq.ZMQError):
            self._listening.disable_monitor()
        self.monitor.close(0)

    def _came(self, descriptor: int) -> None:
        with borrowed(descriptor, self._is_ours) as lent:
            peer = "" if lent is None else _host(lent)
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
            late = connection.came_s - theirs[0].came_s > _HANDSHAKE_S
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
        with self._turn:
            self._known.pop(connection.client, None)
            connection.client, connection.owner = client, owner
            self._known[client] = connection
            self._strangers.pop(connection.descriptor, None)
            same = [each for each in self._known.values() if each.owner == owner and not each.cut]
            if len(same) > self.bounds.per_owner:
                self._cut(same[0], OF_ONE_KEY)

    def _cut(self, connection: _Connection, reason: str) -> None:
        self._strangers.pop(connection.descriptor, None)
        if connection.cut:
            return
        connection.cut = True
        self.cuts[reason] += 1
        with borrowed(connection.descriptor, self._is_ours) as lent:
            hang_up(lent)

    def _volume(self, connection: _Connection) -> Volume | None:
        """What has crossed a connection; None where the kernel does not say, or it has ended."""
        with borrowed(connection.descriptor, self._is_ours) as lent:
            return volume(lent)

    def _is_ours(self, lent: socket.socket) -> bool:
        name = lent.getsockname()
        return bool((name[1] if isinstance(name, tuple) else name) == self._local)


def _host(lent: socket.socket) -> str:
    try:
        peer = lent.getpeername()
    except OSError:  # gone already
        return ""
    return str(peer[0]) if isinstance(peer, tuple) else ""
