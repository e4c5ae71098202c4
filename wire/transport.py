"""ZeroMQ sockets with what every Pilotfish end needs: CURVE, limits, heartbeats, no surprises.

`Listener` is the edge's ROUTER, `Channel` the device's DEALER. Both count bytes as the lengths of
the frames that they hand to ZeroMQ, and hand out frames as views of ZeroMQ's memory. Neither is
thread-safe: each has one owner.
"""

import ipaddress
import math
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from wire.access import DOMAIN, Gate
from wire.errors import ListenError, MalformedError, TooLargeError, UnsupportedError
from wire.keys import DeviceKeys, EdgeKeys
from wire.link.tcp import Segments, segments
from wire.messages import MAX_FRAMES, Buffer, Reply, Request, decode_reply, encode

HEARTBEAT_MS = 300
HEARTBEAT_TIMEOUT_MS = 900  # a black-holed path shows within 1.2 s
_SEND_QUEUE = 64  # messages per peer; a client that does not read loses replies, nobody else does
_MOST_PARTS = MAX_FRAMES + 3  # address, header, and one frame too many

# Plain numbers: arithmetic on pyzmq's enums costs microseconds a message.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


class Envelope(NamedTuple):
    """A message as it reached the edge. ``owner``: the client's key; its address without one."""

    client: bytes
    owner: bytes
    header: Buffer
    frames: Sequence[Buffer]
    size: int


def _common(socket: "zmq.Socket[bytes]", endpoint: str, message_bytes: int) -> None:
    socket.linger = 0
    socket.maxmsgsize = message_bytes
    socket.sndhwm = socket.rcvhwm = _SEND_QUEUE
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
    # Names mean v4 addresses, since with ipv6 `localhost` would miss an edge on 127.0.0.1.
    socket.ipv6 = "[" in endpoint


def is_loopback(endpoint: str) -> bool:
    """True for an endpoint that other machines cannot reach."""
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    try:
        host = urlsplit(endpoint).hostname or ""
    except ValueError:  # brackets that do not match
        return False
    address = _ip_address(host)
    return host == "localhost" if address is None else address.is_loopback


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _has_port(endpoint: str) -> bool:
    """False for a TCP address whose port is none; ZeroMQ would take it modulo 65,536."""
    try:
        return not endpoint.startswith("tcp:") or urlsplit(endpoint).port is not None
    except ValueError:
        return False


