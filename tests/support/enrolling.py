"""Open invitations of a running edge, new devices, and what passes between them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from pilotfish.base.errors import PilotfishError
from pilotfish.device_runtime.enrolment import enrol
from pilotfish.wire import keys
from pilotfish.wire.invitation import Invitation
from pilotfish.wire.inviter import EnrolledDevice, Inviter
from pilotfish.wire.keys import AllowList, DeviceKeys, read_public
from tests.support.relay import Relay

WAIT_S = 20.0


class Invited:
    """An invitation that waits for a device in a thread of its own."""

    def __init__(self, inviter: Inviter, address: str, waiting: Future[EnrolledDevice]) -> None:
        self.inviter = inviter
        self.invitation = inviter.invitation(address)
        self._waiting = waiting

    def device(self) -> EnrolledDevice:
        """Wait for the device that was enrolled; raises what ended the invitation."""
        return self._waiting.result(WAIT_S)

    @property
    def is_open(self) -> bool:
        return not self._waiting.done()

    def by(self, address: str) -> Invitation:
        """Return the same invitation over another address, such as a relay's."""
        return replace(self.invitation, address=address)

    def keys(self) -> DeviceKeys:
        """Return the keys of a client that has the line."""
        return DeviceKeys(self.invitation.secret, self.invitation.public, self.invitation.edge)


@contextmanager
def inviting(
    folder: Path,
    address: str,
    *,
    valid_s: float = 60.0,
    name: str | None = None,
    problem: Callable[[str], object] = lambda reason: None,
) -> Iterator[Invited]:
    """Open an invitation that an edge has admitted."""
    inviter = Inviter(folder, valid_s=valid_s, name=name, problem=problem)
    with ThreadPoolExecutor(1) as pool:
        assert inviter.await_edge(WAIT_S) is not None

        def wait() -> EnrolledDevice:
            with inviter:
                return inviter.await_device()

        try:
            yield Invited(inviter, address, pool.submit(wait))
        finally:
            inviter._deadline_s = 0.0  # the thread ends


def allowed(folder: Path) -> dict[str, bytes]:
    """List the allow-list of a folder of keys as it is on disk: name → key."""
    return {name: key for key, name in AllowList.load(folder).names.items()}


def outcome(invitation: Invitation, folder: Path, name: str = "board") -> str:
    """Try to enrol a device; return its name, or the code of the error."""
    try:
        return enrol(invitation, folder, name, WAIT_S).name
    except PilotfishError as error:
        return error.code


def new_device(folder: Path) -> bytes:
    """Make a device's pair; return its public key."""
    return read_public(keys.create(folder, keys.DEVICE))


class Recorder(Relay):
    """A relay that keeps all bytes that pass: ``up`` and ``down``, for each connection."""

    def __init__(self, target: str) -> None:
        self.up: list[bytearray] = []
        self.down: list[bytearray] = []
        super().__init__(target)

    def readers(self) -> tuple[Callable[[bytes], None], Callable[[bytes], None]]:
        """Return what takes the bytes of a new connection, up and down."""
        up, down = bytearray(), bytearray()
        self.up.append(up)
        self.down.append(down)
        return up.extend, down.extend

    def _pass_on(
        self, source: socket.socket, sink: socket.socket, read: Callable[[bytes], None]
    ) -> None:
        """Pass bytes on, and let an end that hangs up do so to the other, which may just read."""
        with suppress(OSError):
            while data := source.recv(self.read_bytes):
                read(data)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    @property
    def seen(self) -> bytes:
        """All bytes so far."""
        return b"".join(bytes(each) for each in (*self.up, *self.down))
