"""The device's socket to one edge, and the state of its connection.

An edge may be as hostile as a device: the memory that it can make this process hold is bounded
here, as `wire.connections` does at the edge. Only `EdgeChannel.check_memory`, which the memory
watch calls, is thread-safe.
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
    queued_s,
    read_segments,
    read_volume,
)
from pilotfish.wire.memory_watch import MEMORY_WATCH, SLACK_BYTES, MemorySample, ReceiveCounter
from pilotfish.wire.messages import Buffer, Reply, decode_reply, encode
from pilotfish.wire.socket_events import next_event
from pilotfish.wire.transport import HANDSHAKE_MS, configure_socket, receive_parts, send_parts

_log = logging.getLogger("pilotfish.wire")

_SLOW_S = 4.5  # edges of earlier versions end a handshake after 5 s
# Good news of the kernel's counters holds so long: while something is waited for, and before a
# message is sent, for which the memory watch's looks suffice.
_POLL_S, _WATCH_S = 0.05, 0.3
_PAUSE_S = (1.0, 30.0)  # how long an edge stays disconnected after an endless message; doubling
_OWNER_IDLE_S = 1.0  # an owner that has not looked for so long may not look at all
_CLOSE_S = 0.5  # until a closed socket's context ends in the background
_CONNECTION_NUMBERS = count(1)  # of connections
_NOBLOCK = int(zmq.NOBLOCK)  # arithmetic on pyzmq's enums costs microseconds a message


class EdgeChannel:
    """A socket to one edge, with the connection's state as ZeroMQ's monitor tells it.

    quiet_most_s: a connection is ended after it has been quiet for so long, and ZeroMQ connects
    anew; 0: as soon as it is quiet.
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
        self._socket.immediate = True  # never queue for an edge that is not there
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
        # a channel that is never closed and dies in a reference cycle: the garbage collector would
        # end the context before its sockets, and wait for them for ever
        self._close = finalize(self, _close, self._context, self._socket, self._monitor, 0.0)
        self._close.atexit = False
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(int(self._monitor.fd), zmq.POLLIN)
        self._events_lock = threading.Lock()  # to read the monitor: the memory watch does, too
        self._unreported = False  # it did, and the owner has not been told
        self._polled_s = time.monotonic()  # when the owner last did
        self._encrypted, self._drained = keys is not None, False
        self._counter = ReceiveCounter(self._encrypted)
        self._most_bytes = message_bytes + SLACK_BYTES
        self._paused_until_s, self._pause_s = 0.0, _PAUSE_S[0]
        self.endpoint = endpoint
        self.connected = False
        self.connections = 0  # made so far
        # names the present connection, or the last one: no two of this process have the same
        self.connection = next(_CONNECTION_NUMBERS)
        self.attempts = ConnectAttempts()
        self.handshake_s = 0.0  # that the last one took, once TCP was connected
        self._quiet_most_s = quiet_most_s
        self._liveness: Liveness | None = None  # of the TCP connection, if there is one
        # since when TCP is connected, and the bytes sent over that connection, about
        self._connected_s, self._sent_bytes = 0.0, 0
        self._descriptor: int | None = None  # ZeroMQ's own, while it is connected
        self._port = urlsplit(endpoint).port if endpoint.startswith("tcp:") else None
        self._connecting = True
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise UnsupportedError(
                f"{endpoint!r} is no address of an edge ({error}); write tcp://HOST:PORT."
            ) from error
        self.read_events()  # before that ZeroMQ's descriptor tells nothing
        MEMORY_WATCH.add(self)

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """For a poller of several channels."""
        return self._socket

    @property
    def sources(self) -> "tuple[zmq.Socket[bytes], int]":
        """Where messages arrive, and a descriptor that tells of news of the link."""
        return self._socket, int(self._monitor.fd)

    def send(self, message: msgspec.Struct, frames: Sequence[Buffer] = ()) -> int:
        """Hand a message to ZeroMQ; returns its bytes. `zmq.Again` if there is no connection."""
        header = encode(message)
        send_parts(self._socket, [header, *frames])
        size = len(header) + sum(map(len, frames))
        self._sent_bytes += size
        return size

    def position(self, *, exact: bool = True) -> int | None:
        """Where the next message will begin in the TCP connection's stream, about; None: unknown.

        The kernel counts what ZeroMQ has written, which may be less than what was sent. exact: ask
        it now, at some 20 µs; what it said some milliseconds ago suffices for small messages.
        """
        liveness = self.liveness(0.0) if exact else self._liveness
        if liveness is None:
            return None
        self._sent_bytes = max(self._sent_bytes, liveness.acknowledged + liveness.outstanding)
        return self._sent_bytes

    def receive(self, timeout_s: float) -> tuple[Reply, list[Buffer], int] | None:
        """The next message of an edge, its frames and bytes; otherwise as `take`."""
        message = self.receive_raw(timeout_s)
        if message is None:
            return None
        header, frames, size = message
        return decode_reply(header), frames, size

    def receive_raw(self, timeout_s: float) -> tuple[Buffer, list[Buffer], int] | None:
        """The next header, its frames and bytes; None after ``timeout_s`` or a change of the link.

        Link changes are noted in `connected` and `attempts`, so that the caller can react at once.
        """
        self._polled_s = time.monotonic()
        if self.attempts.due or self._dual_stack.due:
            self.reconnect_now()
        if self._unreported:
            self._unreported = False
            return None
        for source, _ in self._poller.poll(math.ceil(max(0.0, timeout_s) * 1e3)):
            if source is self._socket:
                parts = receive_parts(self._socket)
                buffers: list[Buffer] = [part.buffer for part in parts]
                more = parts[-1].more
                while more:  # drop the rest: no message has so many parts
                    more = self._socket.recv(_NOBLOCK, copy=False).more
                size = sum(map(len, buffers))
                self._counter.add(size, len(parts))
                return buffers[0], buffers[1:], size
            self.read_events()
        self._drained = True
        return None

    def read_events(self) -> None:
        """Read the monitor's events, and connect anew if that is due; `take` does so too."""
        self._polled_s = time.monotonic()
        with self._events_lock:
            self._read_events()
        if self._connect_timeout.too_short:
            self._socket.connect_timeout = self._connect_timeout.lengthen()
            self.reconnect_now()
        elif self.attempts.due or self._dual_stack.due:
            self.reconnect_now()
        elif self._dual_stack.pauses:  # or ZeroMQ would try this family alone all the while
            self._stop_connecting()

    def _read_events(self) -> bool:
        """Read all of the monitor's events; True if there were any."""
        some = False
        while (event := next_event(self._monitor)) is not None:
            self._note(*event)
            some = True
        return some

    def check_memory(self, sample: MemorySample) -> bool:
        """Disconnect if the edge sends an endless message, or too many; called by the memory watch.

        ZeroMQ connects anew, and is disconnected again for a while, which doubles each time.
        """
        paused = sample.now_s < self._paused_until_s
        if self._port is None:
            return False
        # The owner may be asleep; one that waits ought to learn of the link at once, by itself.
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
                "%s sends a message that does not end: hung up, and tried again later",
                self.endpoint,
            )
        self._paused_until_s = now_s + self._pause_s
        self._pause_s = min(2.0 * self._pause_s, _PAUSE_S[1])

    def _is_dead(self, liveness: Liveness) -> bool:
        """Whether to end the connection: it has been quiet for too long, or its handshake has."""
        if self.connected:
            return liveness.quiet and liveness.quiet_s > self._quiet_most_s
        return liveness.stuck

    def liveness(self, most_s: float = _POLL_S) -> Liveness | None:
        """How alive the TCP connection is; None if there is none. For any thread.

        most_s: how old good news may be; 0: as of this very moment.
        """
        with self._events_lock:
            liveness = self._liveness
            if liveness is not None and self._port:
                now_s = time.monotonic()
                if liveness.overdue or now_s - liveness.updated_s > most_s:
                    with borrow_socket(self._descriptor, has_peer_port(self._port)) as connection:
                        liveness.poll(connection)
            return liveness

    @property
    def local_host(self) -> str:
        """This end's address of the TCP connection; empty if there is none."""
        with borrow_socket(self._descriptor, has_peer_port(self._port or 0)) as connection:
            return local_host(connection)

    @property
    def quiet(self) -> bool:
        """Whether the connection shows no sign of life, though it has not ended."""
        liveness = self.liveness(_WATCH_S) if self.connected else None
        return liveness is not None and liveness.quiet

    def reconnect_now(self) -> None:
        """Connect anew, on the same socket."""
        self._stop_connecting()
        self._socket.ipv6 = self._dual_stack.switch_family()
        self.attempts.note_started()
        self._socket.connect(self.endpoint)
        self._connecting = True

    def _stop_connecting(self) -> None:
        # ZeroMQ resolves the name of an endpoint that it does not know, and waits for it
        if self._connecting:
            self._connecting = False
            with suppress(zmq.ZMQError):  # it has none to end
                self._socket.disconnect(self.endpoint)

    def segments(self) -> Segments | None:
        """What the kernel knows of the connection; None where there is none, or it is not TCP."""
        if self._descriptor is None or not self._port:
            return None
        return read_segments(self._descriptor, self._port)

    def queued_s(self) -> float:
        """Return how long ago the edge's last bytes came, in seconds; 0 where nobody knows.

        A reply that is taken later than it came tells nothing of the link.
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
        """Note that TCP is connected; the handshake follows."""
        self._dual_stack.note_connected()
        self._descriptor, self._counter = descriptor, ReceiveCounter(self._encrypted)
        self._connected_s, self._sent_bytes = time.monotonic(), 0
        self._liveness = Liveness(self._connected_s)

    @property
    def _handshake_is_slow(self) -> bool:
        """Whether the handshake takes long although the edge answers."""
        slow = time.monotonic() - self._connected_s > _SLOW_S
        return slow and self._liveness is not None and self._liveness.has_received

    def close(self, linger_s: float = 0.2) -> None:
        """Close the socket; what was sent last has ``linger_s`` to leave."""
        MEMORY_WATCH.remove(self)
        self._close.detach()
        _close(self._context, self._socket, self._monitor, linger_s)


def _close(
    context: "zmq.Context[zmq.Socket[bytes]]",
    socket: "zmq.Socket[bytes]",
    monitor: "zmq.Socket[bytes]",
    linger_s: float,
) -> None:
    while next_event(monitor) is not None:  # a full monitor blocks ZeroMQ's thread, and so this one
        pass
    socket.disable_monitor()
    monitor.close(0)
    socket.close(int(linger_s * 1000))
    # ZeroMQ's thread may wait for a name, for ten seconds and more where no DNS server answers
    term = threading.Thread(target=context.term, name="close", daemon=True)
    term.start()
    term.join(linger_s + _CLOSE_S)
