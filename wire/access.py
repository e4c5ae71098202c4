"""Who may come in: the answering side of ZeroMQ's authentication protocol (ZAP, RFC 27).

ZeroMQ asks, over an in-process socket, about every CURVE handshake. Without somebody who answers
it would let every key in. The answer names the key as ``User-Id``, so that each message that
arrives carries the key of its sender, and a session can belong to a key.
"""

import logging

import zmq
from zmq.utils import z85

_ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"pilotfish"
_log = logging.getLogger("pilotfish.wire")


class Gate:
    """Answers ZeroMQ's questions from an allow-list of public keys in Z85."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", allowed: frozenset[bytes]
    ) -> None:
        self.allowed = allowed
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)

    def answer(self) -> bool:
        """Answer all questions; poll `socket` to know when there are some. Leaves none: False."""
        while self.socket.poll(0):
            self._answer_one()
        return False

    def _answer_one(self) -> None:
        version, request, domain, address, _identity, mechanism, *credentials = (
            self.socket.recv_multipart()
        )
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        welcome = version == b"1.0" and domain == DOMAIN and key in self.allowed
        if not welcome:
            _log.warning("refused key %s from %s", key.decode(), address.decode(errors="replace"))
        status = (b"200", b"OK") if welcome else (b"400", b"key not on the allow-list")
        self.socket.send_multipart([b"1.0", request, *status, key, b""])

    def close(self) -> None:
        """Stop answering; from now on nobody comes in."""
        self.socket.close(0)
