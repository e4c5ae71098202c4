"""The edge's listening ZeroMQ socket, and the socket functions that device and edge share.

`Listener` is the edge's ROUTER, `wire.channel.EdgeChannel` the device's DEALER. Both count bytes as
the lengths of the frames that they hand to ZeroMQ, and return frames as views of ZeroMQ's memory.
Neither is thread-safe: each has one owner.
"""

import errno
import os
import socket as sockets
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import zmq

from pilotfish.base.errors import ListenError, MalformedError, TooLargeError
from pilotfish.wire.access import DOMAIN, Gate
from pilotfish.wire.address import literal_address, require_listenable
from pilotfish.wire.connections import Bounds, Connections
from pilotfish.wire.io_memory import OverheadMeter
from pilotfish.wire.keys import EdgeKeys
from pilotfish.wire.link.liveness import HEARTBEAT_S
from pilotfish.wire.link.tcp import Segments
from pilotfish.wire.messages import MAX_FRAMES, Buffer, encode
from pilotfish.wire.rollover import KeyRollover

# Time-out of a handshake. It takes four round trips, each of which may take seconds over a
# satellite or a slow path with full queues. `wire.connections` bounds the number of strangers.
HANDSHAKE_MS = 30_000
# Maximum number of queued replies per peer: a client that does not read loses only its own replies.
# ZeroMQ frees the queue in batches of half its length, so only half of the queue is sure to be
# free.
_SEND_QUEUE = 128
# No bound on received messages: with a bound, libzmq 4.3.5 can end the process. It stops reading
# when a queue is full; if the peer then hangs up, the next heartbeat fails an assertion.
# `wire.memory_watch` bounds the memory.
_RECEIVE_QUEUE = 0
_LOCAL_RECEIVE_QUEUE = 16  # maximum number of received messages; without heartbeats a bound is safe
_BACKLOG = 256  # maximum number of connections that wait in the kernel to be accepted
_MOST_PARTS = MAX_FRAMES + 3  # parts read of a message: address, header, and one frame too many
_PARTS_PER_TURN = 1000  # maximum number of excess parts dropped in one call
_MAX_DROPPED_PARTS = 50 * _PARTS_PER_TURN  # then the client is cut, and its key banned

_UNKNOWN_ADDRESS = (
    "no interface of this machine has this name or address. Write an address that it has, or "
    "tcp://*:{port} (all IPv4 addresses) or tcp://[::]:{port} (all IPv4 and IPv6 addresses)."
)
_BIND_ERRORS = {
    errno.ENODEV: _UNKNOWN_ADDRESS,
    errno.EADDRNOTAVAIL: _UNKNOWN_ADDRESS,
    errno.EADDRINUSE: "another process listens there. Stop it, or use another port.",
    errno.EACCES: "ports below 1024 are reserved. Use a higher port, or let systemd open this one.",
}

# Plain integers, because arithmetic on pyzmq's enums costs microseconds a message.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)


class Envelope(NamedTuple):
    """A received message. ``owner``: the client's key; without keys its routing id.

    queued_ns: returns the time that the message waited here. It asks the kernel (3 µs), so it is
    not called for a refused message. segments: returns the counters of the TCP segments that were
    sent to the client; None: unknown.
    """

    client: bytes
    owner: bytes
    header: Buffer
    frames: Sequence[Buffer]
    size: int
    queued_ns: Callable[[], int] = int
    segments: Callable[[], Segments | None] = lambda: None


def configure_socket(socket: "zmq.Socket[bytes]", endpoint: str, message_bytes: int) -> None:
    """Set the socket options that device and edge share."""
    socket.linger = 0
    socket.maxmsgsize = message_bytes
    socket.sndhwm = _SEND_QUEUE
    if endpoint.startswith(
        "ipc://"
    ):  # the kernel does not count a local socket's bytes, and its path never fails
        socket.rcvhwm = _LOCAL_RECEIVE_QUEUE
    else:
        socket.rcvhwm = _RECEIVE_QUEUE
        socket.heartbeat_ivl = int(HEARTBEAT_S * 1000)
        socket.heartbeat_timeout = 0  # ZeroMQ never ends a connection; `wire.link.liveness` decides
    socket.ipv6 = "[" in endpoint  # for host names, `DualStack` decides


def is_loopback(endpoint: str) -> bool:
    """Return whether an endpoint cannot be reached from other machines."""
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    try:
        host = urlsplit(endpoint).hostname or ""
    except ValueError:  # brackets that do not match
        return False
    address = literal_address(host)
    return host == "localhost" if address is None else address.is_loopback