class Listener:
    """The edge's socket: many devices, each known by its CURVE key."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        keys: EdgeKeys | None,
        message_bytes: int,
    ) -> None:
        if keys is None and not is_loopback(endpoint):
            raise ListenError(
                f"Without keys the edge listens on loopback only, not on {endpoint}. "
                "Make keys with `pilotfish keys new edge` and name their folder with --keys."
            )
        if not _has_port(endpoint):
            raise ListenError(f"{endpoint!r} is no address to listen on; write tcp://HOST:PORT.")
        self.gate = Gate(context, keys.allowed) if keys else None
        self.socket = context.socket(zmq.ROUTER)
        # one frame may be as long as a whole message; the limit on the sum is answered, not cut off
        _common(self.socket, endpoint, message_bytes)
        if keys is not None:
            self.socket.zap_domain = DOMAIN
            self.socket.curve_server = True
            self.socket.curve_secretkey = keys.secret
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ListenError(f"The edge cannot listen on {endpoint}: {error}.") from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> Envelope | None:
        """The next message that has arrived, without waiting; None if there is none."""
        try:
            first, *parts = _receive(self.socket)
        except zmq.Again:
            return None
        client = first.bytes
        header: Buffer = parts[0].buffer if parts else b""
        owner = str(first.get("User-Id")).encode() if self.gate else client
        frames = [part.buffer for part in parts[1:]]
        return Envelope(client, owner, header, frames, sum(map(len, parts)))

    @property
    def waiting(self) -> bool:
        """Has a message arrived? Asking costs less than to receive none."""
        return bool(int(self.socket.get(_EVENTS)) & _POLLIN)

    def send(self, client: bytes, message: Reply, frames: Sequence[Buffer] = ()) -> None:
        """Send without waiting; a client that has gone or does not read misses it."""
        _send(self.socket, [client, encode(message), *frames])

    def close(self) -> None:
        """Close the sockets; nothing waits."""
        self.socket.close(0)
        if self.gate is not None:
            self.gate.close()


def _send(socket: "zmq.Socket[bytes]", parts: Sequence[Buffer]) -> None:
    """One message, without waiting. NOTE long parts are views: they must not change for a while."""
    for part in parts[:-1]:
        socket.send(part, _NOBLOCK | _MORE, copy=False)
    socket.send(parts[-1], _NOBLOCK, copy=False)


def _receive(socket: "zmq.Socket[bytes]") -> list[zmq.Frame]:
    """The message that is there; of more parts than any message has, the last replace each other.

    ZeroMQ bounds how long a part is, not how many there are, and hands out whole messages only.
    """
    parts = [socket.recv(_NOBLOCK, copy=False)]
    while parts[-1].more:
        part = socket.recv(_NOBLOCK, copy=False)
        if len(parts) < _MOST_PARTS:
            parts.append(part)
        else:
            parts[-1] = part
    return parts


def check_size(envelope: Envelope, message_bytes: int) -> None:
    """Raise for a message with too many frames or bytes."""
    if len(envelope.frames) > MAX_FRAMES:
        raise MalformedError(f"A message has at most {MAX_FRAMES} array frames.")
    if envelope.size > message_bytes:
        raise TooLargeError(
            f"The message has {envelope.size} bytes; this edge takes {message_bytes}. "
            "Use a smaller window, or a protocol that sends less."
        )


class Channel:
    """The device's socket: one edge, and what ZeroMQ's monitor tells about the connection."""

    def __init__(self, endpoint: str, keys: DeviceKeys | None, message_bytes: int) -> None:
        if not _has_port(endpoint):
            raise UnsupportedError(f"{endpoint!r} is no address of an edge; write tcp://HOST:PORT.")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _common(self._socket, endpoint, message_bytes)
        self._socket.immediate = True  # never queue for an edge that is not there
        self._socket.reconnect_ivl = 100
        self._socket.reconnect_ivl_max = 1000
        if keys is not None:
            self._socket.curve_serverkey = keys.edge
            self._socket.curve_publickey = keys.public
            self._socket.curve_secretkey = keys.secret
        self._monitor = self._socket.get_monitor_socket()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self.endpoint = endpoint
        self.connected = False
        self.connections = 0  # made so far
        self.denied = False  # the edge's allow-list said no
        self.broken_handshakes = 0
        self._descriptor: int | None = None  # ZeroMQ's own, while it is connected
        self._port = urlsplit(endpoint).port if endpoint.startswith("tcp:") else None
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise UnsupportedError(
                f"{endpoint!r} is no address of an edge ({error}); write tcp://HOST:PORT."
            ) from error

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """For those who poll several channels at once."""
        return self._socket

    def send(self, message: Request, frames: Sequence[Buffer] = ()) -> int:
        """Hand a message to ZeroMQ; returns its bytes. `zmq.Again` if there is no connection."""
        header = encode(message)
        _send(self._socket, [header, *frames])
        return len(header) + sum(map(len, frames))

    def receive(self, timeout_s: float) -> tuple[Reply, list[Buffer], int] | None:
        """The next message, its frames and bytes; None after ``timeout_s`` or a change of the link.

        Link changes are noted in `connected` and `denied`, so that the caller can react at once.
        """
        for source, _ in self._poller.poll(math.ceil(max(0.0, timeout_s) * 1e3)):
            if source is self._socket:
                buffers: list[Buffer] = [part.buffer for part in _receive(self._socket)]
                return decode_reply(buffers[0]), buffers[1:], sum(map(len, buffers))
            self._hear_of_the_link()
        return None

    def catch_up(self) -> None:
        """Take note of what has become of the connection; for whoever has not received lately."""
        while self._monitor.poll(0):
            self._hear_of_the_link()

    def _hear_of_the_link(self) -> None:
        told = recv_monitor_message(self._monitor)
        self._note(told["event"], told["value"])

    def segments(self) -> Segments | None:
        """What the kernel knows of the connection; None where there is none, or it is not TCP."""
        if self._descriptor is None or not self._port:
            return None
        return segments(self._descriptor, self._port)

    def _note(self, event: int, value: int) -> None:
        if event == zmq.Event.CONNECTED:
            self._descriptor = value
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.connected = True
            self.connections += 1
        elif event == zmq.Event.DISCONNECTED:
            self.connected = False
            self._descriptor = None
        elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self.denied = True
        elif event in (zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, zmq.Event.HANDSHAKE_FAILED_PROTOCOL):
            self.broken_handshakes += 1

    def close(self, linger_s: float = 0.2) -> None:
        """Close the socket; what was sent last has ``linger_s`` to leave."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(int(linger_s * 1000))
        self._context.term()
