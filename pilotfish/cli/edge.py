"""``pilotfish edge serve``: the edge daemon."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from edge_runtime.config import EdgeConfig, EdgeLimits
from edge_runtime.daemon import serve
from engines.errors import EngineError
from pilotfish.cli.configuration import ConfiguredParser, again, config_option
from pilotfish.cli.options import (
    Commands,
    between,
    engine_options,
    keys_option,
    positive,
    share,
)
from wire.errors import ListenError, PilotfishError
from wire.messages import MAX_WINDOW

_DESCRIPTION = """\
Loads the target and verifies windows for many devices at once. Ctrl-C stops it at once; SIGTERM
lets it answer what it has received; SIGHUP makes it read keys and --config again.
"""
_EXAMPLE = """\
example:
  pilotfish edge serve --target target --keys --listen tcp://0.0.0.0:7077
"""


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("edge", help="run the edge", description="The verifying end.")
    actions = parser.add_subparsers(
        title="actions", metavar="ACTION", required=True, parser_class=ConfiguredParser
    )
    serve_parser = actions.add_parser(
        "serve",
        help="verify for devices until told to stop",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config_option(serve_parser)
    add = serve_parser.add_argument
    add("--target", type=Path, required=True, metavar="DIR", help="the target's artifact")
    add(
        "--listen",
        default=EdgeConfig.listen,
        metavar="ADDRESS",
        help="tcp://HOST:PORT (%(default)s); a socket that systemd gives goes before",
    )
    keys_option(serve_parser, "the folder with edge.key and allowed/; needed beyond loopback")
    engine_options(serve_parser)
    add(
        "--metrics",
        type=_host_and_port,
        metavar="HOST:PORT",
        help="where Prometheus may read figures; without HOST: on loopback (default: nowhere)",
    )
    add(
        "--drain",
        type=not_negative,
        default=EdgeConfig.drain_s,
        metavar="S",
        help="seconds in which an edge that is told to stop answers what it has (%(default)s)",
    )
    add(
        "--head",
        action="append",
        metavar="NAME",
        help="a decision head, for wisv-full and wisv-selective: a path, or the name of one that "
        'ships (default: those that ship for this target); may be repeated; "none": none at all',
    )
    add(
        "--threshold",
        type=share,
        metavar="ρ",
        help="reject a mismatch that its head finds harmful with more than this probability, where "
        "a request does not say (default: as each head recommends)",
    )
    _add_limits(serve_parser)
    add("--parent-fd", type=int, help=argparse.SUPPRESS)  # see edge_runtime.process
    serve_parser.set_defaults(run=_serve)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = EdgeLimits()
    group = parser.add_argument_group("limits", "a request beyond them is refused by name")

    def add(
        flag: str, kind: Callable[[str], float], default: float, metavar: str, what: str
    ) -> None:
        group.add_argument(
            flag, type=kind, default=default, metavar=metavar, help=f"{what} (%(default)s)"
        )

    add("--sessions", between(1), limits.sessions, "N", "conversations held at once")
    add("--sessions-per-client", between(1), limits.sessions_per_client, "N", "of one key")
    add("--context", between(2), limits.context, "N", "tokens of one conversation")
    add("--max-window", between(0, MAX_WINDOW), limits.window, "N", "draft tokens of one round")
    add("--message-mib", between(1, 2047), limits.message_mib, "MIB", "size of one message")
    add("--rate", positive, limits.messages_per_s, "N", "messages a second of one key")
    add("--idle", positive, limits.idle_s, "S", "after which a session yields to a new one")
    add("--expire", positive, limits.expire_s, "S", "after which an idle session ends anyway")
    add("--connections", between(2), limits.connections, "N", "at once")
    add("--connections-per-client", between(1), limits.connections_per_client, "N", "of one key")


def not_negative(text: str) -> float:
    """An argparse type: a number of at least 0."""
    value = float(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return value


def _host_and_port(text: str) -> tuple[str, int]:
    """An argparse type: HOST:PORT, or PORT on loopback."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def _serve(args: argparse.Namespace) -> int:
    config = _config_of(args)
    if args.parent_fd is None:
        return serve(config, announce=_announce, reread=lambda: _config_of(again(args)))
    return _serve_for_parent(config, args.parent_fd)


def _config_of(args: argparse.Namespace) -> EdgeConfig:
    return EdgeConfig(
        target=args.target,
        listen=args.listen,
        keys=args.keys,
        provider=args.provider,
        threads=args.threads,
        drain_s=args.drain,
        metrics=args.metrics,
        heads=_heads(args.head),
        threshold=args.threshold,
        limits=EdgeLimits(
            sessions=args.sessions,
            sessions_per_client=args.sessions_per_client,
            context=args.context,
            window=args.max_window,
            message_mib=args.message_mib,
            messages_per_s=args.rate,
            idle_s=args.idle,
            expire_s=args.expire,
            connections=args.connections,
            connections_per_client=args.connections_per_client,
        ),
    )


def _heads(names: list[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    return () if names == ["none"] else tuple(names)


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
