"""The socket between an edge and the command that invites a device, on the same machine.

The edge faces the network, and under systemd it may not write its own allow-list. So the command
(`wire.inviter`) judges requests and writes the list, and the edge only relays:

    inviter → edge    `OneTimeKey`: admit this key; while the connection lasts, and no longer
    edge → inviter    `EdgeIdentity`: the key is admitted now, at this address
    edge → inviter    `Relayed`: a message from a client with that key
    inviter → edge    `Answer`: for each relayed message, in the same order

Each message is one packet of a Unix socket in the folder ``invitations`` of the key folder. Whoever
may write there may also write the allow-list. If the inviter dies, the invitation has ended; if the
edge dies, nobody can use the invitation until an edge has connected again.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec

from pilotfish.base.errors import KeysError, MalformedError
from pilotfish.base.prose import MOST_CHARACTERS
from pilotfish.wire.invitation import ENROL_BYTES
from pilotfish.wire.messages import Header, Text, decode_checked

FOLDER: Final = "invitations"
PACKET_BYTES: Final = 4096
_SUFFIX = ".sock"
_BACKLOG = 8
_Key = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]  # a public key in Z85


class OneTimeKey(Header, tag="one-time-key", frozen=True):
    """The public key that only this invitation's device uses."""

    public: _Key


class EdgeIdentity(Header, tag="edge", frozen=True):
    """The edge that admits the one-time key: where it listens, and its present public key."""

    endpoint: Text
    public: _Key


class Relayed(Header, tag="relayed", frozen=True):
    """A message that came with the one-time key, and its sender's address.

    header: its bytes; b"" if it has frames, or is too long for a request.
    """

    header: Annotated[bytes, msgspec.Meta(max_length=ENROL_BYTES)]
    peer: Text


class Answer(Header, tag="answer", frozen=True):
    """The answer to a relayed message: the device's name, or else an error's code and message."""

    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""
    message: Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)] = ""


_from_edge: "msgspec.msgpack.Decoder[EdgeIdentity | Relayed]" = msgspec.msgpack.Decoder(
    EdgeIdentity | Relayed
)
_from_inviter: "msgspec.msgpack.Decoder[OneTimeKey | Answer]" = msgspec.msgpack.Decoder(
    OneTimeKey | Answer
)


def read_from_edge(connection: socket.socket) -> EdgeIdentity | Relayed | None:
    """Receive the edge's next message; None: the connection has ended."""
    packet = _receive(connection)
    with suppress(MalformedError):
        return decode_checked(_from_edge, packet, PACKET_BYTES) if packet else None
    return None


def read_from_inviter(connection: socket.socket) -> OneTimeKey | Answer | None:
    """Receive the inviter's next message; None: the invitation has ended.

    Raises `BlockingIOError` if nothing has arrived.
    """
    packet = _receive(connection)
    with suppress(MalformedError):
        return decode_checked(_from_inviter, packet, PACKET_BYTES) if packet else None
    return None


def _receive(connection: socket.socket) -> bytes:
    # An end that closes with unread packets resets the connection. The kernel reports that before
    # the packets which that end had sent, and only once.
    for _ in range(2):
        with suppress(ConnectionError):
            return connection.recv(PACKET_BYTES)
    return b""


def listen(directory: Path, name: str) -> tuple[socket.socket, Path]:
    """Open an invitation's socket in a key folder; raises `KeysError`.

    If root does so in a folder that belongs to a service's group, that group may connect. Removes
    sockets that killed commands left.
    """
    folder = directory / FOLDER
    path, early = folder / f"{name}{_SUFFIX}", folder / f".{name}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        group = directory.stat().st_gid
        shared = os.geteuid() == 0 and group != 0
        folder.mkdir(mode=0o700, exist_ok=True)
        if shared:
            _share(folder, group)
        _remove_dead(folder)
        with _short(folder) as short:
            listening.bind(str(short / early.name))
        if shared:
            os.chown(early, -1, group)
        early.chmod(0o660 if shared else 0o600)
        listening.listen(_BACKLOG)
        early.rename(path)  # only now does an edge see it
    except OSError as error:
        listening.close()
        with suppress(OSError):
            early.unlink(missing_ok=True)
        raise KeysError(f"{path} cannot be made: {error.strerror}.") from error
    return listening, path


def _share(folder: Path, group: int) -> None:
    """Let a group enter a folder; raises `OSError` for a symbolic link, which users could place."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fchown(descriptor, -1, group)
        os.fchmod(descriptor, 0o750)
    finally:
        os.close(descriptor)


def connect(path: Path) -> socket.socket:
    """Connect to an invitation's socket without waiting; raises `OSError`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.setblocking(False)
    try:
        with _short(path.parent) as short:
            connection.connect(str(short / path.name))
    except OSError:
        connection.close()
        raise
    return connection


def socket_paths(directory: Path) -> list[Path]:
    """List the invitations' sockets in a key folder; raises `OSError`."""
    with suppress(FileNotFoundError):
        return sorted(each for each in (directory / FOLDER).iterdir() if each.suffix == _SUFFIX)
    return []


def _remove_dead(folder: Path) -> None:
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(BlockingIOError):  # its inviter lives, but has many connections
            try:
                connect(path).close()
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except FileNotFoundError:  # its inviter has just removed it
                pass


@contextmanager
def _short(folder: Path) -> Iterator[Path]:
    """Yield a short path of a folder: a Unix socket's path has at most 107 bytes."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
