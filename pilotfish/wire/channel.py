"""The device's socket to one edge, and the state of its connection.

An edge may be hostile, too. So this module bounds the memory that the edge can make this process
hold, as `wire.connections` does for devices. Only `check_memory`, which the memory watch calls, and
`liveness` are thread-safe.
"""

import errno
import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from urllib.parse import urlsplit
from weakref import finalize

import msgspec
import zmq

from pilotfish.base.errors import UnsupportedError
from pilotfish.wire.address import require_address
from pilotfish.wire.io_memory import MAX_OVERHEAD_BYTES, OverheadMeter
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.link.attempts import (
    ConnectAttempts,
    ConnectFailure,
    ConnectTimeout,
    DualStack,
    stop_after_failed_handshake,
)
from pilotfish.wire.link.liveness import Liveness
from pilotfish.wire.link.tcp import (
    Segments,
    borrow_socket,
    hang_up,
    has_peer_port,
    local_host,
    next_event,
    queued_s,
    read_segments,
    read_volume,
)
from pilotfish.wire.memory_watch import MEMORY_WATCH, SLACK_BYTES, MemorySample, ReceiveCounter
from pilotfish.wire.messages import Buffer, Reply, decode_reply, encode
from pilotfish.wire.transport import HANDSHAKE_MS, configure_socket, receive_parts, send_parts

_log = logging.getLogger("pilotfish.wire")

_SLOW_S = 4.5  # edges of earlier versions end a handshake after 5 s
# Largest age (s) of a reading of the kernel's counters that shows life: while the device waits for
# a reply, and before it sends. (The memory watch's readings are recent enough before it sends.)
_POLL_S, _WATCH_S = 0.05, 0.3
_PAUSE_S = (1.0, 30.0)  # pause (s) after an endless message: first, largest; it doubles each time
_OWNER_IDLE_S = 1.0  # an owner that has not polled for this time (s) may be asleep
_CLOSE_S = 0.5  # longest wait (s) for a closing context; it then ends in the background
_CONNECTION_NUMBERS = count(1)  # numbers that are unique in this process
_NOBLOCK = int(zmq.NOBLOCK)  # arithmetic on pyzmq's enums costs microseconds per message


