"""``pilotfish edge serve``: the edge daemon."""

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pilotfish.cli import edge_worker
from pilotfish.cli.configuration import ConfiguredParser, again, config_option
from pilotfish.cli.edge_parent import for_parent
from pilotfish.cli.export_split import stages_of
from pilotfish.cli.options import (
    Commands,
    between,
    engine_options,
    keys_option,
    positive,
    share,
)
from pilotfish.edge_runtime.config import ClusterPlan, EdgeConfig, EdgeLimits
from pilotfish.edge_runtime.daemon import serve
from pilotfish.engines.artifact import Artifact
from pilotfish.wire.errors import ConfigError
from pilotfish.wire.messages import MAX_WINDOW

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
    edge_worker.add_to(actions)
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
        "--federate",
        type=Path,
        metavar="FILE",
        help="the target is an ensemble of the workers in this TOML file; of --target only "
        "vocabulary and chat template are used (docs/scale.md)",
    )
    add(
        "--pipeline",
        type=Path,
        metavar="FILE",
        help="the target is cut into stages (pilotfish export split): --target is the folder of "
        "stage 1, this TOML file lists the nodes with the others",
    )
    add(
        "--cluster",
        choices=("ray",),
        help="the target runs as actors on a Ray cluster (pip install 'pilotfish[ray]')",
    )
    add("--replicas", type=between(1, 1024), default=1, metavar="M", help="of the target (1)")
    add(
        "--stages",
        type=between(1, 256),
        default=1,
        metavar="N",
        help="of each replica (1); a --target that is whole is cut first, into the cache",
    )
    add(
        "--cluster-address",
        default="",
        metavar="ADDRESS",
        help='HOST:PORT of a Ray cluster to join; "auto": the one that this machine is part of '
        "(default: one of its own, on this machine only)",
    )
    plan = ClusterPlan()
    add(
        "--late",
        type=positive,
        default=plan.late_s,
        metavar="S",
        help="after which actors that do not answer are started again (%(default)s)",
    )
    add(
        "--give-up",
        type=positive,
        default=plan.give_up_s,
        metavar="S",
        help="after which a pass over actors fails in any case (%(default)s)",
    )
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
    add(
        "--relaxation",
        type=Path,
        metavar="FILE",
        help="how far protocol adaptive strays where a request does not say, as judge calibrate "
        "wrote it (default: built in)",
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
        return serve(config, announce=_announce, reread=lambda: _reread(args, config))
    return for_parent(partial(serve, config), args.parent_fd)


def _reread(args: argparse.Namespace, config: EdgeConfig) -> EdgeConfig:
    """The configuration as the flags have it now; the target's folder is not looked for again."""
    now = again(args)
    same = (now.target, now.stages) == (args.target, args.stages)
    return _config_of(now, config.target if same else now.target)


def _config_of(args: argparse.Namespace, target: Path | None = None) -> EdgeConfig:
    """What the flags say. target: the folder to open, where that is known."""
    kind = _kind_of(args)
    return EdgeConfig(
        target=target or _target_of(args),
        listen=args.listen,
        keys=args.keys,
        provider=args.provider,
        threads=args.threads,
        drain_s=args.drain,
        metrics=args.metrics,
        heads=_heads(args.head),
        threshold=args.threshold,
        relaxation=args.relaxation,
        kind=kind,
        nodes=args.federate or args.pipeline,
        cluster=ClusterPlan(
            replicas=args.replicas,
            stages=args.stages,
            address=args.cluster_address,
            late_s=args.late,
            give_up_s=args.give_up,
        ),
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


def _kind_of(args: argparse.Namespace) -> str:
    """Which kind of target the flags ask for."""
    asked = {"federated": args.federate, "pipeline": args.pipeline, "cluster": args.cluster}
    kinds = [kind for kind, given in asked.items() if given]
    if len(kinds) > 1:
        raise ConfigError(
            "An edge has one kind of target: one of --federate, --pipeline and --cluster."
        )
    plan, asked_for = ClusterPlan(), (args.replicas, args.stages, args.cluster_address)
    times = (args.late, args.give_up)
    if not args.cluster and (*asked_for, *times) != (1, 1, "", plan.late_s, plan.give_up_s):
        raise ConfigError(
            "--replicas, --stages, --cluster-address, --late and --give-up go with --cluster ray; "
            "the lists of --federate and --pipeline have late_s and give_up_s of their own."
        )
    if args.late > args.give_up:
        raise ConfigError(f"--late is {args.late:g} s, more than --give-up, {args.give_up:g} s.")
    return kinds[0] if kinds else "local"


def _target_of(args: argparse.Namespace) -> Path:
    """The folder to open: of a model in stages, that of the first."""
    folder: Path = args.target
    if args.stages == 1:
        return folder
    if (folder / "stage-1").is_dir():
        return folder / "stage-1"
    return stages_of(Artifact.open(folder), args.stages) / "stage-1"


def _heads(names: list[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    return () if names == ["none"] else tuple(names)


def _announce(endpoint: str) -> None:
    print(f"pilotfish: the edge serves on {endpoint}", file=sys.stderr, flush=True)
