"""``pilotfish keys``: make, list and rotate keys; invite, enrol, allow and deny devices."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pilotfish.base.errors import ConfigError, KeysError
from pilotfish.cli.configuration import read_settings
from pilotfish.cli.enrolment import InvitationSettings, accept, invite
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, choices_of
from pilotfish.deploy import signatures
from pilotfish.device_runtime.enrolment import ADDRESS_FILE
from pilotfish.wire import keys, rotation

SETTINGS = Path("/etc/pilotfish")  # configuration of installed services
# services with an allow-list; the settings of each are in SETTINGS/NAME.toml
_EDGES = ("edge", "worker")
_SERVICES = (*_EDGES, keys.DEVICE)
_EDGE_WITHIN_S = 10.0  # time (s) in which a running edge notices an invitation, even during a pass


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "keys",
        help="make and list keys; invite, allow and deny devices",
        description="CURVE keys. The short way is `keys invite` on the edge and `device up LINE` "
        "on the device. By hand: the edge needs edge.key and the public keys of its devices in "
        "allowed/; a device needs device.key and the edge's edge.pub. A key pair in OpenSSH's "
        "format signs bundles: signer.key and signers/signer.pub.",
    )
    actions = choices_of(parser)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--keys",
        type=Path,
        metavar="DIR",
        help=f"the key folder (default: $PILOTFISH_KEYS; for root, if a service is installed "
        f"here, the folder that the service's file in {SETTINGS} names; else {_own_folder()})",
    )
    new = actions.add_parser(
        "new",
        parents=[common],
        help="make a pair NAME.key and NAME.pub",
        description="Makes a CURVE pair, NAME.key and NAME.pub, for one end of the link. Never "
        "overwrites a key. The name `signer` makes another kind of pair: signer.key signs "
        "bundles (`pilotfish bundle --sign`), and signers/signer.pub is for machines that "
        "shall trust these bundles (`pilotfish flash --signers`).",
    )
    new.add_argument(
        "name", help="'edge' on an edge, 'device' on a device, 'signer' where bundles are made"
    )
    new.set_defaults(run=_new)
    listing = actions.add_parser("list", parents=[common], help="list the keys of the folder")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)
    allow = actions.add_parser(
        "allow",
        parents=[common],
        help="allow a device",
        description="Puts a device's public key on the edge's allow-list. The change takes "
        "effect when the edge reloads its keys.",
    )
    allow.add_argument(
        "public", help="the device's public key file, or the name of a pair in this folder"
    )
    allow.add_argument(
        "--name", help="the device's name in the allow-list (default: the name of the key file)"
    )
    allow.set_defaults(run=_allow)
    invitation = actions.add_parser(
        "invite",
        parents=[common],
        help="print a line that enrols one device",
        description="Invites one device of a running edge: prints a line for the device, "
        "`pilotfish device up …`, and waits until the device is on the allow-list, which takes "
        "effect at once. The line holds a one-time secret. It ends with its first use, with its "
        "time, with the fifth wrong request, and when this command is stopped. docs/keys.md has "
        "the details.",
    )
    add_flags(invitation, InvitationSettings)
    invitation.set_defaults(run=_invite)
    acceptance = actions.add_parser(
        "accept",
        parents=[common],
        help="enrol this device by such a line",
        description="Enrols this device, whose service is installed, by the line of `keys invite`: "
        "makes device.key if it is missing, and stores the edge's edge.pub and edge.address. "
        "(`pilotfish device up LINE` does the same, and serves.)",
    )
    acceptance.add_argument("line", nargs="+", metavar="LINE", help="the line; '-': from stdin")
    acceptance.add_argument(
        "--name", help="this device's name in the edge's allow-list (default: its host name)"
    )
    acceptance.set_defaults(run=_accept)
    deny = actions.add_parser(
        "deny",
        parents=[common],
        help="take a device off the allow-list",
        description="Takes a device's key off the edge's allow-list, under every name that the "
        "key has there. When the edge reloads its keys, it cuts the device's connections.",
    )
    deny.add_argument("name", help="the device's name in the allow-list")
    deny.set_defaults(run=_deny)
    rotate = actions.add_parser(
        "rotate",
        parents=[common],
        help="replace the edge's key, with a time in which both keys work",
        description="Makes a new edge.key and edge.pub. After its next reload, the edge "
        "answers to the new key and to the former key, so that the devices can get the new "
        "edge.pub one by one. Then `--finish` and another reload remove the former key. "
        "docs/keys.md has all steps.",
    )
    rotate.add_argument(
        "--finish",
        action="store_true",
        help="remove the former key, once every device has the new one",
    )
    rotate.set_defaults(run=_rotate)


def _new(args: argparse.Namespace) -> int:
    if args.name == signatures.SIGNER:
        print(signatures.create(args.keys or _own_folder()))
        return 0
    services = {keys.EDGE: _EDGES, keys.DEVICE: (keys.DEVICE,)}.get(args.name, _SERVICES)
    print(keys.create(_folder(args.keys, services), args.name))
    return 0


def _list(args: argparse.Namespace) -> int:
    folder = _folder(args.keys, _SERVICES)
    rows = [*keys.listing(folder), *signatures.listing(folder)]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    table = Table("name", "kind", "public key", title=f"Keys in {folder}")
    for row in rows:
        table.add_row(row["name"], row["kind"], row["public"])
    Console(markup=False).print(table)  # markup off: a key may contain brackets
    return 0


def _allow(args: argparse.Namespace) -> int:
    folder, public = _folder(args.keys, _EDGES), Path(args.public)
    if not public.exists() and (folder / f"{args.public}.pub").exists():
        public = folder / f"{args.public}.pub"
    print(keys.allow(folder, public, args.name))
    _advise(folder, "The edge accepts this device after its next reload")
    return 0


def _invite(args: argparse.Namespace) -> int:
    folder = _folder(args.keys, _EDGES)
    invite(folder, from_args(args, InvitationSettings), _EDGE_WITHIN_S)
    return 0


def _accept(args: argparse.Namespace) -> int:
    folder = _folder(args.keys, (keys.DEVICE,))
    address = accept(args.line, folder, args.name)
    print(folder / ADDRESS_FILE)
    print(
        f'pilotfish: for the service, write edge = "{address}" into {_settings(keys.DEVICE)}, and '
        "run `sudo systemctl restart pilotfish-device`.",
        file=sys.stderr,
    )
    return 0


def _deny(args: argparse.Namespace) -> int:
    folder = _folder(args.keys, _EDGES)
    for path in keys.deny(folder, args.name):
        print(path)
    _advise(folder, "The edge cuts this device off after its next reload")
    return 0


def _rotate(args: argparse.Namespace) -> int:
    folder = _folder(args.keys, _EDGES)
    if args.finish:
        for path in rotation.finish(folder):
            print(path)
        _advise(folder, "After its next reload, the edge answers only to the new key")
        return 0
    print(rotation.begin(folder))
    _advise(
        folder,
        "Give this file to each device, then run `pilotfish keys rotate --finish`. The edge "
        "answers to both keys after its next reload",
    )
    return 0


# Folders


def _own_folder() -> Path:
    return keys.default_directory()


def _folder(named: Path | None, services: Sequence[str]) -> Path:
    """Return the folder of keys: ``named``, else the first installed service's, else the user's.

    Warns on stderr if another of the services has a different folder. Raises `KeysError` if the
    first installed service's file cannot be read, or no service's file names a folder.
    """
    if named is not None:
        return named
    installed = [each for each in services if _settings(each).exists()]
    if "PILOTFISH_KEYS" in os.environ or not installed:
        return _own_folder()
    if os.geteuid() != 0:
        print(
            f"pilotfish: the service on this machine has its own folder of keys, which "
            f"{_settings(installed[0])} names: to use that folder, run the command with sudo.",
            file=sys.stderr,
        )
        return _own_folder()
    folders = {installed[0]: _service_folder(installed[0])}
    for service in installed[1:]:
        with suppress(KeysError):  # a broken file of a further service does not matter here
            folders[service] = _service_folder(service)
    named_folders = [(service, folder) for service, folder in folders.items() if folder is not None]
    if not named_folders:
        raise KeysError(
            f"{_settings(installed[0])} names no folder of keys: write the folder into this file "
            f'(keys = "{SETTINGS}/keys"), or name the folder with --keys.'
        )
    chosen, first = named_folders[0]
    for service, folder in named_folders:
        if not _same(first, folder):
            print(
                f"pilotfish: these are the keys of pilotfish-{chosen}. The keys of "
                f"pilotfish-{service} are in {folder}: name that folder with --keys.",
                file=sys.stderr,
            )
    return first


def _same(folder: Path, other: Path) -> bool:
    return folder.resolve() == other.resolve()


def _settings(service: str) -> Path:
    return SETTINGS / f"{service}.toml"


def _service_folder(service: str) -> Path | None:
    """Return the folder of keys that an installed service's file names; None if it names none."""
    try:
        folder = read_settings(_settings(service)).get("keys")
    except ConfigError as error:
        raise KeysError(f"{error} Or name the folder of keys with --keys.") from error
    return Path(folder) if isinstance(folder, str) else None


def _advise(folder: Path, what: str) -> None:
    """Say on stderr which command makes the edge read its keys again."""
    units = []
    for service in _EDGES:
        with suppress(KeysError):  # not installed, or its file is broken
            theirs = _service_folder(service)
            if theirs is not None and _same(theirs, folder):
                units.append(f"pilotfish-{service}")
    first, *others = units or [""]
    how = f"`sudo systemctl reload {first}`" if first else "send it SIGHUP"
    if others:  # the settings of both services may exist although only one service runs
        how += f", and {', '.join(others)}, too, if that service runs here"
    print(f"pilotfish: {what}: {how}.", file=sys.stderr)
