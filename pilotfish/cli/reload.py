"""``pilotfish reload``: make a systemd unit's service reload, and report the outcome."""

import argparse

from pilotfish.base import supervisor
from pilotfish.cli.options import Commands, positive


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "reload",
        help="make a unit's service read its configuration again (for ExecReload=)",
        description="Sends SIGHUP to a service and waits until it has read its configuration and "
        "keys again. Exits with 78 and one line if the configuration or a key is broken. The "
        "systemd units run this for `systemctl reload`.",
    )
    parser.add_argument("pid", type=int, help="the service's main process")
    parser.add_argument(
        "--within",
        type=positive,
        default=60.0,
        metavar="S",
        help="how many seconds to wait (%(default)s)",
    )
    parser.set_defaults(run=_reload)


def _reload(args: argparse.Namespace) -> int:
    supervisor.reload(args.pid, args.within)
    return 0