class EdgeChannel:
    """A socket to one edge, and the state of its connection from ZeroMQ's monitor.

    quiet_most_s: longest time (s) without a sign of life; then the connection is ended, and ZeroMQ
    reconnects. 0: end the connection as soon as `Liveness.quiet` is true.
    """

    def __init__(
        self,
        endpoint: str,
        keys: DeviceKeys | None,
        message_bytes: int,
        quiet_most_s: float = 0.0,
    ) -> None:
        require_address(endpoint)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._overhead = OverheadMeter(self._context) if keys is None else None
        self._socket = self._context.socket(zmq.DEALER)
        configure_socket(self._socket, endpoint, message_bytes)
        self._socket.immediate = True  # never queue without a connection
        self._socket.reconnect_ivl = 100
        self._socket.reconnect_ivl_max = 1000
        self._connect_timeout, self._dual_stack = ConnectTimeout(), DualStack(endpoint)
        self._socket.connect_timeout = self._connect_timeout.ms
        self._socket.handshake_ivl = HANDSHAKE_MS
        stop_after_failed_handshake(self._socket)
        if keys is not None:
            self._socket.curve_serverkey = keys.edge
            self._socket.curve_publickey = keys.public
            self._socket.curve_secretkey = keys.secret
        self._monitor = self._socket.get_monitor_socket()
        # without the finalizer, an unclosed channel in a reference cycle would hang: the garbage
        # collector would end the context before its sockets, and wait for them for ever
        self._close = finalize(self, _close, self._context, self._socket, self._monitor, 0.0)
        self._close.atexit = False
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(int(self._monitor.fd), zmq.POLLIN)
        self._events_lock = threading.Lock()  # guards the monitor; the memory watch reads it, too
        self._unreported = False  # the memory watch read events that the owner has not seen
        self._polled_s = time.monotonic()  # time at which the owner last read the monitor
        self._encrypted, self._drained = keys is not None, False
        self._counter = ReceiveCounter(self._encrypted)
        self._most_bytes = message_bytes + SLACK_BYTES
        self._paused_until_s, self._pause_s = 0.0, _PAUSE_S[0]
        self.endpoint = endpoint
        self.connected = False
        self.connections = 0  # handshakes that succeeded so far
        # number of the present or last connection, unique in this process
        self.connection = next(_CONNECTION_NUMBERS)
        self.attempts = ConnectAttempts()
        self.handshake_s = 0.0  # duration of the last handshake, without TCP's handshake
        self._quiet_most_s = quiet_most_s
        self._liveness: Liveness | None = None  # None: TCP is not connected
        # time at which TCP connected, and the approximate number of bytes sent since then
        self._connected_s, self._sent_bytes = 0.0, 0
        self._descriptor: int | None = None  # ZeroMQ's descriptor, while TCP is connected
        self._port = urlsplit(endpoint).port if endpoint.startswith("tcp:") else None
        self._connecting = True
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise UnsupportedError(
                f"{endpoint!r} is not an address of an edge ({error}); write tcp://HOST:PORT."
            ) from error
        self.read_events()  # ZeroMQ's descriptor signals events only after this call
        MEMORY_WATCH.add(self)

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """The ZeroMQ socket, for a poller of several channels."""
        return self._socket

    @property
    def sources(self) -> "tuple[zmq.Socket[bytes], int]":
        """The socket of messages, and a descriptor that signals events of the link."""
        return self._socket, int(self._monitor.fd)

    def send(self, message: msgspec.Struct, frames: Sequence[Buffer] = ()) -> int:
        """Send a message and return its size in bytes; raises `zmq.Again` without a connection."""
        header = encode(message)
        send_parts(self._socket, [header, *frames])
        size = len(header) + sum(map(len, frames))
        self._sent_bytes += size
        return size

    def position(self, *, exact: bool = True) -> int | None:
        """Return the approximate offset of the next message in the TCP stream; None: unknown.

        The kernel counts what ZeroMQ has written, which may be less than this object has sent.
        exact: read the counters now (20 µs); for small messages an older reading suffices.
        """
        liveness = self.liveness(0.0) if exact else self._liveness
        if liveness is None:
            return None
        self._sent_bytes = max(self._sent_bytes, liveness.acknowledged + liveness.outstanding)
        return self._sent_bytes

    def receive(self, timeout_s: float) -> tuple[Reply, list[Buffer], int] | None:
        """Return the next message, its frames and its size in bytes; None: see `receive_raw`."""
        message = self.receive_raw(timeout_s)
        if message is None:
            return None
        header, frames, size = message
        return decode_reply(header), frames, size

    def receive_raw(self, timeout_s: float) -> tuple[Buffer, list[Buffer], int] | None:
        """Return the next header, its frames and the message's size in bytes.

        None: ``timeout_s`` is over, or the link has changed, which `connected` and `attempts` show.
        """
        self._polled_s = time.monotonic()
        if not self.connected and (self.attempts.due or self._dual_stack.due):
            self.reconnect_now()
        if self._unreported:
            self._unreported = False
            return None
        for source, _ in self._poller.poll(math.ceil(max(0.0, timeout_s) * 1e3)):
            if source is self._socket:
                parts = receive_parts(self._socket)
                buffers: list[Buffer] = [part.buffer for part in parts]
                more = parts[-1].more
                while more:  # drop the excess parts: a valid message has fewer
                    more = self._socket.recv(_NOBLOCK, copy=False).more
                size = sum(map(len, buffers))
                self._counter.add(size, len(parts))
                return buffers[0], buffers[1:], size
            self.read_events()
        self._drained = True
        return None

    def read_events(self) -> None:
        """Read the monitor's events, and reconnect if that is due; `receive_raw` does so, too."""
        self._polled_s = time.monotonic()
        with self._events_lock:
            self._read_events()
        if self._connect_timeout.too_short:
            self._socket.connect_timeout = self._connect_timeout.lengthen()
            self.reconnect_now()
        elif self.attempts.due or self._dual_stack.due:
            self.reconnect_now()
        elif self._dual_stack.pauses:  # otherwise ZeroMQ would retry in this IP family alone
            self._stop_connecting()

    def _read_events(self) -> bool:
        """Read all events of the monitor; return whether there were events."""
        some = False
        while (event := next_event(self._monitor)) is not None:
            self._note(*event)
            some = True
        return some

    def check_memory(self, sample: MemorySample) -> bool:
        """Disconnect an edge that sends an endless message or too many (for the memory watch).

        If ZeroMQ reconnects within the pause, the edge is disconnected again; the pause doubles
        each time. Return whether to check again soon.
        """
        paused = sample.now_s < self._paused_until_s
        if self._port is None:
            return False
        # An idle owner may be asleep, so its events are read here. An owner that waits in
        # `receive_raw` reads them itself, at once.
        if sample.urgent or paused or sample.now_s - self._polled_s > _OWNER_IDLE_S:
            with self._events_lock:
                self._unreported |= self._read_events()
        counter, drained = self._counter, self._drained
        self._drained = False
        if self._overhead is not None:
            self._overhead.measure()
        with borrow_socket(self._descriptor, has_peer_port(self._port)) as connection:
            counts = read_volume(connection)
            if counts is None:
                return paused
            with self._events_lock:
                if self._liveness is not None:
                    self._liveness.poll(connection)
                    if self._is_dead(self._liveness):
                        hang_up(connection)
                        return paused
            if not paused:
                held = counter.update(counts, sample, drained=drained)
                if self._overhead is not None:
                    self._overhead.charge([counter])
                if held <= self._most_bytes and counter.overhead_bytes <= MAX_OVERHEAD_BYTES:
                    if counter.messages:
                        self._pause_s = _PAUSE_S[0]
                    return False
                self._pause(sample.now_s)
            hang_up(connection)
        return True

    def _pause(self, now_s: float) -> None:
        if self._pause_s == _PAUSE_S[0]:
            _log.warning(
                "%s sends a message that does not end: disconnected; the next attempt follows "
                "later",
                self.endpoint,
            )
        self._paused_until_s = now_s + self._pause_s
        self._pause_s = min(2.0 * self._pause_s, _PAUSE_S[1])

    def _is_dead(self, liveness: Liveness) -> bool:
        """Return whether the connection, or its handshake, has been quiet for too long."""
        if self.connected:
            return liveness.quiet and liveness.quiet_s > self._quiet_most_s
        return liveness.stuck

    def liveness(self, most_s: float = _POLL_S) -> Liveness | None:
        """Return the TCP connection's liveness; None: TCP is not connected. Thread-safe.

        most_s: how old a reading that shows life may be; 0: read the counters now.
        """
        liveness = self._liveness
        if liveness is None or not self._port:
            return liveness
        if not liveness.overdue and time.monotonic() - liveness.updated_s <= most_s:
            return liveness
        with self._events_lock:
            if (liveness := self._liveness) is not None:
                with borrow_socket(self._descriptor, has_peer_port(self._port)) as connection:
                    liveness.poll(connection)
            return liveness

    @property
    def local_host(self) -> str:
        """The local address of the TCP connection; "" without one."""
        with borrow_socket(self._descriptor, has_peer_port(self._port or 0)) as connection:
            return local_host(connection)

    @property
    def quiet(self) -> bool:
        """Whether the open connection shows no sign of life."""
        liveness = self.liveness(_WATCH_S) if self.connected else None
        return liveness is not None and liveness.quiet

    def reconnect_now(self) -> None:
        """End any connection and connect again, on the same socket."""
        self._stop_connecting()
        self._socket.ipv6 = self._dual_stack.switch_family()
        self.attempts.note_started()
        self._socket.connect(self.endpoint)
        self._connecting = True

    def _stop_connecting(self) -> None:
        # `disconnect` would resolve the name of an endpoint that it does not know, and block
        if self._connecting:
            self._connecting = False
            with suppress(zmq.ZMQError):  # there is no connection to end
                self._socket.disconnect(self.endpoint)

    def segments(self) -> Segments | None:
        """Return the kernel's segment counters; None: TCP is not connected."""
        if self._descriptor is None or not self._port:
            return None
        return read_segments(self._descriptor, self._port)

    def queued_s(self) -> float:
        """Return the seconds since the edge's last bytes arrived; 0: unknown.

        For this time a reply has waited on this machine; it does not count as time on the link.
        """
        return queued_s(self._descriptor)

    def _note(self, event: int, value: int) -> None:
        slow = event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL and self._handshake_is_slow
        self.attempts.note(event, errno.ETIMEDOUT if slow else value)
        if event == zmq.Event.CONNECT_DELAYED:
            self._connect_timeout.begin()
        elif event == zmq.Event.CONNECT_RETRIED:
            self._connect_timeout.end()
            if self.attempts.failure is ConnectFailure.CONNECT:
                self._dual_stack.note_failed()
        elif event == zmq.Event.CONNECTED:
            self._note_connected(value)
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.connected = True
            self.connections += 1
            self.connection = next(_CONNECTION_NUMBERS)
            self.handshake_s = time.monotonic() - self._connected_s
        elif event == zmq.Event.DISCONNECTED:
            self.connected = False
            self._descriptor = self._liveness = None

    def _note_connected(self, descriptor: int) -> None:
        """Note that TCP has connected; the handshake follows."""
        self._dual_stack.note_connected()
        self._descriptor, self._counter = descriptor, ReceiveCounter(self._encrypted)
        self._connected_s, self._sent_bytes = time.monotonic(), 0
        self._liveness = Liveness(self._connected_s)

    @property
    def _handshake_is_slow(self) -> bool:
        """Whether the handshake takes long although the edge sends bytes."""
        slow = time.monotonic() - self._connected_s > _SLOW_S
        return slow and self._liveness is not None and self._liveness.has_received

    def close(self, linger_s: float = 0.2) -> None:
        """Close the socket; unsent messages have ``linger_s`` to leave."""
        MEMORY_WATCH.remove(self)
        self._close.detach()
        _close(self._context, self._socket, self._monitor, linger_s)


def _close(
    context: "zmq.Context[zmq.Socket[bytes]]",
    socket: "zmq.Socket[bytes]",
    monitor: "zmq.Socket[bytes]",
    linger_s: float,
) -> None:
    while (
        next_event(monitor) is not None
    ):  # a full monitor would block ZeroMQ's thread, and so this thread
        pass
    socket.disable_monitor()
    monitor.close(0)
    socket.close(int(linger_s * 1000))
    # ZeroMQ's thread may be resolving a name, which takes ten seconds or more without a DNS server
    term = threading.Thread(target=context.term, name="close", daemon=True)
    term.start()
    term.join(linger_s + _CLOSE_S)
