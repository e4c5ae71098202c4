"""Attempts to connect to an edge: what ended the last one, and when the next one may begin.

In: the events of ZeroMQ's monitor. ZeroMQ tries again by itself, every 0.1 to 1 s, where no
connection comes about, or one has broken. After a handshake that failed it stops (`stop_after_failed_handshake`), and
its owner begins the next attempt when `due` says so: soon, since the edge may just be starting, and
ever later where the two ends will not agree before somebody changes a key.
"""

import errno
import math
import random
import time
from contextlib import suppress
from enum import Enum, auto
from urllib.parse import urlsplit

import zmq

from pilotfish.wire.address import literal_address

CERTAIN_HANG_UPS = 8  # handshakes: an edge that answers to two keys by turns breaks half of them
_RECONNECT_STOP, _HANDSHAKE_FAILED = 109, 2  # libzmq's, for which pyzmq has no names
_MECHANISM_MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_RETRIED_S = 0.2  # in which ZeroMQ says that it tries again, if it does
_BETWEEN_S = 0.25  # two attempts for the sake of requests
_FIRST_S, _SOON_S, _LATEST_S = 0.1, 1.0, 30.0
_JITTER = 0.25  # so that a fleet does not come in step
# An attempt gives way to the next one, since on a path that was dead when it began the kernel
# tries ever more rarely. But then the next has twice the time: the round trip may be that long.
_FIRST_TIMEOUT_MS, _MAX_TIMEOUT_MS = 3000, 12_000
_TIMED_OUT = 0.9  # an attempt that took this part of its time was given up for want of an answer
_FAMILY_PAUSE_S = (0.1, 1.0)  # after both families have failed, doubling


class ConnectFailure(Enum):
    """What ended an attempt: there was no connection, or the handshake over it failed."""

    CONNECT = auto()  # nothing took the connection, or its name is unknown
    KEY = auto()  # the edge's allow-list
    MECHANISM = auto()  # one end has keys, the other has none
    CLOSED = auto()  # the other end hung up: the edge for a wrong edge.pub, or what is no edge
    TIMEOUT = auto()  # it said nothing for too long
    OTHER = auto()  # it does not speak ZMTP, or a longer message than is allowed came


# They last until somebody changes a key.
_LASTING = {ConnectFailure.KEY, ConnectFailure.MECHANISM}


def stop_after_failed_handshake(socket: "zmq.Socket[bytes]") -> None:
    """Have ZeroMQ stop at a handshake that fails; an older one goes on every 0.1 s."""
    with suppress(zmq.ZMQError):
        socket.setsockopt(_RECONNECT_STOP, _HANDSHAKE_FAILED)


