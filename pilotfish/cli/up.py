"""``pilotfish up``: both ends on this machine, with the chat page and the API."""

import argparse
import socket
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from msgspec import structs

from pilotfish.base.progress import ProgressDisplay
from pilotfish.cli.announcement import announce_service
from pilotfish.cli.default_models import DEFAULT
from pilotfish.cli.extras import require_service
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.local_edge import both_ends, target_option
from pilotfish.cli.options import Commands
from pilotfish.device_runtime.device_config import ServiceConfig
from pilotfish.wire.request import AUTO, Request

_DESCRIPTION = """\
Runs a drafter and its target on this machine, and serves a chat page and OpenAI's API. The first
start fetches the default model (93 MB) and exports it; the models stay in the cache. Without
options nothing needs a key, because everything listens on loopback. Each end uses half of the CPUs.
Ctrl-C or SIGTERM stops both ends after the running answers.
"""
_EXAMPLE = """\
examples:
  pilotfish up                                the default model as drafter and target
  pilotfish up --target target --draft drafter
  pilotfish up --target target --draft text   no drafter: draft by repeating earlier text
  pilotfish up --listen 127.0.0.1:9000        without --listen: port 8080, or a free one if 8080 is
                                              in use

The two ends on two machines: pilotfish edge serve --help, pilotfish device serve --help.
"""
_OWN_FIELDS = ("edge", "keys", "on_link_loss", "patience_s")  # the command decides these itself


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "up",
        help="serve a chat page and OpenAI's API from this machine, without preparations",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target_option(parser)
    add_flags(parser, ServiceConfig, without=_OWN_FIELDS, draft=Path(DEFAULT), listen=None)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    require_service()
    request = Request(protocol=AUTO, max_tokens=None, temperature=None)
    config = from_args(args, ServiceConfig, without=_OWN_FIELDS, request=request)
    if args.listen is None:
        config = structs.replace(config, listen=_free_address(config.listen))
    with both_ends(config, args.target, lanes=config.lanes, context=config.context) as ends:
        from pilotfish.device_runtime.service.serve import serve  # late: the edge loads meanwhile

        config = structs.replace(
            config, draft=ends.draft, edge=ends.edge.endpoint, threads=ends.threads
        )
        with ExitStack() as loading:
            loading.enter_context(ProgressDisplay()).show("loading drafter and target", 0, None)

            def await_edge() -> None:
                ends.edge.await_target()
                loading.close()

            code = serve(
                config,
                announce=partial(announce_service, needs_key=config.api_keys is not None),
                await_edge=await_edge,
                lifeline=ends.edge.lifeline,
            )
        ends.edge.check()
    return code


def _free_address(usual: str) -> str:
    """Return the usual address, or one with port 0 if another program has the usual port."""
    host, _, port = usual.rpartition(":")
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, int(port)))
        except OSError:
            print(
                f"pilotfish: port {port} is in use, so the service takes a free one",
                file=sys.stderr,
            )
            return f"{host}:0"
    return usual
