"""Open invitations: admit their one-time keys, and relay what comes with them.

An inviter (`wire.inviter`) on this machine owns an invitation and decides about it; this module
never writes a key or the allow-list. A message with a one-time key goes to the inviter and nowhere
else, and the invitation ends when the inviter's connection does.
"""

import logging
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import zmq

from pilotfish.base.errors import AccessDeniedError
from pilotfish.edge_runtime.live_settings import LiveSettings
from pilotfish.wire import messages as m
from pilotfish.wire.invitation import ENROL_BYTES, EnrolReply
from pilotfish.wire.invitation_socket import (
    Answer,
    EdgeIdentity,
    OneTimeKey,
    Relayed,
    connect,
    read_from_inviter,
    socket_paths,
)
from pilotfish.wire.keys import valid_name
from pilotfish.wire.transport import Envelope, Listener

_log = logging.getLogger("pilotfish.edge")

_MOST_OPEN: Final = 16  # maximum number of invitations at a time
_MOST_WAITING: Final = 8  # maximum number of unanswered requests of an invitation


class _Relay:
    """The connection to an inviter. public: its one-time key; b"": not yet known.

    waiting: clients whose requests the inviter has not answered.
    """

    def __init__(self, path: Path) -> None:
        self.socket: socket.socket = connect(path)
        self.public = b""
        self.waiting: deque[bytes] = deque()


class Invitations:
    """The open invitations of an edge with keys, by one-time public key (``open``).

    on_enrolled: called when an inviter has, or may have, added a device to the allow-list.
    """

    def __init__(
        self,
        listener: Listener,
        settings: LiveSettings,
        on_enrolled: Callable[[], None],
    ) -> None:
        self.open: dict[bytes, _Relay] = {}
        self._listener, self._settings = listener, settings
        self._on_enrolled = on_enrolled
        self._relays: dict[Path, _Relay] = {}
        self._problem = ""  # the last logged problem

    def update(self) -> None:
        """Notice new and ended invitations, and send the inviters' answers; never waits."""
        self._connect_new()
        for path, relay in [*self._relays.items()]:
            self._read(path, relay)

    def relay(self, envelope: Envelope) -> None:
        """Relay a message that came with the key of an open invitation.

        Messages beyond `_MOST_WAITING` are dropped: an honest device sends one.
        """
        relay = self.open[envelope.owner]
        fits = not envelope.frames and envelope.size <= ENROL_BYTES
        header = bytes(envelope.header) if fits else b""
        peer = self._listener.connections.address(envelope.client)
        if len(relay.waiting) < _MOST_WAITING:
            with suppress(OSError):  # the inviter is slow, or has gone, which `update` notices
                relay.socket.send(m.encode(Relayed(header=header, peer=peer)))
                relay.waiting.append(envelope.client)

    def close(self) -> None:
        """End all invitations at this edge."""
        for relay in self._relays.values():
            relay.socket.close()

    def _connect_new(self) -> None:
        folder = self._settings.folder
        try:
            paths = [] if folder is None else socket_paths(folder)
        except OSError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _log.warning("invitations cannot be read: %s", error)
            return
        for path in paths:
            if path not in self._relays and len(self._relays) < _MOST_OPEN:
                with suppress(OSError):  # a killed inviter's socket, or another user's
                    self._relays[path] = _Relay(path)

    def _read(self, path: Path, relay: _Relay) -> None:
        """Read all messages of an inviter."""
        with suppress(BlockingIOError):
            while True:
                match read_from_inviter(relay.socket):
                    case OneTimeKey() as key if not relay.public:
                        self._open(relay, key.public.encode())
                    case Answer() as answer if relay.waiting:
                        self._answer(relay.waiting.popleft(), answer)
                    case _:
                        self._end(path, relay)
                        return

    def _open(self, relay: _Relay, public: bytes) -> None:
        relay.public = public
        self.open[public] = relay
        self._apply()
        identity = EdgeIdentity(
            endpoint=self._listener.endpoint, public=self._settings.public_key.decode()
        )
        with suppress(OSError):  # the inviter has gone, which the next read notices
            relay.socket.send(m.encode(identity))
        _log.info("an invitation is open: one device may be enrolled with it")

    def _answer(self, client: bytes, answer: Answer) -> None:
        if answer.name:
            _log.info("enrolled %s by invitation", answer.name)
            self._on_enrolled()
            self._send(client, EnrolReply(name=valid_name(answer.name)))
        else:
            self._send(client, m.Failure(code=answer.code, message=answer.message))

    def _end(self, path: Path, relay: _Relay) -> None:
        del self._relays[path]
        relay.socket.close()
        if self.open.pop(relay.public, None) is not None:
            self._apply()
            _log.info("an invitation has ended")
        if relay.waiting:  # the inviter may have been killed after it had allowed a device
            self._on_enrolled()
        error = AccessDeniedError("This invitation was used, or has ended: make another one.")
        for client in relay.waiting:
            self._send(client, m.Failure(code=error.code, message=str(error)))

    def _send(self, client: bytes, reply: EnrolReply | m.Failure) -> None:
        with suppress(zmq.ZMQError):  # the device has gone; it asks again
            self._listener.send(client, reply)

    def _apply(self) -> None:
        assert self._listener.gate is not None
        self._listener.gate.invited = tuple(self.open)
