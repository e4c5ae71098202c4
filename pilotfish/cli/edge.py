"""``pilotfish edge serve``: the edge daemon."""

import argparse
import json
import os
import sys
from pathlib import Path

from edge_runtime.config import EdgeConfig, EdgeLimits
from edge_runtime.daemon import serve
from engines.errors import EngineError
from pilotfish.cli.options import Commands, between, engine_options, keys_option, positive
from wire.errors import ListenError, PilotfishError
from wire.messages import MAX_WINDOW


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("edge", help="run the edge", description="The verifying end.")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    serve_parser = actions.add_parser(
        "serve",
        help="verify for devices until told to stop",
        description="Loads the target and verifies windows for many devices at once. Ctrl-C or "
        "SIGTERM stops it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    limits = EdgeLimits()
    add = serve_parser.add_argument
    add("--target", type=Path, required=True, metavar="DIR", help="the target's artifact")
    add("--listen", default=EdgeConfig.listen, metavar="ADDRESS", help="tcp://HOST:PORT")
    keys_option(serve_parser, "the folder with edge.key and allowed/; needed beyond loopback")
    engine_options(serve_parser)
    add("--sessions", type=between(1), default=limits.sessions, help="conversations held at once")
    add(
        "--sessions-per-client",
        type=between(1),
        default=limits.sessions_per_client,
        help="of one key",
    )
    add("--context", type=between(2), default=limits.context, help="tokens of one conversation")
    add(
        "--max-window",
        type=between(0, MAX_WINDOW),
        default=limits.window,
        help="draft tokens of one round",
    )
    add(
        "--message-mib",
        type=between(1, 2047),
        default=limits.message_mib,
        help="size of one message",
    )
    add("--rate", type=positive, default=limits.messages_per_s, help="messages a second of one key")
    add("--idle", type=positive, default=limits.idle_s, help="seconds after which a session may go")
    add("--parent-fd", type=int, help=argparse.SUPPRESS)  # see edge_runtime.process
    serve_parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    config = EdgeConfig(
        target=args.target,
        listen=args.listen,
        keys=args.keys,
        provider=args.provider,
        threads=args.threads,
        limits=EdgeLimits(
            sessions=args.sessions,
            sessions_per_client=args.sessions_per_client,
            context=args.context,
            window=args.max_window,
            message_mib=args.message_mib,
            messages_per_s=args.rate,
            idle_s=args.idle,
        ),
    )
    if args.parent_fd is None:
        return serve(config, announce=_announce)
    return _serve_for_parent(config, args.parent_fd)


def _announce(endpoint: str) -> None:
    print(f"pilotfish: the edge serves on {endpoint}", file=sys.stderr, flush=True)


def _serve_for_parent(config: EdgeConfig, descriptor: int) -> int:
    def tell(report: dict[str, str]) -> None:
        os.write(descriptor, json.dumps(report).encode() + b"\n")

    try:
        return serve(
            config, announce=lambda endpoint: tell({"endpoint": endpoint}), lifeline=descriptor
        )
    except PilotfishError as error:
        tell({"code": error.code, "message": str(error)})
        return error.exit_code
    except EngineError as error:
        tell({"code": ListenError.code, "message": str(error)})
        return error.exit_code
