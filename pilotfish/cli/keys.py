"""``pilotfish keys``: make keys, list them, let devices in; also the keys that sign bundles."""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pilotfish.cli.options import Commands, choices_of
from pilotfish.deploy import signatures
from pilotfish.wire import keys


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "keys",
        help="make keys, list them, let devices in",
        description="CURVE keys. The edge needs edge.key and the public keys of its devices in "
        "allowed/; a device needs device.key and the edge's edge.pub. A pair of another kind, "
        "OpenSSH's, signs bundles: signer.key and signers/signer.pub.",
    )
    actions = choices_of(parser)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--keys",
        type=Path,
        default=keys.default_directory(),
        metavar="DIR",
        help="the key folder (%(default)s)",
    )
    new = actions.add_parser(
        "new",
        parents=[common],
        help="make a pair NAME.key and NAME.pub",
        description="Makes a CURVE pair, NAME.key and NAME.pub, for one end of the link. Never "
        "overwrites. `signer` is another kind: signer.key signs bundles (`pilotfish bundle "
        "--sign`), signers/signer.pub is for machines that shall trust them (`pilotfish flash "
        "--signers`).",
    )
    new.add_argument(
        "name", help="'edge' on an edge, 'device' on a device, 'signer' where bundles are made"
    )
    new.set_defaults(run=_new)
    listing = actions.add_parser("list", parents=[common], help="list the keys of the folder")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)
    allow = actions.add_parser("allow", parents=[common], help="let a device in")
    allow.add_argument(
        "public", help="the device's public key file, or the name of a pair in this folder"
    )
    allow.add_argument(
        "--name", help="what to call it in the allow-list (default: the file's name)"
    )
    allow.set_defaults(run=_allow)


def _new(args: argparse.Namespace) -> int:
    if args.name == signatures.SIGNER:
        print(signatures.create(args.keys))
    else:
        print(keys.create(args.keys, args.name))
    return 0


def _list(args: argparse.Namespace) -> int:
    rows = [*keys.listing(args.keys), *signatures.listing(args.keys)]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    table = Table("name", "kind", "public key", title=f"Keys in {args.keys}")
    for row in rows:
        table.add_row(row["name"], row["kind"], row["public"])
    Console(markup=False).print(table)  # a key may hold brackets
    return 0


def _allow(args: argparse.Namespace) -> int:
    public = Path(args.public)
    if not public.exists() and (args.keys / f"{args.public}.pub").exists():
        public = args.keys / f"{args.public}.pub"
    print(keys.allow(args.keys, public, args.name))
    return 0
