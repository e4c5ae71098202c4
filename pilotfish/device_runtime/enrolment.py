"""Enrol this device at an edge by an invitation: the device's half of `wire.inviter`.

In:  an invitation and this device's folder of keys. Out: the device's key pair, the edge's public
key and its address in that folder, and the device on the edge's allow-list.

Nothing is written before the edge has answered, except the device's own key pair. Each step can be
repeated with the same invitation: if the answer was lost, the device's own key already connects.
"""

import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import zmq
from zmq.utils import z85

from pilotfish.base.errors import (
    AccessDeniedError,
    ConfigError,
    EdgeUnreachableError,
    KeysError,
    UnsupportedError,
    from_code,
)
from pilotfish.base.files import write_whole
from pilotfish.base.reading import read_content, reading_file
from pilotfish.wire import keys
from pilotfish.wire.address import require_address
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.invitation import EnrolReply, EnrolRequest, Invitation, decode_enrol_reply
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.link.attempts import CERTAIN_HANG_UPS, ConnectFailure

ADDRESS_FILE: Final = "edge.address"
WAIT_S: Final = 30.0  # time (s) in which the edge must answer
_REPLY_BYTES = 4096  # maximum bytes of an edge's answer
_MAX_ADDRESS_BYTES = 512
_POLL_S = 0.1  # interval (s) between looks at the attempts to connect
_RESEND_S = 5.0  # time (s) after which the request is sent again


class Enrolment(NamedTuple):
    """What this device has now. name: its name at the edge; "": the edge had enrolled it before."""

    address: str
    name: str


def enrol(
    invitation: Invitation, directory: Path, name: str | None = None, within_s: float = WAIT_S
) -> Enrolment:
    """Enrol this device's key, and store the edge's key and address in ``directory``.

    name: the device's name at the edge; None: this machine's host name. Raises `AccessDeniedError`
    if the edge refuses the invitation; `EdgeUnreachableError` if nobody answers, or somebody who
    does not have the edge's key; `KeysError`.
    """
    _refuse_another_edges_folder(directory, invitation)
    if not (directory / f"{keys.DEVICE}.key").exists():
        keys.create(directory, keys.DEVICE)
    secret = keys.device_secret(directory)
    public = zmq.curve_public(secret)
    request = EnrolRequest(
        key=z85.decode(public), name=keys.valid_name(socket.gethostname() if name is None else name)
    )
    once = DeviceKeys(invitation.secret, invitation.public, invitation.edge)
    try:
        chosen = _ask(invitation.address, once, request, within_s)
    except AccessDeniedError:
        if not _is_admitted(invitation.address, DeviceKeys(secret, public, invitation.edge)):
            raise
        chosen = ""
    _store(directory, invitation)
    return Enrolment(invitation.address, chosen)


def _refuse_another_edges_folder(directory: Path, invitation: Invitation) -> None:
    """Raise `KeysError` if this folder has another edge's secret key: edge.pub belongs to it."""
    if not (directory / f"{keys.EDGE}.key").exists():
        return
    if zmq.curve_public(keys.edge_secret(directory)) != invitation.edge:
        raise KeysError(
            f"{directory} has the keys of another edge: give this device a folder of its own "
            "(--keys DIR)."
        )


def stored_address(directory: Path) -> str:
    """Return the address of the edge at which this device was enrolled.

    Raises `KeysError` if it was not.
    """
    path = directory / ADDRESS_FILE
    if not path.exists():
        raise KeysError(
            f"This device has no edge yet ({path} is missing): run `pilotfish edge up` on the edge "
            "and the line that it prints here, or name an edge with --edge."
        )
    with reading_file(lambda problem: KeysError(f"{path} cannot be read: {problem}.")):
        address = read_content(path, _MAX_ADDRESS_BYTES).decode().strip()
    try:
        require_address(address)
    except UnsupportedError as error:
        raise ConfigError(f"{path}: {error}") from error
    return address


def _ask(endpoint: str, once: DeviceKeys, request: EnrolRequest, within_s: float) -> str:
    """Send the request until the edge answers; return the name that it chose."""
    sent_s = 0.0
    until_s = time.monotonic() + within_s
    with closing(EdgeChannel(endpoint, once, _REPLY_BYTES)) as channel:
        while (left_s := until_s - time.monotonic()) > 0:
            now_s = time.monotonic()
            if channel.connected and now_s - sent_s > _RESEND_S:
                channel.send(request)
                sent_s = now_s
            elif not channel.connected:
                sent_s = 0.0
            message = channel.receive_raw(min(left_s, _POLL_S))
            if message is not None:
                return _name_of(message[0])
            _raise_lasting_failure(endpoint, channel)
        raise _no_answer(endpoint, channel)


def _name_of(header: bytes | memoryview) -> str:
    reply = decode_enrol_reply(header)
    if isinstance(reply, EnrolReply):
        return reply.name
    raise from_code(reply.code, reply.message)


def _is_admitted(endpoint: str, identity: DeviceKeys) -> bool:
    """Return whether the edge admits this device's keys: an earlier attempt enrolled them."""
    until_s = time.monotonic() + _RESEND_S
    with closing(EdgeChannel(endpoint, identity, _REPLY_BYTES)) as channel:
        while not channel.connected and (left_s := until_s - time.monotonic()) > 0:
            channel.receive_raw(min(left_s, _POLL_S))
            if channel.attempts.refuses_key:
                return False
        return channel.connected


def _raise_lasting_failure(endpoint: str, channel: EdgeChannel) -> None:
    """Raise an error for a failure that no further attempt will change."""
    match channel.attempts.failure:
        case ConnectFailure.KEY:
            raise AccessDeniedError(
                f"The edge at {endpoint} refuses this invitation: it was used, its time is over, "
                "or it was withdrawn. Make another line on the edge with `pilotfish keys invite`."
            )
        case ConnectFailure.MECHANISM | ConnectFailure.OTHER:
            raise EdgeUnreachableError(
                f"What answers at {endpoint} is not an edge with keys: ask the edge's operator "
                "for a line with the right address (--address)."
            )
        case ConnectFailure.CLOSED if channel.attempts.hang_ups >= CERTAIN_HANG_UPS:
            raise EdgeUnreachableError(
                f"What answers at {endpoint} does not have the key that the invitation names: it "
                "is another edge, or somebody between this device and the edge. Nothing was sent."
            )


def _no_answer(endpoint: str, channel: EdgeChannel) -> EdgeUnreachableError:
    if channel.attempts.failure is None and channel.connections:
        return EdgeUnreachableError(
            f"The edge at {endpoint} did not answer: the command that made the invitation no "
            "longer runs, or is suspended. Make another line there."
        )
    return EdgeUnreachableError(
        f"No edge answers at {endpoint}: check that it runs, that a firewall lets its port "
        "through, and that this is its address in this network; else make another line there with "
        "--address."
    )


def _store(directory: Path, invitation: Invitation) -> None:
    """Store the edge's public key, and its address."""
    content = {
        directory / f"{keys.EDGE}.pub": invitation.edge,
        directory / ADDRESS_FILE: invitation.address.encode(),
    }
    for path, line in content.items():
        with keys.locked_folder(path, 0o700):
            write_whole(path, line + b"\n", keys.PUBLIC_MODE)
