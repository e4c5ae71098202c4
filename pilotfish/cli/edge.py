"""``pilotfish edge serve``: the edge daemon; ``pilotfish edge up``: with keys and an invitation."""

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread

from msgspec.structs import replace

from pilotfish.base.errors import KeysError, PilotfishError
from pilotfish.cli import edge_worker
from pilotfish.cli.configuration import ConfiguredParser, config_option, reread_args
from pilotfish.cli.default_models import DEFAULT, drafter_folder, target_folder
from pilotfish.cli.edge_parent import for_parent
from pilotfish.cli.enrolment import InvitationSettings, invite, invite_command
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, choices_as
from pilotfish.cli.streams import complain
from pilotfish.edge_runtime.edge_config import EdgeConfig
from pilotfish.edge_runtime.edge_daemon import serve
from pilotfish.engines.artifact import Artifact
from pilotfish.wire.keys import EDGE, create, default_directory

_EVERYWHERE = "tcp://*:7077"  # all IPv4 addresses
_DESCRIPTION = """\
Loads the target and verifies windows for many devices at once. Ctrl-C stops it at once; SIGTERM
lets it answer what it has received; SIGHUP makes it read keys and --config again.
"""
_EXAMPLE = """\
example:
  pilotfish edge serve --target target --keys --listen tcp://0.0.0.0:7077
"""


_UP = """\
Serves a target to devices on other machines, with keys: makes the edge's key pair if there is none,
and prints one line to paste on a device, which enrols that device (`pilotfish device up LINE`).
Ctrl-C stops the edge. For each further device run `pilotfish keys invite` beside it.
"""
_UP_EXAMPLE = """\
example:
  pilotfish edge up
  pilotfish edge up | ssh board pilotfish device up -

The line holds a one-time secret: it ends with its first use, or after --valid seconds.
"""


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "edge", help="run the edge", description="The edge is the end of the link that verifies."
    )
    actions = choices_as(ConfiguredParser, parser)
    edge_worker.add_to(actions)
    serve_parser = actions.add_parser(
        "serve",
        help="verify windows of devices until stopped",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config_option(serve_parser, "sessions = 16")
    add_flags(serve_parser, EdgeConfig)
    serve_parser.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)  # see `edge_parent`
    serve_parser.set_defaults(run=_serve)
    _add_up(actions)


def _add_up(actions: "argparse._SubParsersAction[ConfiguredParser]") -> None:
    up = actions.add_parser(
        "up",
        help="serve devices on other machines, and enrol the first by a line to paste",
        description=_UP,
        epilog=_UP_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config_option(up, "sessions = 16")
    add_flags(up, EdgeConfig, target=Path(DEFAULT), listen=_EVERYWHERE, keys=default_directory())
    add_flags(up, InvitationSettings)
    up.set_defaults(run=_up, parent_fd=None)


def _up(args: argparse.Namespace) -> int:
    settings = from_args(args, InvitationSettings)
    if not (args.keys / f"{EDGE}.key").exists():
        if (args.keys / f"{EDGE}.pub").exists():
            raise KeysError(
                f"{args.keys} belongs to a device: its {EDGE}.pub is another edge's. Give this "
                "edge a folder of its own (--keys DIR)."
            )
        create(args.keys, EDGE)

    def announce(endpoint: str) -> None:
        _announce(endpoint)
        inviting = (args.keys, settings, endpoint)
        Thread(target=_invite, args=inviting, name="invite", daemon=True).start()

    return _serve(args, announce)


def _invite(folder: Path, settings: InvitationSettings, endpoint: str) -> None:
    """Invite the first device, while the edge serves those that are enrolled."""
    try:
        invite(folder, settings, math.inf, endpoint)
    except (PilotfishError, OSError) as error:  # the edge goes on
        complain(f"{error} To invite a device: {invite_command(folder)}")


def _announce(endpoint: str) -> None:
    # one write call, so that no other thread's log line gets into it
    sys.stderr.write(f"pilotfish: the edge serves on {endpoint}\n")
    sys.stderr.flush()


def _serve(args: argparse.Namespace, announce: Callable[[str], None] = _announce) -> int:
    named = from_args(args, EdgeConfig)
    config = replace(
        named,
        target=_first_stage(target_folder(named.target, named.provider), named.cluster.stages),
        draft=None if named.draft is None else drafter_folder(named.draft, named.provider),
    )

    def reread() -> EdgeConfig:
        """Read the configuration again; keep the folders of models whose names stayed.

        Other models need a restart, so their names are not looked up: an export takes minutes.
        """
        now = from_args(reread_args(args), EdgeConfig)
        if (now.target, now.cluster.stages) == (named.target, named.cluster.stages):
            now = replace(now, target=config.target)
        return replace(now, draft=config.draft) if now.draft == named.draft else now

    if args.parent_fd is None:
        return serve(config, announce=announce, reread=reread)
    return for_parent(partial(serve, config), args.parent_fd)


def _first_stage(folder: Path, stages: int) -> Path:
    """Return the folder of the artifact to open, marked as in use: the target, or its first stage.

    stages: number of stages of the target; a whole target is cut into these, in the cache.
    """
    if stages == 1:
        return folder
    if not (folder / "stage-1").is_dir():
        from pilotfish.cli.export_split import stages_of  # late: imports the progress bars

        folder = stages_of(Artifact.open(folder), stages)
    return target_folder(folder / "stage-1")
