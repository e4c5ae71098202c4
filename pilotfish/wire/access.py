"""Access control: the answering side of ZeroMQ's authentication protocol (ZAP, RFC 27).

ZeroMQ sends a request for every CURVE handshake over an in-process socket; if nothing answered
there, ZeroMQ would admit every key. The reply names the key as ``User-Id``, so that each message
carries its sender's key, and a session can belong to a key.
"""

import logging
import time
from collections.abc import Callable, Collection

import zmq
from zmq.utils import z85

from pilotfish.wire.refused_keys import RefusedKeys

_ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"pilotfish"  # ZAP domain of the edge's first key; `key_domain` returns the others
BAN_S = 60.0
# ZAP's status codes. After 300, a temporary failure, ZeroMQ closes the connection; the peer
# retries.
_OK, _REFUSED = (b"200", b"OK"), (b"400", b"key not on the allow-list")
_RETRY_LATER = (b"300", b"too much of this key waits")
_log = logging.getLogger("pilotfish.wire")


def key_domain(number: int) -> bytes:
    """Return the ZAP domain of the edge's key with this number; the first key has number 0."""
    return DOMAIN + b".%d" % number if number else DOMAIN


class Gate:
    """A server that answers ZeroMQ's requests by an allow-list of public keys in Z85.

    ``allowed`` may be replaced at any time, and so may ``invited``: one-time keys, whose messages
    the server must take for nothing but a request to be enrolled. ``refused`` counts and logs
    refused handshakes. ``is_full`` returns whether too many bytes of a key's messages still wait; a
    handshake with the key then fails, and the client retries. ``present_domain``: ZAP domain of the
    edge's present key.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", allowed: Collection[bytes]
    ) -> None:
        self.refused = RefusedKeys()
        self._invited: Collection[bytes] = ()
        self.allowed = allowed
        self.present_domain = DOMAIN
        self.is_full: Callable[[bytes], bool] = lambda key: False
        self._domains: dict[bytes, bytes] = {}  # admitted key → ZAP domain of its last handshake
        self._bans: dict[bytes, float] = {}  # key → end of its ban (monotonic, s)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)

    @property
    def allowed(self) -> Collection[bytes]:
        """The public keys (Z85) that are admitted."""
        return self._allowed

    @allowed.setter
    def allowed(self, keys: Collection[bytes]) -> None:
        self._allowed = keys
        self.refused.add_names(keys)
        self._admitted = self._union()

    @property
    def invited(self) -> Collection[bytes]:
        """The one-time public keys (Z85) of open invitations."""
        return self._invited

    @invited.setter
    def invited(self, keys: Collection[bytes]) -> None:
        self._invited = keys
        self._admitted = self._union()

    @property
    def admitted(self) -> Collection[bytes]:
        """The keys that pass a handshake: the allowed keys and the invited ones."""
        return self._admitted

    def _union(self) -> Collection[bytes]:
        return frozenset((*self._allowed, *self._invited)) if self._invited else self._allowed

    def ban(self, key: bytes) -> None:
        """Refuse a key for `BAN_S` seconds."""
        self._bans[key] = time.monotonic() + BAN_S
        _log.warning("all connections of key %s are refused for %g s", key.decode(), BAN_S)

    def _admits(self, key: bytes) -> bool:
        return key in self._admitted and self._bans.get(key, 0.0) <= time.monotonic()

    @property
    def clients_of_former_key(self) -> set[bytes]:
        """The allowed keys of clients that last connected with the edge's former key."""
        domains = [*self._domains.items()]
        return {key for key, by in domains if by != self.present_domain and key in self.allowed}

    def answer_requests(self) -> bool:
        """Answer all waiting requests; `socket` is readable while requests wait. Return False."""
        while self.socket.poll(0):
            self._answer_one()
        return False

    def _answer_one(self) -> None:
        version, request, domain, address, _identity, mechanism, *credentials = (
            self.socket.recv_multipart()
        )
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        ours = domain.partition(b".")[0] == DOMAIN
        admitted = version == b"1.0" and ours and self._admits(key)
        if admitted and self.is_full(key):
            self._answer(request, _RETRY_LATER, key)
            return
        if admitted:
            self._domains[key] = domain
        if not admitted:
            peer = address.decode(errors="replace")
            self.refused.note(key, peer, listed=key in self.allowed)
        self._answer(request, _OK if admitted else _REFUSED, key)

    def _answer(self, request: bytes, status: tuple[bytes, bytes], key: bytes) -> None:
        self.socket.send_multipart([b"1.0", request, *status, key, b""])

    def close(self) -> None:
        """Stop answering; from now on no key is admitted."""
        self.socket.close(0)
