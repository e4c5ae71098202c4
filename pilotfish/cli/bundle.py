"""``pilotfish bundle``: pack everything for a board without a network into one folder."""

import argparse
import re
import sys
from pathlib import Path

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.progress import ProgressDisplay
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.deploy import bundle
from pilotfish.deploy.manifest import MACHINES, ROLES

_EXAMPLE = """\
example, on a machine with a network:
  pilotfish export model default --out drafter --precision int4
  pilotfish keys new signer --keys release           once; the secret key stays here
  pilotfish bundle --jetpack 6.2 --artifact drafter --edge tcp://edge.example:7077 \\
      --keys keys-of-this-board --sign release/signer.key --out bundle
then, into a BSP or onto a running board (docs/jetson.md):
  sudo pilotfish flash --signers release/signers --rootfs Linux_for_Tegra/rootfs bundle
  pilotfish flash --signers release/signers --ssh user@board bundle
"""
_LISTEN = "tcp://*:7077"


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "bundle",
        help="pack everything that a board needs",
        description="Makes a folder with wheels, artifacts, units, configuration, keys and\n"
        "checksums, from which `pilotfish flash` installs without a network. Needs the extra\n"
        "'bundle' (docs/jetson.md).",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--artifact",
        type=Path,
        action="append",
        required=True,
        metavar="DIR",
        help="artifact that the board serves; repeat the flag to pack further artifacts",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    add("--role", choices=ROLES, default="device", help="the board's role (%(default)s)")
    add("--edge", metavar="ADDRESS", help="role device: the edge's address, tcp://HOST:PORT")
    add("--listen", metavar="ADDRESS", help=f"role edge: where to listen ({_LISTEN})")
    add(
        "--keys",
        type=Path,
        metavar="DIR",
        help="folder of the board's keys. Role device: device.key and edge.pub; role edge: "
        "edge.key and allowed/. A missing device.key or edge.key is made",
    )
    add(
        "--jetpack",
        choices=tuple(bundle.JETPACKS),
        help="sets --python and --machine: "
        + "; ".join(f"{name}: {python}, {cpu}" for name, (python, cpu) in bundle.JETPACKS.items()),
    )
    add("--python", type=_python, metavar="3.N", help="the board's Python (default: this one's)")
    add("--machine", choices=MACHINES, help="the board's CPU (default: aarch64)")
    add(
        "--wheel",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="pack this wheel of a package, not the package index's; a vendor's "
        "onnxruntime-gpu replaces onnxruntime",
    )
    add(
        "--sign",
        type=Path,
        metavar="FILE",
        help="a signer's secret key, to sign the bundle (default: the bundle is not signed)",
    )
    add(
        "--signer",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="public key of another signer for the board to trust",
    )
    json_option(parser)
    parser.set_defaults(run=_run)


def _python(text: str) -> str:
    """Parse a version of Python that pilotfish runs on (an argparse type)."""
    if not re.fullmatch(r"3\.1[0-3]", text):
        raise argparse.ArgumentTypeError(f"{text} is not one of 3.10, 3.11, 3.12, 3.13")
    return text


def _run(args: argparse.Namespace) -> int:
    here = f"3.{sys.version_info.minor}"
    python, machine = bundle.JETPACKS.get(args.jetpack, (here, "aarch64"))
    wanted = bundle.BundleContents(
        role=args.role,
        artifacts=args.artifact,
        address=_address(args),
        keys=args.keys,
        python=args.python or python,
        machine=args.machine or machine,
        wheels=args.wheel,
        secret=args.sign,
        signers=args.signer,
        jetpack=args.jetpack,
    )
    with ProgressDisplay() as display:
        content, advice = bundle.make(wanted, args.out, display.show)
    for path in content.files:
        if "/engines/" in path:
            print(f"engine: {path} (--provider auto takes it on its GPUs)", file=sys.stderr)
    for line in advice:
        print(f"to do: {line}", file=sys.stderr)
    if args.sign is None:
        print(
            "the bundle is not signed: `pilotfish flash` will refuse it; make a key with "
            "`pilotfish keys new signer`, and name the key with --sign",
            file=sys.stderr,
        )
    print(f"digest: {content.digest}", file=sys.stderr)
    if args.json:
        write_json(
            args.json, {"name": content.name, "digest": content.digest, "bytes": content.size}
        )
    if args.json != "-":
        print(args.out)
    return 0


def _address(args: argparse.Namespace) -> str:
    """Return the address to write into the machine's configuration."""
    if args.role == "edge":
        if args.edge is not None:
            raise UnsupportedError(
                "--edge goes with --role device; a bundle of role edge takes --listen."
            )
        return args.listen or _LISTEN
    if args.edge is None or args.listen is not None:
        raise UnsupportedError(
            "A bundle of role device needs --edge, the edge's address, and takes no --listen."
        )
    address: str = args.edge
    return address