def is_own_host(header: str, names: Collection[str]) -> bool:
    """Return whether a ``Host`` header is an address, ``localhost``, or one of ``names``.

    If a foreign page directs a browser here (DNS rebinding), the browser sends the page's host
    name. A request without ``Host`` is not a browser's. names: in lower case.
    """
    try:
        host = (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:  # brackets that do not match
        return False
    known = host == "localhost" or host in names or literal_address(host) is not None
    return not header or known


class Listener:
    """The edge's socket for many devices; a device is identified by its CURVE key.

    descriptor: an inherited listening socket, used in place of ``endpoint``. After this listener
    closes, connections still reach the process that opened that socket.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        keys: EdgeKeys | None,
        bounds: Bounds,
        descriptor: int | None = None,
    ) -> None:
        if descriptor is not None:
            endpoint = _endpoint_of(descriptor)
        require_listenable(endpoint)
        if keys is None and not is_loopback(endpoint):
            raise ListenError(
                f"Without keys the edge listens on loopback only, not on {endpoint}. "
                "Make keys with `pilotfish keys new edge` and name their folder with --keys."
            )
        overhead = None if keys else OverheadMeter(context)
        self.gate = Gate(context, keys.allowed) if keys else None
        self.socket = context.socket(zmq.ROUTER)
        # a single frame may be as long as a message; `check_size` bounds the sum
        configure_socket(self.socket, endpoint, bounds.message_bytes)
        self.socket.router_mandatory = True  # raise for replies that cannot be delivered
        self.socket.handshake_ivl = HANDSHAKE_MS
        self.socket.backlog = _BACKLOG
        if keys is not None:
            self.socket.zap_domain = DOMAIN
            self.socket.curve_server = True
            self.socket.curve_secretkey = keys.secret
        self._arrivals = zmq.Poller()  # a poll is faster than reading the socket's events
        self._arrivals.register(self.socket, zmq.POLLIN)
        inherited = descriptor is not None
        self.connections = Connections(self.socket, bounds, overhead, inherited=inherited)
        if self.gate is not None:
            self.gate.is_full = self.connections.backlog.is_full
        # client and owner of a message with too many parts, and the number of parts dropped
        self._fragmented: tuple[bytes, bytes] | None = None
        self._dropped_parts = 0
        self._arrived_ns = 0  # time at which the next message was noticed; 0: not yet
        if descriptor is not None:
            os.set_blocking(descriptor, False)  # otherwise ZeroMQ could block in `accept`
            self.socket.setsockopt(zmq.USE_FD, descriptor)
        try:
            _bind(self.socket, endpoint)
        except zmq.ZMQError as error:
            self.close()
            why = _BIND_ERRORS.get(error.errno or 0, f"{error}.").format(
                port=endpoint.rpartition(":")[2]
            )
            raise ListenError(f"The edge cannot listen on {endpoint}: {why}") from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.connections.start(self.endpoint)
        self.rollover: KeyRollover | None = None
        if keys is not None and self.gate is not None:
            self.rollover = KeyRollover(self.socket, self.gate, keys.secret, _BACKLOG)
            self.connections.on_undecipherable = self.rollover.note_undecipherable

    def set_secret_keys(self, secret: bytes, former: bytes | None) -> None:
        """Accept new connections with these secret keys only; both must be keys of this edge.

        Raises `ListenError`, and changes nothing, if these keys need a restart.
        """
        if self.rollover is not None:
            self.connections.read_events()
            self.rollover.set_secret_keys(self.connections.descriptor, secret, former)

    def receive(self) -> Envelope | None:
        """Return the next message; None: there is none, or it was dropped."""
        if self._fragmented is not None:
            self._drop_parts(self._fragmented)
            return None
        try:
            first, *parts = receive_parts(self.socket)
        except zmq.Again:
            self.connections.drained = True
            return None
        client, buffers = first.bytes, [part.buffer for part in parts]
        owner = str(first.get("User-Id")).encode() if self.gate else client
        size = sum(map(len, buffers))
        accepted = self.connections.note_message(client, owner, first, size, len(parts))
        if len(parts) == _MOST_PARTS - 1 and parts[-1].more:
            self._fragmented, self._dropped_parts = (client, owner), 0
        if not accepted:
            return None
        header = buffers[0] if buffers else b""
        return Envelope(
            client,
            owner,
            header,
            buffers[1:],
            size,
            self._queue_timer(client),
            partial(self.connections.segments, client),
        )

    def _queue_timer(self, client: bytes) -> Callable[[], int]:
        """Return a function that computes the time (ns) that the newest message waited here."""
        now_ns = time.monotonic_ns()
        arrived_ns, self._arrived_ns = self._arrived_ns or now_ns, 0
        return lambda: max(now_ns - arrived_ns, int(self.connections.queued_s(client) * 1e9))

    def _drop_parts(self, sender: tuple[bytes, bytes]) -> None:
        """Drop some parts of a message with far too many.

        No other message can be received before its last part. Between two calls, the edge sends
        verdicts and runs passes. After `_MAX_DROPPED_PARTS` the client is cut and its key banned.
        """
        for _ in range(_PARTS_PER_TURN):
            if not self.socket.recv(_NOBLOCK, copy=False).more:
                self._fragmented = None
                return
        self._dropped_parts += _PARTS_PER_TURN
        if self._dropped_parts == _MAX_DROPPED_PARTS:
            client, owner = sender
            self.connections.cut_fragmented(client)
            if self.gate is not None:
                self.gate.ban(owner)

    @property
    def has_message(self) -> bool:
        """Whether a message has arrived; without a message, this is cheaper than `receive`."""
        if self._arrivals.poll(0):
            self._arrived_ns = self._arrived_ns or time.monotonic_ns()
            return True
        self.connections.drained = True
        return False

    def check_drained(self) -> None:
        """Note an empty queue for the memory watch; must be called regularly."""
        if not self._arrivals.poll(0):
            self.connections.drained = True

    def send(self, client: bytes, message: msgspec.Struct, frames: Sequence[Buffer] = ()) -> int:
        """Send without waiting; return the message's size in bytes.

        Raises `zmq.ZMQError` for a client that has disconnected or does not read.
        """
        header = encode(message)
        size = len(header) + sum(map(len, frames))
        if not self.connections.has_room(client, size):
            raise zmq.Again
        send_parts(self.socket, [client, header, *frames])
        self.connections.note_sent(client, size, 1 + len(frames))
        return size

    def stop_accepting(self) -> None:
        """Refuse new connections; keep the open connections, which an unbind would end."""
        self.connections.closing = True

    def close(self, linger_s: float = 0.0) -> None:
        """Close the sockets; unsent messages have ``linger_s`` to leave."""
        self.connections.close()
        self.socket.close(int(linger_s * 1000))
        if self.gate is not None:
            self.gate.close()


def _endpoint_of(descriptor: int) -> str:
    """Return the endpoint of an inherited socket."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as listening:
            listens = listening.getsockopt(sockets.SOL_SOCKET, sockets.SO_ACCEPTCONN)
            name = listening.getsockname()
    except OSError as error:
        raise ListenError(f"The inherited socket cannot be used: {error.strerror}.") from error
    if not listens:
        raise ListenError(
            "The inherited socket does not listen: use ListenStream= in its systemd unit."
        )
    if not isinstance(name, tuple):
        return f"ipc://{name}"
    return f"tcp://[{name[0]}]:{name[1]}" if ":" in name[0] else f"tcp://{name[0]}:{name[1]}"


def _bind(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Bind the socket; for a name without an IPv4 address, to its IPv6 address."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno != errno.ENODEV or socket.ipv6:
            raise
        socket.ipv6 = True
        socket.bind(endpoint)


def send_parts(socket: "zmq.Socket[bytes]", parts: Sequence[Buffer]) -> None:
    """Send one message without waiting.

    Long parts are passed as views, which must not change until ZeroMQ has sent them.
    """
    last = len(parts) - 1
    for at, part in enumerate(parts):
        more = _MORE if at < last else 0
        try:
            socket.send(part, _NOBLOCK | more, copy=len(part) < zmq.COPY_THRESHOLD)
        except zmq.Again:
            if at and more:
                # The connection ended within this message, so ZeroMQ drops all parts up to a last
                # part. Send a last part; otherwise ZeroMQ would drop the next message, too.
                socket.send(b"", _NOBLOCK)
            raise


def receive_parts(socket: "zmq.Socket[bytes]") -> list[zmq.Frame]:
    """Receive the next message, or only its first parts if there are too many.

    ZeroMQ bounds the length of a part, not the number of parts.
    """
    parts = [socket.recv(_NOBLOCK, copy=False)]
    while parts[-1].more and len(parts) < _MOST_PARTS:
        parts.append(socket.recv(_NOBLOCK, copy=False))
    return parts


def check_size(envelope: Envelope, message_bytes: int) -> None:
    """Raise `MalformedError` for too many frames, `TooLargeError` for too many bytes."""
    if len(envelope.frames) > MAX_FRAMES:
        raise MalformedError(f"A message has at most {MAX_FRAMES} array frames.")
    if envelope.size > message_bytes:
        raise TooLargeError(
            f"The message has {envelope.size} bytes; this edge accepts {message_bytes}. "
            "Use a smaller window, or a protocol that sends less."
        )
