"""The connections of a listening socket, and the bounds on their number and bytes.

In: events of ZeroMQ's monitor, and the connection of each message. Out: connections cut, and counts
of the reasons.

ZeroMQ bounds neither the number of connections nor the bytes of queued and incomplete messages.
`Connections` bounds both: it shuts down an excess connection on its descriptor, as if the network
had failed. The memory watch (`wire.memory_watch`) checks memory in its own thread.

A connection is a stranger until its first message. No stranger displaces a peer that has sent a
message. If there are too many strangers, one is cut, from the address with most strangers: the
oldest, if it has had enough time for a handshake; else the newest, apart from the connection that
just arrived.
"""

import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import zmq

from pilotfish.wire import peer_connection as reasons
from pilotfish.wire.backlog import Backlog
from pilotfish.wire.io_memory import MAX_OVERHEAD_BYTES, OverheadMeter, clear_overhead
from pilotfish.wire.link.tcp import (
    Segments,
    borrow_socket,
    drop_incoming,
    hang_up,
    next_event,
    queued_s,
    read_volume,
    sent_segments,
)
from pilotfish.wire.memory_watch import MEMORY_WATCH, SLACK_BYTES, MemorySample, ReceiveCounter
from pilotfish.wire.peer_connection import PeerConnection

_EVENTS = zmq.Event.LISTENING | zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED
_EVENTS |= zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_UNDECIPHERED: Final = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
_EVENTS_PER_CALL = 256  # maximum number of events read in one call
_MAX_TOTAL_OVERHEAD_BYTES = 2 * MAX_OVERHEAD_BYTES
# Maximum unread bytes of replies: for one connection, and for all connections of a key together.
_MAX_UNREAD, _MAX_UNREAD_PER_KEY = 1 << 17, 8 << 20
_LEAST_FRAME_BYTES = {False: 2, True: 35}  # minimum overhead of a frame (bytes); True: encrypted
_HANDSHAKE_S = 3.0  # enough time (s) for a handshake and a first message: four round trips
# A connection without a sign of life for this time (s) is ended. Cellular paths may be silent for
# seconds and come back. Devices, which wait for replies, give up sooner.
_QUIET_MOST_S = 30.0
_REVOCATION_NOTICE_S = 1.0  # time (s) for a reply that reports the revocation
_CROWDED_S = 8.0  # time (s) for which `crowded` stays true after a cut
_SRCFD = int(zmq.SRCFD)


class Bounds(NamedTuple):
    """Limits on all connections, on the connections of one key, and on the bytes of a message."""

    connections: int
    per_owner: int
    message_bytes: int