class ConnectAttempts:
    """The attempts of one socket. Its owner writes; any thread may read, and call `hurry`.

    failure: of the last attempt, until one succeeds; None: there was none. hang_ups: handshakes
    that the other end broke off, since one succeeded. wrong_key: somebody has seen that an edge is
    there which hangs up on handshakes alone.
    """

    def __init__(self) -> None:
        self.failure: ConnectFailure | None = None
        self.hang_ups = 0
        self.wrong_key = False
        self.handshakes_failed = 0
        self.began_s = time.monotonic()
        self._stopped_s: float | None = None  # since when ZeroMQ may have stopped
        self._stopped = False  # it has, for sure
        self._in_handshake = False  # there is a connection, and no outcome of its handshake
        self._pause_s = _FIRST_S
        self._due_s = 0.0
        self._resolved = False  # the last attempt had an address

    def note(self, event: int, value: int) -> None:
        """Note an event of the socket's monitor."""
        match event:
            case zmq.Event.CONNECT_DELAYED:
                self.note_started()
                self._resolved = True
            case zmq.Event.CONNECTED:
                self._stopped_s, self._in_handshake, self._resolved = None, True, True
            case zmq.Event.CONNECT_RETRIED:
                self._stopped_s = None
                if not self._resolved:
                    self.failure = ConnectFailure.CONNECT
                self._resolved = False
            case zmq.Event.CLOSED:
                self.failure = ConnectFailure.CONNECT
            case zmq.Event.HANDSHAKE_SUCCEEDED:
                self.failure, self.hang_ups, self.wrong_key = None, 0, False
                self._pause_s, self._in_handshake = _FIRST_S, False
            case zmq.Event.DISCONNECTED if self._in_handshake:  # taken for ZMTP 1.0: no other event
                self._note_stopped(ConnectFailure.OTHER)
            case zmq.Event.DISCONNECTED:
                self._stopped_s = time.monotonic()
            case zmq.Event.HANDSHAKE_FAILED_AUTH:
                self._note_stopped(ConnectFailure.KEY)
            case zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                mismatch = value == _MECHANISM_MISMATCH
                self._note_stopped(ConnectFailure.MECHANISM if mismatch else ConnectFailure.OTHER)
            case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                late = value in (errno.EAGAIN, errno.ETIMEDOUT)
                self._note_stopped(ConnectFailure.TIMEOUT if late else ConnectFailure.CLOSED)

    @property
    def stopped(self) -> bool:
        """Whether ZeroMQ tries no more by itself.

        It stops after a handshake that failed, and after a longer message than is allowed.
        """
        since_s = self._stopped_s
        return since_s is not None and (self._stopped or time.monotonic() - since_s > _RETRIED_S)

    @property
    def due(self) -> bool:
        """Whether its owner ought to connect anew now."""
        return self._stopped_s is not None and self.stopped and time.monotonic() >= self._due_s

    @property
    def wait_s(self) -> float:
        """Seconds until the next attempt is due; 0 where ZeroMQ tries by itself."""
        return max(0.0, self._due_s - time.monotonic()) if self.stopped else 0.0

    @property
    def refuses_key(self) -> bool:
        """Whether the edge's allow-list said no."""
        return self.failure is ConnectFailure.KEY

    @property
    def surely_wrong_key(self) -> bool:
        """Whether an edge is there that does not take our handshake: edge.pub is not its key."""
        return (
            self.failure is ConnectFailure.CLOSED
            and self.wrong_key
            and self.hang_ups >= CERTAIN_HANG_UPS
        )

    def failed_since(self, since_s: float) -> bool:
        """Whether an attempt that began since then (monotonic) has failed and is over."""
        return self.failure is not None and self._stopped_s is not None and self.began_s > since_s

    def retry_now(self) -> None:
        """Make the next attempt due, since somebody waits for it; not more than four a second."""
        self._due_s = min(self._due_s, self.began_s + _BETWEEN_S)

    def note_started(self) -> None:
        """Note that an attempt begins; the owner's own ones show no other way."""
        self.began_s = time.monotonic()
        self._stopped_s, self._stopped, self._resolved = None, False, False

    def _note_stopped(self, failure: ConnectFailure) -> None:
        self.failure, self._in_handshake = failure, False
        self.handshakes_failed += 1
        self.hang_ups += failure is ConnectFailure.CLOSED
        now_s = time.monotonic()
        self._stopped_s, self._stopped = now_s, True
        lasting = failure in _LASTING or self.surely_wrong_key
        most_s = _LATEST_S if lasting else _SOON_S
        self._due_s = now_s + min(self._pause_s, most_s) * random.uniform(1 - _JITTER, 1 + _JITTER)
        if failure is not ConnectFailure.CLOSED or self.hang_ups >= CERTAIN_HANG_UPS:
            self._pause_s = min(2 * self._pause_s, most_s)


class ConnectTimeout:
    """Milliseconds for an attempt to connect; learns from attempts without an answer.

    too_short: the last attempt was given up, and a longer one may succeed.
    """

    def __init__(self) -> None:
        self.ms = _FIRST_TIMEOUT_MS
        self.too_short = False
        self._began_s = math.inf

    def begin(self) -> None:
        """Note the beginning of an attempt."""
        self._began_s = time.monotonic()

    def end(self) -> None:
        """Note that it failed: at once if it was refused, late if there was no answer."""
        spent_ms = (time.monotonic() - self._began_s) * 1e3
        self.too_short = self.ms < _MAX_TIMEOUT_MS and spent_ms > _TIMED_OUT * self.ms

    def lengthen(self) -> int:
        """Return the milliseconds of the next attempt, which has twice the time."""
        self.ms, self.too_short = min(2 * self.ms, _MAX_TIMEOUT_MS), False
        return self.ms


class DualStack:
    """The family of one socket's attempts; IPv4 comes first. It stays where it led to a connection.

    ipv6: of the present attempt. An address that is no name has its own family, and never turns.
    """

    def __init__(self, endpoint: str) -> None:
        host = (urlsplit(endpoint).hostname or "") if endpoint.startswith("tcp:") else ""
        self._is_name = bool(host) and literal_address(host) is None
        self.ipv6 = "[" in endpoint
        self._due_s = math.inf
        self._pause_s = _FAMILY_PAUSE_S[0]
        self._other_failed = False  # the other family did, just before this one

    def note_connected(self) -> None:
        """Note that the present family leads somewhere."""
        self._due_s, self._pause_s, self._other_failed = math.inf, _FAMILY_PAUSE_S[0], False

    def note_failed(self) -> None:
        """Note that the attempt came to no connection, and ZeroMQ would go on in its family."""
        if not self._is_name or self._due_s < math.inf:
            return
        now_s = time.monotonic()
        if self._other_failed:
            self._due_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _FAMILY_PAUSE_S[1])
        else:
            self._due_s = now_s
        self._other_failed = not self._other_failed

    @property
    def due(self) -> bool:
        """Whether the other family ought to be tried now."""
        return time.monotonic() >= self._due_s

    @property
    def pauses(self) -> bool:
        """Whether both families have failed, and the next attempt is not due yet."""
        return time.monotonic() < self._due_s < math.inf

    def switch_family(self) -> bool:
        """Return whether the attempt that begins now uses IPv6: the other family if one failed."""
        if self._due_s < math.inf:
            self._due_s, self.ipv6 = math.inf, not self.ipv6
        return self.ipv6
