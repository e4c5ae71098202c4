"""Invite one device: make a one-time key, judge the requests that come with it, allow the device.

In:  requests that a running edge relays (`wire.invitation_socket`). Out: the device's public key on
the allow-list. An invitation ends with the first device that is allowed, when its time is over, or
after `MOST_WRONG` wrong requests. Its secret key is nowhere but in the line, its public key only in
the memory of this process and of the edge.
"""

import secrets
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple
from weakref import finalize

import zmq
from zmq.utils import z85

from pilotfish.base.errors import (
    AccessDeniedError,
    InternalError,
    InvitationError,
    KeysError,
    MalformedError,
    PilotfishError,
    VersionMismatchError,
)
from pilotfish.wire import invitation_socket, keys
from pilotfish.wire.invitation import EnrolRequest, Invitation, decode_enrol_request
from pilotfish.wire.invitation_socket import Answer, EdgeIdentity, OneTimeKey, Relayed
from pilotfish.wire.messages import VERSION, encode

MOST_WRONG: Final = 5
_TURN_S = 0.5  # longest wait (s), so that a clock that also counts sleep ends the invitation
_MOST_EDGES = 8  # maximum number of connected edges


class EnrolledDevice(NamedTuple):
    """A device that was put on the allow-list. key: its public key in Z85. peer: its address."""

    name: str
    key: bytes
    peer: str


class Inviter:
    """An open invitation of an edge's key folder.

    valid_s: seconds from now on in which a device may use it. name: the device's name on the list;
    None: the device chooses it. problem: called with the reason why a device could not be allowed,
    which the device does not learn. endpoint: the edge that invites, of several that use the
    folder; None: the first that connects. Raises `KeysError`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        valid_s: float,
        name: str | None = None,
        problem: Callable[[str], object] = lambda reason: None,
        endpoint: str | None = None,
    ) -> None:
        self._directory, self._name, self._problem = directory, name, problem
        self._endpoint = endpoint
        self._public, self._secret = zmq.curve_keypair()
        self._deadline_s = boot_s() + valid_s
        self._edge: EdgeIdentity | None = None
        self._edges: set[socket.socket] = set()  # connections of edges that invite
        self._wrong = 0
        self._device: EnrolledDevice | None = None
        self._listening, self._path = invitation_socket.listen(directory, secrets.token_hex(8))
        self._remove = finalize(self, self._path.unlink, missing_ok=True)  # also at exit
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)

    def __enter__(self) -> "Inviter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def await_edge(self, within_s: float) -> EdgeIdentity | None:
        """Wait until an edge admits the one-time key; None: no edge did in time."""
        until_s = time.monotonic() + within_s
        while self._edge is None and time.monotonic() < until_s:
            self._turn(until_s - time.monotonic())
        return self._edge

    def invitation(self, address: str) -> Invitation:
        """Return the invitation to the edge that admits the key; devices reach it at ``address``.

        Only after `await_edge`.
        """
        assert self._edge is not None
        return Invitation(address, self._edge.public.encode(), self._secret)

    def await_device(self) -> EnrolledDevice:
        """Wait until a device is allowed; raises `InvitationError` if no device was in time."""
        while self._device is None:
            if boot_s() >= self._deadline_s:
                raise InvitationError("No device has used the invitation in time.")
            if self._wrong >= MOST_WRONG:
                raise InvitationError(
                    f"The invitation ended after {MOST_WRONG} wrong requests: somebody else has "
                    "its line. Make another, and show it to nobody."
                )
            self._turn(self._deadline_s - boot_s())
        return self._device

    def close(self) -> None:
        """End the invitation: edges stop to admit the one-time key at once."""
        self._remove()
        for key in [*self._selector.get_map().values()]:
            assert isinstance(key.fileobj, socket.socket)
            self._selector.unregister(key.fileobj)
            key.fileobj.close()
        self._selector.close()

    def _turn(self, most_s: float) -> None:
        """Serve edges for at most ``most_s`` seconds, or until something has happened."""
        for key, _ in self._selector.select(min(max(0.0, most_s), _TURN_S)):
            if key.fileobj is self._listening:
                self._accept()
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._serve(key.fileobj)

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        connection.setblocking(False)
        if len(self._selector.get_map()) > _MOST_EDGES:
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ)
        self._send(connection, OneTimeKey(public=self._public.decode()))

    def _serve(self, connection: socket.socket) -> None:
        try:
            message = invitation_socket.read_from_edge(connection)
        except BlockingIOError:  # the selector was wrong
            return
        match message:
            case EdgeIdentity() as edge if self._is_invited_to(edge):
                self._edges.add(connection)
                self._edge = self._edge or edge
            case Relayed() as relayed if connection in self._edges:
                self._send(connection, self._answer(relayed.header, relayed.peer))
            case _:
                self._edges.discard(connection)
                self._selector.unregister(connection)
                connection.close()

    def _is_invited_to(self, edge: EdgeIdentity) -> bool:
        """Return whether a device may be sent there: the edge has the folder's key, or its former.

        Whoever enters the folder of sockets could claim any other key.
        """
        if self._endpoint not in (None, edge.endpoint):
            return False
        secrets_here = {keys.edge_secret(self._directory), keys.former_secret(self._directory)}
        return edge.public.encode() in {zmq.curve_public(each) for each in secrets_here if each}

    def _send(self, connection: socket.socket, message: OneTimeKey | Answer) -> None:
        with suppress(OSError):  # the edge has gone, which the next read notices
            connection.send(encode(message))

    def _answer(self, header: bytes, peer: str) -> Answer:
        try:
            return Answer(name=self._allow(decode_enrol_request(header), peer))
        except MalformedError as error:
            self._wrong += 1
            return _refusal(error)
        except (AccessDeniedError, VersionMismatchError) as error:
            return _refusal(error)
        except KeysError as error:  # a full disk, for instance, which is not the device's fault
            self._problem(str(error))
            return _refusal(InternalError("The edge could not write its allow-list: see there."))

    def _allow(self, request: EnrolRequest, peer: str) -> str:
        """Put the device on the allow-list; return its name."""
        key = z85.encode(request.key)
        if self._device is not None and self._device.key == key:  # it did not get the answer
            return self._device.name
        if self._device is not None or boot_s() >= self._deadline_s or self._wrong >= MOST_WRONG:
            raise AccessDeniedError("This invitation was used, or has ended: make another one.")
        if request.version != VERSION:
            raise VersionMismatchError(
                f"The device uses version {request.version} of the wire protocol, but this edge "
                f"uses version {VERSION}: install the same Pilotfish release on both."
            )
        if key == self._public:  # everybody who saw the line has its secret half
            raise MalformedError("A device needs a key of its own, not the invitation's.")
        exact = self._name is not None
        name = keys.enrol(self._directory, key, self._name or request.name, exact=exact)
        self._device = EnrolledDevice(name, key, peer)
        return name


def boot_s() -> float:
    """Return the seconds since the machine's start, on a clock that counts sleep.

    Nobody can set this clock.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _refusal(error: PilotfishError) -> Answer:
    return Answer(code=error.code, message=str(error)[:256])
