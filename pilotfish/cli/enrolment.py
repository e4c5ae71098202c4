"""Enrol a device by one line: `invite` prints it on the edge, `accept` uses it on the device.

Only the line goes to stdout, as a command to paste or to pipe; everything else goes to stderr.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated

from msgspec import Struct

from pilotfish.base.errors import (
    EdgeUnreachableError,
    InvitationError,
    KeysError,
    UnsupportedError,
)
from pilotfish.base.reading import reading_file
from pilotfish.base.settings import setting
from pilotfish.cli.streams import complain
from pilotfish.device_runtime.enrolment import enrol
from pilotfish.wire.address import outgoing_address, require_address, split_listening
from pilotfish.wire.invitation import MOST_TEXT, parse_line
from pilotfish.wire.inviter import Inviter
from pilotfish.wire.keys import expect_free_name
from pilotfish.wire.transport import is_loopback


class InvitationSettings(Struct, frozen=True, kw_only=True):
    """The settings of an invitation."""

    address: Annotated[
        str | None,
        setting(
            "the edge's address in the invitation, as devices reach it (default: this machine's "
            "address in the network of its default route, and the edge's port)",
            metavar="HOST[:PORT]",
        ),
    ] = None
    valid_s: Annotated[
        float, setting("seconds in which a device can use the invitation", gt=0, le=86_400)
    ] = 600.0
    device_name: Annotated[
        str | None,
        setting(
            "the device's name in the allow-list (default: the device chooses, by its host name)",
            metavar="NAME",
        ),
    ] = None


def invite(
    folder: Path,
    settings: InvitationSettings,
    edge_within_s: float,
    endpoint: str | None = None,
) -> None:
    """Invite one device, and return when it is allowed.

    folder: the key folder of a running edge, which has ``edge_within_s`` seconds to admit the one-
    time key. endpoint: that edge's, if several use the folder. Raises `EdgeUnreachableError` if no
    edge does, `InvitationError` if no device uses the line, `KeysError` if the folder is missing or
    has a device of this name already.
    """
    if not folder.is_dir():
        raise KeysError(
            f"{folder} is missing: start an edge with `pilotfish edge up`, or name its key folder "
            "with --keys."
        )
    if settings.device_name is not None:
        expect_free_name(folder, settings.device_name)
    with Inviter(
        folder,
        valid_s=settings.valid_s,
        name=settings.device_name,
        problem=complain,
        endpoint=endpoint,
    ) as inviter:
        edge = inviter.await_edge(edge_within_s)
        if edge is None:
            raise EdgeUnreachableError(
                f"No edge that uses the keys in {folder} answers: start it with `pilotfish edge "
                "up` or as a service; if it still loads its target, wait until it serves; or name "
                "its folder with --keys."
            )
        invitation = inviter.invitation(device_address(edge.endpoint, settings.address))
        _describe(invitation.address, settings.valid_s)
        print(f"pilotfish device up {invitation.line}", flush=True)
        device = inviter.await_device()
    _say(
        f"enrolled: {device.name}, key {device.key.decode()}"
        f"{f', from {device.peer}' if device.peer else ''}. To invite another device: "
        f"{invite_command(folder)}"
    )


def invite_command(folder: Path) -> str:
    """Return the command that invites a device of the edge with this key folder."""
    return f"pilotfish keys invite --keys {quote(str(folder))}"


def accept(words: Sequence[str], folder: Path, name: str | None) -> str:
    """Enrol this device by a line, and return the edge's address.

    words: the line; ``-``: read it from stdin. folder: the device's key folder. name: the device's
    name at the edge; None: its host name. Raises the errors of `parse_line` and `enrol`.
    """
    text = " ".join(words)
    if list(words) == ["-"]:
        with reading_file(lambda problem: InvitationError(f"stdin cannot be read: {problem}.")):
            # not to the end: `edge up` keeps the pipe open
            lines = iter(lambda: sys.stdin.readline(MOST_TEXT), "")
            text = next((line for line in lines if line.strip()), "")
    enrolment = enrol(parse_line(text), folder, name)
    as_name = f"as {enrolment.name}" if enrolment.name else "already"
    _say(f"this device is enrolled {as_name} at {enrolment.address}")
    return enrolment.address


def device_address(endpoint: str, wish: str | None) -> str:
    """Return the edge's address for devices. endpoint: where it listens. wish: --address.

    Raises `UnsupportedError` if no address can be determined.
    """
    host, port = split_listening(endpoint)
    if wish is not None:
        wish = wish.removeprefix("tcp://")
        has_port = wish.rpartition(":")[2].isdecimal()
        # a bare IPv6 address has many colons, and no port
        if wish.count(":") > 1 and "[" not in wish:
            wish, has_port = f"[{wish}]", False
        address = f"tcp://{wish}" if has_port else f"tcp://{wish}:{port}"
        require_address(address)
        return address
    if port is None or host not in ("*", "0.0.0.0", "[::]"):
        return endpoint
    outgoing = outgoing_address(ipv6=host == "[::]")
    if outgoing is None:
        raise UnsupportedError(
            f"This machine has no default route to which an edge on {endpoint} listens, so its "
            "address is not known: name the address at which devices reach it with --address, or "
            "listen on IPv6, too (--listen 'tcp://[::]:7077')."
        )
    return f"tcp://{outgoing}:{port}"


def _describe(address: str, valid_s: float) -> None:
    end = time.strftime("%H:%M", time.localtime(time.time() + valid_s))
    _say(f"to enrol one device at {address}, run this line on it before {end}. Show it to nobody:")
    if is_loopback(address):
        _say("this address reaches the edge from this machine only: see --address and --listen")


def _say(sentence: str) -> None:
    print(f"pilotfish: {sentence}", file=sys.stderr, flush=True)