class Connections:
    """The connections of one listening socket.

    The serving thread and the memory watch use this object; a lock guards it. overhead: the memory
    meter of an unencrypted socket's context; None: the socket is encrypted. inherited: another
    process listens on the same socket.
    """

    def __init__(
        self,
        listening: "zmq.Socket[bytes]",
        bounds: Bounds,
        overhead: OverheadMeter | None,
        *,
        inherited: bool = False,
    ) -> None:
        self.monitor = listening.get_monitor_socket(_EVENTS)
        self.bounds = bounds
        self.closing = False  # new connections are cut
        self.cuts: Counter[str] = Counter()
        self.broken = 0  # connections that ended before a message, not counting refused keys
        # failed handshakes of clients that have another public key of the edge
        self.undecipherable = 0
        # called for each of these handshakes, with the client's address; "": unknown
        self.on_undecipherable: Callable[[str], object] = lambda address: None
        self.descriptor: int | None = None  # descriptor of the socket that listened first
        self._listening = listening
        self._inherited = inherited
        self._crowded_s = -math.inf  # time of the last cut for lack of room
        self._denied = self._undeciphered = 0  # failed handshakes, until their connections end
        self._open: dict[int, PeerConnection] = {}  # by descriptor
        self._strangers: dict[
            int, PeerConnection
        ] = {}  # connections without a message, by descriptor
        self._known: dict[bytes, PeerConnection] = {}  # by ZeroMQ's routing id
        self._local: int | str | None = None  # the bound port (TCP) or path (ipc)
        self._lock = threading.RLock()  # guards these tables and the monitor
        self.drained = False  # the queue was empty at some time since the last check
        self.waiting = False  # the serving thread found an empty queue and waits for a message
        self.encrypted = overhead is None
        self._overhead = overhead
        self._allowed: Collection[bytes] = ()  # allowed keys at the last check
        self._connection_ended = False  # a connection ended since the memory was last checked
        self._message_count = 0  # messages received from all peers
        self.backlog = Backlog(bounds.message_bytes, keyed=self.encrypted)
        self._rejecting = False  # the kernel drops packets of new peers

    def start(self, endpoint: str) -> None:
        """Start the checks; endpoint: the endpoint to which the socket is bound."""
        tcp = endpoint.startswith("tcp:")
        self._local = urlsplit(endpoint).port if tcp else endpoint.partition("://")[2]
        MEMORY_WATCH.add(self)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def crowded(self) -> bool:
        """Whether a connection was cut for lack of room a moment ago."""
        return time.monotonic() - self._crowded_s < _CROWDED_S

    @property
    def devices(self) -> int:
        """The number of connected keys (or, without keys, of connections)."""
        return len(self.owners())

    def owners(self) -> set[bytes]:
        """Return the connected keys (or, without keys, routing ids)."""
        return {connection.owner for connection in list(self._known.values())}

    def is_connected(self, client: bytes) -> bool:
        """Return whether ``client``, which has sent a message, is still connected."""
        return client in self._known

    def address(self, client: bytes) -> str:
        """Return the address of a client that has sent a message, without a port; "": unknown."""
        connection = self._known.get(client)
        return "" if connection is None else connection.peer

    def note_message(
        self, client: bytes, owner: bytes, frame: zmq.Frame, size: int, frames: int
    ) -> bool:
        """Count a message of this size from ``client``; ``frame``: any of its frames.

        Return False if the message must be dropped because its connection was cut for memory.
        """
        self._message_count += 1
        connection = self._known.get(client)
        if connection is None:
            with self._lock:
                dropped = self.backlog.note_message(client, size, frames)
                if dropped is not None:
                    return not dropped
                connection = self._identify(client, owner, frame)
                if connection is None:
                    self.backlog.note_unidentified(size, frames)
                    return True
        connection.counter.add(size, frames)
        return not connection.drop_messages

    def _identify(self, client: bytes, owner: bytes, frame: zmq.Frame) -> PeerConnection | None:
        """Return the connection of a client's first message; None: the connection has ended."""
        self.read_events()  # the connection's `ACCEPTED` event may be unread
        connection = None
        with suppress(zmq.ZMQError):  # a ZMTP 1.0 peer has no descriptor
            connection = self._open.get(frame.get(_SRCFD))
        # after the sender's connection has ended, its descriptor may be another peer's
        if connection is None or connection.peer not in ("", _peer_address(frame)):
            return None
        self._note_first_message(connection, client, owner)
        return connection

    def queued_s(self, client: bytes) -> float:
        """Return the seconds since a client's last bytes arrived; 0: unknown."""
        connection = self._known.get(client)
        return 0.0 if connection is None else queued_s(connection.descriptor)

    def segments(self, client: bytes) -> Segments | None:
        """Return the counters of segments that were sent to a client; None: unknown."""
        connection = self._known.get(client)
        return None if connection is None else sent_segments(connection.descriptor)

    def has_room(self, client: bytes, size: int) -> bool:
        """Return whether a reply of ``size`` bytes may be sent, given its key's unread replies.

        A single reply may have any length, and each connection may have `_MAX_UNREAD` bytes.
        """
        connection = self._known.get(client)
        if connection is None or connection.sent - connection.acknowledged + size <= _MAX_UNREAD:
            return True
        with self._lock:
            unread = self._unread(connection)
            if not unread or unread + size <= _MAX_UNREAD:
                return True
            connections = [each for each in self._known.values() if each.owner == connection.owner]
            waiting = [each for each in connections if each.sent - each.acknowledged > SLACK_BYTES]
            return size + sum(map(self._unread, waiting)) <= _MAX_UNREAD_PER_KEY

    def note_sent(self, client: bytes, size: int, frames: int) -> None:
        """Count the bytes of a reply that was sent."""
        connection = self._known.get(client)
        if connection is not None:
            connection.sent += size + frames * _LEAST_FRAME_BYTES[self.encrypted]

    def _unread(self, connection: PeerConnection) -> int:
        """Return the number of bytes sent and not acknowledged, by the kernel's count for TCP."""
        with borrow_socket(connection.descriptor, self._is_ours) as lent:
            counters = read_volume(lent)
        # the kernel's count includes heartbeats and the handshake
        connection.sent = max(connection.sent, 0 if counters is None else counters.acknowledged)
        connection.acknowledged = connection.sent if counters is None else counters.acknowledged
        return connection.sent - connection.acknowledged

    def read_events(self) -> bool:
        """Read the monitor's events; return whether there are more."""
        with self._lock:
            for _ in range(_EVENTS_PER_CALL):
                match next_event(self.monitor):
                    case None:
                        return False
                    case zmq.Event.ACCEPTED, descriptor:
                        self._add(descriptor)
                    case zmq.Event.DISCONNECTED, descriptor:
                        self._remove(descriptor)
                    case zmq.Event.HANDSHAKE_FAILED_AUTH, _:
                        self._denied += 1
                    case zmq.Event.HANDSHAKE_FAILED_PROTOCOL, reason:
                        self._undeciphered += reason == _UNDECIPHERED
                    case zmq.Event.LISTENING, descriptor if self.descriptor is None:
                        self.descriptor = descriptor
        return True

    def cut_fragmented(self, client: bytes) -> None:
        """Cut the connection of ``client`` for a message with far too many parts."""
        connection = self._known.get(client)
        if connection is not None:
            with self._lock:
                self._cut(connection, reasons.FRAGMENTED)

    def cut_revoked(self, allowed: Collection[bytes] | None) -> None:
        """Cut connections of keys that were removed from the allow-list; must be called regularly.

        allowed: the keys on the list; None: there is no list. A connection is cut
        `_REVOCATION_NOTICE_S` after its revocation, so that a reply can report it first. Strangers
        are cut at once, since their keys are unknown: the gate checks them when they reconnect.
        """
        if allowed is None:
            return
        now_s = time.monotonic()
        with self._lock:
            if allowed is not self._allowed:
                if not set(self._allowed) <= set(allowed):
                    for stranger in [*self._strangers.values()]:
                        self._cut(stranger, reasons.REVOKED)
                self._allowed = allowed
            for connection in self._open.values():
                if connection.owner and connection.owner not in allowed:
                    connection.revoked_s = min(connection.revoked_s, now_s)
                    if now_s - connection.revoked_s >= _REVOCATION_NOTICE_S:
                        self._cut(connection, reasons.REVOKED)

    def check_memory(self, sample: MemorySample) -> bool:
        """Cut peers with too many bytes of queued or incomplete messages.

        Return whether ended connections still have queued messages.
        """
        with self._lock:
            drained, self.drained = self.drained or self.waiting, False
            self.read_events()
            connected = len(self._open)
            if self._overhead is not None:
                self._overhead.measure()
            counted = []
            for connection in self._open.values():
                with borrow_socket(connection.descriptor, self._is_ours) as lent:
                    counters = connection.liveness.poll(lent)
                if counters is not None:
                    connection.counter.update(counters, sample, drained=drained)
                    counted.append(connection)
            # new bytes that open connections hold are no ended connection's
            explained = sum(
                min(each.counter.new_bytes, each.counter.held_bytes) for each in counted
            )
            grown = max(0, sample.grown_bytes - explained)
            self.backlog.check(self._message_count, connected, grown, drained=drained)
            self._reject_new_peers(self.backlog.is_full())
            if self._overhead is not None:
                connection_ended = self._connection_ended or len(counted) < len(self._open)
                self._connection_ended = False
                self._overhead.charge(
                    [each.counter for each in counted], connection_ended=connection_ended
                )
            present = [each for each in counted if not each.cut]
            self._cut_costly([each for each in present if each.counter.overhead_bytes])
            holders = [each for each in present if each.counter.held_bytes]
            for connection, reason in self.backlog.excess(holders):
                self._cut(connection, reason)
            for connection in counted:
                self._cut_if_quiet(connection)
            return bool(len(self.backlog))

    def _reject_new_peers(self, reject: bool) -> None:
        """Make the kernel drop packets of new peers, or stop that; does nothing with keys."""
        if reject != self._rejecting and not self.encrypted and not self._inherited:
            with borrow_socket(self.descriptor, self._is_ours) as lent:
                drop_incoming(lent, reject)
            self._rejecting = reject

    def _cut_if_quiet(self, connection: PeerConnection) -> None:
        """End a connection without signs of life."""
        if connection.client:
            if connection.liveness.quiet_s > _QUIET_MOST_S:
                self._cut(connection, reasons.QUIET)
        elif connection.liveness.stuck:
            with borrow_socket(connection.descriptor, self._is_ours) as lent:
                hang_up(lent)

    def _cut_costly(self, charged: list[PeerConnection]) -> None:
        """Cut connections with tiny frames that take far more memory than bytes on the wire."""
        total = sum(each.counter.overhead_bytes for each in charged)
        charged.sort(key=lambda each: (bool(each.client), -each.counter.overhead_bytes))
        for connection in charged:
            if (
                connection.counter.overhead_bytes > MAX_OVERHEAD_BYTES
                or total > _MAX_TOTAL_OVERHEAD_BYTES
            ):
                self._cut(connection, reasons.UNFINISHED)
                total -= connection.counter.overhead_bytes
        if cut := [each.counter for each in charged if each.cut]:
            clear_overhead(cut, [each.counter for each in charged if not each.cut])

    def close(self) -> None:
        """Stop reading the monitor."""
        MEMORY_WATCH.remove(self)
        with suppress(zmq.ZMQError):
            self._listening.disable_monitor()
        self.monitor.close(0)

    def _add(self, descriptor: int) -> None:
        with borrow_socket(descriptor, self._is_ours) as lent:
            peer = "" if lent is None else _peer_host(lent)
        connection = PeerConnection(descriptor, peer, ReceiveCounter(self.encrypted))
        self._open[descriptor] = self._strangers[descriptor] = connection
        most = self.bounds.connections
        if self.closing:
            self._cut(connection, reasons.CLOSING)
        elif self.backlog.is_full():
            self._cut(connection, reasons.BACKLOG)
        elif len(self._strangers) > max(1, most // 2) or len(self._open) > most:
            crowd = Counter(stranger.peer for stranger in self._strangers.values())
            busiest, _ = crowd.most_common(1)[0]
            theirs = [s for s in self._strangers.values() if s.peer == busiest]
            # if the oldest were always cut, devices that connect together would never finish
            late = connection.accepted_s - theirs[0].accepted_s > _HANDSHAKE_S
            # The newcomer stays: it may finish its handshake at once, as the others did not.
            newest = -2 if theirs[-1] is connection and len(theirs) > 1 else -1
            self._cut(theirs[0 if late else newest], reasons.CROWD)
            self._crowded_s = time.monotonic()

    def _remove(self, descriptor: int) -> None:
        connection = self._open.pop(descriptor, None)
        self._strangers.pop(descriptor, None)
        if connection is None:
            return
        self._connection_ended = True
        if self._known.get(connection.client) is connection:
            del self._known[connection.client]
        self.backlog.add(connection, self._message_count)
        if not connection.client and not connection.cut:
            if self._denied:
                self._denied -= 1
            elif self._undeciphered:
                self._undeciphered -= 1
                self.undecipherable += 1
                self.on_undecipherable(connection.peer)
            else:
                self.broken += 1

    def _note_first_message(self, connection: PeerConnection, client: bytes, owner: bytes) -> None:
        """Note the first message of a stranger, which names its key."""
        self._known.pop(connection.client, None)
        connection.client, connection.owner = client, owner
        self._known[client] = connection
        self._strangers.pop(connection.descriptor, None)
        same = [each for each in self._known.values() if each.owner == owner and not each.cut]
        if len(same) > self.bounds.per_owner:
            # cut a quiet connection, which its device has probably replaced; else the oldest
            quiet = [each for each in same[:-1] if each.liveness.quiet]
            self._cut((quiet or same)[0], reasons.PER_KEY)

    def _cut(self, connection: PeerConnection, reason: str) -> None:
        self._strangers.pop(connection.descriptor, None)
        if connection.cut:
            return
        connection.note_cut(reason)
        self.cuts[reason] += 1
        with borrow_socket(connection.descriptor, self._is_ours) as lent:
            hang_up(lent)

    def _is_ours(self, lent: socket.socket) -> bool:
        name = lent.getsockname()
        return bool((name[1] if isinstance(name, tuple) else name) == self._local)


def _peer_address(frame: zmq.Frame) -> str:
    return str(frame.get("Peer-Address")).partition("%")[0]  # removes the interface


def _peer_host(lent: socket.socket) -> str:
    try:
        peer = lent.getpeername()
    except OSError:  # the connection has ended
        return ""
    return str(peer[0]) if isinstance(peer, tuple) else ""
