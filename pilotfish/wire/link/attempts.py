"""Attempts to connect to an edge: their time-outs, IP families and failures, and the next attempt.

In: the events of ZeroMQ's monitor. ZeroMQ retries by itself, every 0.1 to 1 s, if a connection
fails or breaks. After a failed handshake it stops (`stop_after_failed_handshake`), and the socket's
owner begins the next attempt when `ConnectAttempts.due` is true. That is soon, since the edge may
be starting; if somebody must change a key first, the pauses grow.

ZeroMQ resolves a name at each attempt, in one family. Without ``ZMQ_IPV6`` it takes an IPv4
address; with it, the first IPv6 address, or an IPv4 address if there is no other. So `DualStack`
alternates the families.
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

# if as many in a row are broken, the key is wrong; an edge with two keys breaks half
CERTAIN_HANG_UPS = 8
_RECONNECT_STOP, _HANDSHAKE_FAILED = 109, 2  # an option of libzmq and its value; pyzmq lacks both
_MECHANISM_MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_RETRIED_S = 0.2  # time (s) within which ZeroMQ reports its own retry
_BETWEEN_S = 0.25  # minimum time (s) between two attempts for waiting callers
_FIRST_S, _SOON_S, _LATEST_S = 0.1, 1.0, 30.0
_JITTER = 0.25  # share by which pauses vary, so that devices do not retry all at once
# Time-outs of an attempt. On a path that was dead when the attempt began, the kernel retries more
# and more rarely, so a new attempt is better. The new attempt has twice the time: the round trip
# may be long.
_FIRST_TIMEOUT_MS, _MAX_TIMEOUT_MS = 3000, 12_000
_TIMED_OUT = 0.9  # share of its time-out after which an attempt counts as unanswered
_FAMILY_PAUSE_S = (0.1, 1.0)  # pause (s) after both families failed: first, largest; it doubles


class ConnectFailure(Enum):
    """The reason why a connection or its handshake failed."""

    CONNECT = auto()  # there is no TCP connection, or the name is unknown
    KEY = auto()  # the key is not on the edge's allow-list
    MECHANISM = auto()  # either the device or the edge has no keys
    CLOSED = auto()  # the peer hung up: wrong edge.pub, or not an edge
    TIMEOUT = auto()  # the peer sent nothing for too long
    OTHER = auto()  # the peer does not speak ZMTP, or its message is too long


# Failures that last until somebody changes a key.
_LASTING = {ConnectFailure.KEY, ConnectFailure.MECHANISM}


def stop_after_failed_handshake(socket: "zmq.Socket[bytes]") -> None:
    """Make ZeroMQ stop after a failed handshake; older versions retry every 0.1 s."""
    with suppress(zmq.ZMQError):
        socket.setsockopt(_RECONNECT_STOP, _HANDSHAKE_FAILED)


class ConnectAttempts:
    """The attempts of one socket. Its owner notes them; any thread may read, and call `retry_now`.

    failure: the reason of the last failure; None after a success. hang_ups: handshakes that the
    peer broke off since the last success. wrong_key: a diagnosis found an edge with keys that sends
    its greeting, so only the handshake fails.
    """

    def __init__(self) -> None:
        self.failure: ConnectFailure | None = None
        self.hang_ups = 0
        self.wrong_key = False
        self.handshakes_failed = 0
        self.began_s = time.monotonic()
        self._stopped_s: float | None = None  # time at which ZeroMQ may have stopped retrying
        self._stopped = False  # ZeroMQ has certainly stopped
        self._in_handshake = False  # TCP is connected, the handshake not finished
        self._pause_s = _FIRST_S
        self._due_s = 0.0
        self._resolved = False  # the last attempt resolved its address

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
            case zmq.Event.DISCONNECTED if (
                self._in_handshake
            ):  # ZeroMQ took the peer for ZMTP 1.0: no failure event
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
        """Whether ZeroMQ has stopped retrying, after a failed handshake or an excessive message."""
        since_s = self._stopped_s
        return since_s is not None and (self._stopped or time.monotonic() - since_s > _RETRIED_S)

    @property
    def due(self) -> bool:
        """Whether the owner should reconnect now."""
        return self._stopped_s is not None and self.stopped and time.monotonic() >= self._due_s

    @property
    def wait_s(self) -> float:
        """Seconds until the next attempt is due; 0 while ZeroMQ retries by itself."""
        return max(0.0, self._due_s - time.monotonic()) if self.stopped else 0.0

    @property
    def refuses_key(self) -> bool:
        """Whether the edge refused this device's key."""
        return self.failure is ConnectFailure.KEY

    @property
    def surely_wrong_key(self) -> bool:
        """Whether the edge is reachable, but its key is certainly not the key in ``edge.pub``."""
        return (
            self.failure is ConnectFailure.CLOSED
            and self.wrong_key
            and self.hang_ups >= CERTAIN_HANG_UPS
        )

    def failed_since(self, since_s: float) -> bool:
        """Return whether an attempt that began after ``since_s`` (monotonic) has failed."""
        return self.failure is not None and self._stopped_s is not None and self.began_s > since_s

    def retry_now(self) -> None:
        """Make the next attempt due because a caller waits; at most four a second."""
        self._due_s = min(self._due_s, self.began_s + _BETWEEN_S)

    def note_started(self) -> None:
        """Note the start of an attempt; the monitor does not report attempts of the owner."""
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
    """The time-out ``ms`` of attempts to connect; it grows after attempts without an answer.

    too_short: the last attempt timed out, and an attempt with more time may succeed.
    """

    def __init__(self) -> None:
        self.ms = _FIRST_TIMEOUT_MS
        self.too_short = False
        self._began_s = math.inf

    def begin(self) -> None:
        """Note the start of an attempt."""
        self._began_s = time.monotonic()

    def end(self) -> None:
        """Note the attempt's failure: an early failure is a refusal, a late one means no answer."""
        spent_ms = (time.monotonic() - self._began_s) * 1e3
        self.too_short = self.ms < _MAX_TIMEOUT_MS and spent_ms > _TIMED_OUT * self.ms

    def lengthen(self) -> int:
        """Double the time-out for the next attempt, and return it."""
        self.ms, self.too_short = min(2 * self.ms, _MAX_TIMEOUT_MS), False
        return self.ms


class DualStack:
    """The IP family of one socket's attempts: IPv4 first, then each in turn until one connects.

    ipv6: the present attempt uses IPv6. A literal address keeps its own family.
    """

    def __init__(self, endpoint: str) -> None:
        host = (urlsplit(endpoint).hostname or "") if endpoint.startswith("tcp:") else ""
        self._is_name = bool(host) and literal_address(host) is None
        self.ipv6 = "[" in endpoint
        self._due_s = math.inf
        self._pause_s = _FAMILY_PAUSE_S[0]
        self._other_failed = False  # the previous attempt failed, in the other family

    def note_connected(self) -> None:
        """Note that the present family has connected."""
        self._due_s, self._pause_s, self._other_failed = math.inf, _FAMILY_PAUSE_S[0], False

    def note_failed(self) -> None:
        """Note that the attempt failed; ZeroMQ by itself would retry in the same IP family."""
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
        """Whether to try the other family now."""
        return time.monotonic() >= self._due_s

    @property
    def pauses(self) -> bool:
        """Whether both families have failed and the next attempt is not due yet."""
        return time.monotonic() < self._due_s < math.inf

    def switch_family(self) -> bool:
        """Switch families if the last attempt failed; return whether the next attempt uses IPv6."""
        if self._due_s < math.inf:
            self._due_s, self.ipv6 = math.inf, not self.ipv6
        return self.ipv6
