"""Diagnose why no edge is reached at an address: because of the name, the route or the peer.

ZeroMQ does not report why a connection fails. So this module resolves the address and connects to
it with a plain socket. ZMTP's greeting (64 bytes: signature, version, mechanism, role)
distinguishes an edge with keys, an edge without keys, and any other peer. An edge that is stopping
or full hangs up on every connection, so its hang-up does not indicate a wrong key.
"""

import errno
import socket
import threading
import time
from contextlib import suppress
from enum import Enum, auto
from urllib.parse import urlsplit

_GREETING_BYTES = 64
_MECHANISM = slice(12, 32)
# Signature and version, the start of our greeting: after it an edge sends its whole greeting, and
# waits for the rest of ours.
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01"
_SIGNATURE = b"\xff", b"\x7f"  # the first and the tenth byte of a greeting
_TIMEOUT_S = 5.0  # time-out of each step (s); slow paths have an RTT of seconds
_HANG_UP_S = 1.0  # time (s) within which an edge that accepts no connections hangs up
# A lack of descriptors or memory on this machine says nothing about the address.
_LOCAL_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_S = (1.0, 30.0)  # pause (s) between probes: first, largest; doubles without a change


class AddressState(Enum):
    """The state of an address, as a probe finds it."""

    NO_NAME = auto()  # the name is unknown, or cannot be resolved now
    REFUSED = auto()  # the machine answers, and nothing listens on the port
    NO_ROUTE = auto()  # no machine answers; causes: the network, the address, a firewall
    MUTE = auto()  # a peer accepts the connection and sends nothing
    NO_EDGE = auto()  # the peer is not an edge, or hangs up
    HANGS_UP = auto()  # an edge that hangs up on every connection: it is stopping or full
    PLAIN = auto()  # an edge without keys
    CURVE = auto()  # an edge with keys


# Errors of `connect` if the peer hung up before it returned: a reset, alone or after a FIN.
_HUNG_UP_ERRNOS = {errno.ECONNRESET, errno.EPIPE}
# A peer that hangs up at once may reset the connection before its greeting was read. So a probe
# tries so many times to read a byte.
_TRIES = 4


def diagnose(host: str, port: int, timeout_s: float = _TIMEOUT_S) -> AddressState:
    """Probe an address once; wait for the name, then up to ``timeout_s`` for each step.

    Raises `OSError` if this machine lacks descriptors or memory.
    """
    states = (_try(host, port, timeout_s) for _ in range(_TRIES))
    return next((state for state in states if state is not None), AddressState.NO_EDGE)


def _try(host: str, port: int, timeout_s: float) -> AddressState | None:
    """Return the state of an address; None: the peer hung up, and no byte was read."""
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            return _read_greeting(connection, timeout_s)
    except socket.gaierror:
        return AddressState.NO_NAME
    except UnicodeError:  # a name with an empty or too long label
        return AddressState.NO_NAME
    except OSError as error:
        if error.errno in _LOCAL_ERRNOS:
            raise
        if error.errno in _HUNG_UP_ERRNOS:
            return None
        refused = error.errno == errno.ECONNREFUSED
        return AddressState.REFUSED if refused else AddressState.NO_ROUTE


def _read_greeting(connection: socket.socket, timeout_s: float) -> AddressState | None:
    try:
        connection.sendall(_GREETING)
        received = _read(connection, _GREETING_BYTES, timeout_s)
        ends = len(received) < _GREETING_BYTES or _hangs_up(connection, min(_HANG_UP_S, timeout_s))
    except TimeoutError:
        return AddressState.MUTE
    except OSError:
        return None
    if not received:
        return None
    if (received[:1], received[9:10]) != _SIGNATURE:
        return AddressState.NO_EDGE
    if ends:
        return AddressState.HANGS_UP
    mechanism = received[_MECHANISM].rstrip(b"\0")
    return AddressState.CURVE if mechanism == b"CURVE" else AddressState.PLAIN


def _read(connection: socket.socket, size: int, timeout_s: float) -> bytes:
    """Read up to ``size`` bytes, until the peer hangs up or the time is over.

    Raises `TimeoutError` if no byte arrived.
    """
    received, end_s = b"", time.monotonic() + timeout_s
    while len(received) < size:
        connection.settimeout(max(0.001, end_s - time.monotonic()))
        try:
            more = connection.recv(size - len(received))
        except (TimeoutError, ConnectionError):
            if not received:
                raise
            return received
        if not more:
            break
        received += more
    return received


def _hangs_up(connection: socket.socket, within_s: float) -> bool:
    """Return whether the peer hangs up within this time."""
    connection.settimeout(within_s)
    try:
        return not connection.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


class Diagnosis:
    """Probes of one address in the background. Thread-safe.

    state: result of the last probe; None: there was no probe, or its result is out of date.
    """

    def __init__(self, endpoint: str) -> None:
        self.state: AddressState | None = None
        parts = urlsplit(endpoint)
        self._address = (parts.hostname, parts.port) if parts.scheme == "tcp" else (None, None)
        self._lock = threading.Lock()  # held during a probe
        self._due_s, self._pause_s = 0.0, _PAUSE_S[0]

    def clear(self) -> None:
        """Discard the state, since the edge was reached."""
        self.state = None
        self.probe_now()

    def probe_now(self) -> None:
        """Make the next probe due at once, since the address may have changed."""
        self._due_s, self._pause_s = 0.0, _PAUSE_S[0]

    def poll(self) -> None:
        """Start a probe if one is due; never waits."""
        if None in self._address or time.monotonic() < self._due_s:
            return
        if self._lock.acquire(blocking=False):
            try:
                threading.Thread(target=self._probe, name="diagnosis", daemon=True).start()
            except RuntimeError:  # the machine cannot start another thread
                self._lock.release()

    def _probe(self) -> None:
        try:
            host, port = self._address
            assert host is not None
            assert port is not None
            try:
                state: AddressState | None = diagnose(host, port)
            except OSError:
                state = self.state
            same = state is self.state
            self._pause_s = min(2 * self._pause_s, _PAUSE_S[1]) if same else _PAUSE_S[0]
            self.state, self._due_s = state, time.monotonic() + self._pause_s
        finally:
            with suppress(RuntimeError):
                self._lock.release()
