"""Why no edge is reached at an address: the name, the route, or what answers there.

ZeroMQ does not say why a connection fails. So the address is looked up and connected to once more.
ZMTP's greeting (64 bytes: signature, version, mechanism, role) tells an edge with keys from one
without, and from anything else.
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
# Signature and version: enough for an edge to send its whole greeting and await the rest of ours.
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01"
_PATIENCE_S = 5.0  # slow paths have an RTT of seconds
_PAUSE_S = (1.0, 30.0)  # between two looks, doubling while they come to the same


class Finding(Enum):
    """What is at an address."""

    NO_NAME = auto()  # the name is unknown, or cannot be looked up now
    REFUSED = auto()  # the machine answers, and nothing listens on the port
    NO_ROUTE = auto()  # no machine answers: the network, the address, a firewall
    MUTE = auto()  # something takes the connection, and says nothing
    NO_EDGE = auto()  # something says what no edge says, or hangs up
    PLAIN = auto()  # an edge without keys
    CURVE = auto()  # an edge with keys


def diagnose(host: str, port: int, patience_s: float = _PATIENCE_S) -> Finding:
    """Look at this address once; waits for the name, and then ``patience_s`` for each step."""
    try:
        with socket.create_connection((host, port), patience_s) as connection:
            return _greeted(connection)
    except socket.gaierror:
        return Finding.NO_NAME
    except UnicodeError:  # a name with an empty or too long label
        return Finding.NO_NAME
    except OSError as error:
        return Finding.REFUSED if error.errno == errno.ECONNREFUSED else Finding.NO_ROUTE


def _greeted(connection: socket.socket) -> Finding:
    got = b""
    try:
        connection.sendall(_GREETING)
        while len(got) < _GREETING_BYTES and (more := connection.recv(_GREETING_BYTES - len(got))):
            got += more
    except TimeoutError:
        return Finding.NO_EDGE if got else Finding.MUTE
    except OSError:
        return Finding.NO_EDGE
    if len(got) < _GREETING_BYTES or got[:1] != b"\xff":
        return Finding.NO_EDGE
    mechanism = got[_MECHANISM].rstrip(b"\0")
    return Finding.CURVE if mechanism == b"CURVE" else Finding.PLAIN


class Diagnosis:
    """Looks at one address in the background, now and then. Thread-safe.

    finding: the last one; None: there is none, or it is out of date.
    """

    def __init__(self, endpoint: str) -> None:
        self.finding: Finding | None = None
        parts = urlsplit(endpoint)
        self._place = (parts.hostname, parts.port) if parts.scheme == "tcp" else (None, None)
        self._turn = threading.Lock()  # held while it is looked
        self._due_s, self._pause_s = 0.0, _PAUSE_S[0]

    def forget(self) -> None:
        """The edge is there: what was found before is out of date."""
        self.finding = None
        self.hurry()

    def hurry(self) -> None:
        """Make the next look due: what is there may have changed."""
        self._due_s, self._pause_s = 0.0, _PAUSE_S[0]

    def look(self) -> None:
        """Look again if that is due; never waits."""
        if None in self._place or time.monotonic() < self._due_s:
            return
        if self._turn.acquire(blocking=False):
            try:
                threading.Thread(target=self._look, name="diagnosis", daemon=True).start()
            except RuntimeError:  # there is no thread to be had
                self._turn.release()

    def _look(self) -> None:
        try:
            host, port = self._place
            assert host is not None
            assert port is not None
            finding = diagnose(host, port)
            same = finding is self.finding
            self._pause_s = min(2 * self._pause_s, _PAUSE_S[1]) if same else _PAUSE_S[0]
            self.finding, self._due_s = finding, time.monotonic() + self._pause_s
        finally:
            with suppress(RuntimeError):
                self._turn.release()
