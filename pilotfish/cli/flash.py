"""``pilotfish flash``: install a bundle into a root file system, or onto a running board."""

import argparse
import sys
from pathlib import Path

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.progress import ProgressDisplay
from pilotfish.cli.options import Commands, int_between
from pilotfish.deploy import admission, install
from pilotfish.deploy.ssh import Board

_EXAMPLE = """\
examples:
  sudo pilotfish flash --signers release/signers --rootfs Linux_for_Tegra/rootfs bundle
                                                            before the board is flashed
  pilotfish flash --signers release/signers --ssh user@board bundle
                                                            onto a board that runs
  sudo pilotfish flash --rootfs / bundle                    onto this machine, by its own signers
  pilotfish flash --ssh user@board --check
  pilotfish flash --ssh user@board --rollback

If the bundle names its board (`pilotfish bundle --board`), flash says what to expect there, and
whether the board is another one; it refuses a model that the running board's memory cannot hold.

A bundle is installed only if this machine trusts its signer (the keys in --signers). If the board
has its own list (/etc/pilotfish/signers), the signer must be in that list, too.
Settings and keys that /etc/pilotfish has already stay as they are.
If the service does not start with the new version, the previous one is restored.

Exit codes: 0 done; 1 --check found a fault; 65 the bundle is damaged, is not signed, or its signer
is not trusted; 73 the bundle cannot be installed there, the board lacks memory for its model, or a
newer one is installed; 75 the service does not start; 77 the user is not root, or no signers are
named.
"""


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "flash",
        help="install a bundle on a board",
        description="Installs a bundle into a root file system, without running any program of\n"
        "that system, or onto a running board. Upgrades in place and keeps the previous version.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "bundle",
        type=Path,
        nargs="?",
        metavar="BUNDLE",
        help="the folder that `pilotfish bundle` made",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--rootfs", type=Path, metavar="DIR", help="a root file system; / is this machine's"
    )
    where.add_argument("--ssh", metavar="USER@HOST", help="a running board")
    add("--port", type=int_between(1, 65535), help="with --ssh: the board's port")
    add(
        "--ssh-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with --ssh: an option for `ssh -o`; may be repeated",
    )
    add(
        "--root",
        metavar="DIR",
        help="with --ssh: a root file system that is mounted on the board (default: /)",
    )
    admission.add_arguments(parser)
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check",
        action="store_true",
        help="compare the installed files with the record of the installation",
    )
    action.add_argument("--rollback", action="store_true", help="restore the previous version")
    action.add_argument(
        "--uninstall", action="store_true", help="remove the installation, but keep settings"
    )
    add(
        "--purge",
        action="store_true",
        help="with --uninstall: remove settings, keys and state, too",
    )
    parser.set_defaults(run=_run, verify=False)


def _run(args: argparse.Namespace) -> int:
    bare = args.check or args.rollback or args.uninstall
    if bare == (args.bundle is not None):
        raise UnsupportedError("Name a bundle, or give one of --check, --rollback and --uninstall.")
    if args.purge and not args.uninstall:
        raise UnsupportedError("--purge goes with --uninstall.")
    demands = admission.policy_from_args(args)
    if bare and (args.digest or args.unsigned or args.downgrade):
        raise UnsupportedError("--digest, --unsigned and --downgrade go with a bundle.")
    if args.rootfs is not None:
        if args.port is not None or args.ssh_option or args.root is not None:
            raise UnsupportedError("--port, --ssh-option and --root go with --ssh.")
        args.root = args.rootfs
        with ProgressDisplay() as display:
            return install.run(args, display.show)
    board = Board(args.ssh, args.port, args.ssh_option, args.root or "/")
    words = ["--root", board.root]
    words += [
        f"--{name}" for name in ("check", "rollback", "uninstall", "purge") if vars(args)[name]
    ]
    with ProgressDisplay() as display:
        if bare:
            return board.do(words, display.show)
        code = board.install(args.bundle, demands, words, install.say, display.show)
    if code == 0:
        print(f"{args.ssh}: installed", file=sys.stderr)
    return code
