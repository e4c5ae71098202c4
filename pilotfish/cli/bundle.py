"""``pilotfish bundle``: pack everything for a board without a network into one folder."""

import argparse
import re
import sys
from pathlib import Path

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.progress import ProgressDisplay
from pilotfish.boards.board import BOARDS, JETPACKS, Board, board_named
from pilotfish.boards.recipe import check_jetpack
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.deploy import bundle
from pilotfish.deploy.board_check import check_board
from pilotfish.deploy.manifest import MACHINES, ROLES

_EXAMPLE = """\
example, on a machine with a network:
  pilotfish export model default --board orin-nano --jetpack 6.2 --out drafter
  pilotfish keys new signer --keys release           once; the secret key stays here
  pilotfish bundle --board orin-nano --jetpack 6.2 --artifact drafter \\
      --edge tcp://edge.example:7077 --keys board-keys --sign release/signer.key --out bundle
then, into NVIDIA's files for a board (BSP) or onto a running board (docs/jetson.md):
  sudo pilotfish flash --signers release/signers --rootfs Linux_for_Tegra/rootfs bundle
  pilotfish flash --signers release/signers --ssh user@board bundle
"""
_LISTEN = "tcp://*:7077"
_JETSON, _CARD = "aarch64", "x86_64"  # the CPUs of Jetsons, and of most machines with a card


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
        "--board",
        type=_board,
        metavar="NAME",
        help=f"the board: {', '.join(BOARDS)}; `pilotfish export list --boards` has those of other "
        "memories. Sets --machine and --python, and refuses an artifact that is too large for its "
        "memory or leaves its GPU idle",
    )
    add(
        "--jetpack",
        choices=tuple(JETPACKS),
        help="a Jetson's JetPack; sets --python and --machine ("
        + ", ".join(f"{name}: Python {each.python}" for name, each in JETPACKS.items())
        + f", both {_JETSON})",
    )
    add(
        "--cpu",
        action="store_true",
        help="run the model on the CPU although the board has a GPU; the bundle's configuration "
        "then names the provider cpu",
    )
    add("--python", type=_python, metavar="3.N", help="the board's Python (default: this one's)")
    add("--machine", choices=MACHINES, help="the board's CPU (default: its board's, or aarch64)")
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


def _board(name: str) -> Board:
    """Return the board of a name (an argparse type)."""
    try:
        return board_named(name)
    except UnsupportedError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _python(text: str) -> str:
    """Parse a version of Python that pilotfish runs on (an argparse type)."""
    if not re.fullmatch(r"3\.1[0-3]", text):
        raise argparse.ArgumentTypeError(f"{text} is not one of 3.10, 3.11, 3.12, 3.13")
    return text


def _run(args: argparse.Namespace) -> int:
    jetpack = _jetpack(args)
    board = check_board(args.board, jetpack, args.artifact, cpu=args.cpu, wheels=args.wheel)
    for line in board.lines if board is not None else ():
        print(line, file=sys.stderr)
    here = f"3.{sys.version_info.minor}"
    wanted = bundle.BundleContents(
        role=args.role,
        artifacts=args.artifact,
        address=_address(args),
        keys=args.keys,
        python=args.python or (here if jetpack is None else JETPACKS[jetpack].python),
        machine=args.machine or (_CARD if args.board is BOARDS["rtx"] else _JETSON),
        wheels=args.wheel,
        secret=args.sign,
        signers=args.signer,
        board=board,
        cpu=args.cpu,
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


def _jetpack(args: argparse.Namespace) -> str | None:
    """Return the JetPack of the board: the one that is named, or the only one it can have.

    Raises `UnsupportedError` if the board does not have it, or the arguments name another CPU.
    """
    jetpack = _possible_jetpack(args)
    if jetpack is not None and args.machine not in {None, _JETSON}:
        raise UnsupportedError(f"JetPack {jetpack} runs on {_JETSON}: leave out --machine.")
    return jetpack


def _possible_jetpack(args: argparse.Namespace) -> str | None:
    jetpack: str | None = args.jetpack
    board: Board | None = args.board
    if board is None:
        return jetpack
    check_jetpack(board, jetpack)
    if jetpack is None and board.jetpacks:
        likely = [each for each in board.jetpacks if args.python in {None, JETPACKS[each].python}]
        if len(likely) != 1:
            versions = " or ".join(
                f"{each} (L4T {JETPACKS[each].l4t})" for each in likely or board.jetpacks
            )
            raise UnsupportedError(
                f"{board.title} runs JetPack {versions}: name it with --jetpack; on the board, "
                "`head -1 /etc/nv_tegra_release` shows L4T's version."
            )
        (jetpack,) = likely
    return jetpack


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
