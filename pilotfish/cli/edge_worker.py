"""``pilotfish edge worker``: run a part of another edge's target."""

import argparse
import sys
from functools import partial

from msgspec.structs import replace

from pilotfish.cli.configuration import ConfiguredParser, config_option
from pilotfish.cli.default_models import target_folder
from pilotfish.cli.edge_parent import for_parent
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.edge_runtime.edge_config import NodeConfig
from pilotfish.edge_runtime.node.node_daemon import serve_node

_DESCRIPTION = """\
Runs a part of another edge's target. A worker of a federation runs a whole model and returns the
K most probable tokens; a stage of a pipeline runs some layers. Devices do not connect to a worker.
It serves one edge at a time: any edge whose key is on its allow-list.
"""
_EXAMPLE = """\
example, on each worker and then on the edge (docs/scale.md):
  pilotfish keys new edge --keys worker-keys; pilotfish keys allow edge.pub --keys worker-keys
  pilotfish edge worker --target model --keys worker-keys --listen tcp://0.0.0.0:7078
  pilotfish edge serve --target model --keys --federate workers.toml --listen tcp://0.0.0.0:7077
"""


def add_to(actions: "argparse._SubParsersAction[ConfiguredParser]") -> None:
    """Register the action."""
    parser = actions.add_parser(
        "worker",
        help="run a part of another edge's target",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config_option(parser, "sessions = 16")
    add_flags(parser, NodeConfig)
    parser.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)  # see `edge_parent`
    parser.set_defaults(run=_worker)


def _worker(args: argparse.Namespace) -> int:
    config = from_args(args, NodeConfig)
    config = replace(config, target=target_folder(config.target, config.provider))
    if args.parent_fd is not None:
        return for_parent(partial(serve_node, config), args.parent_fd)
    return serve_node(config, announce=_announce)


def _announce(endpoint: str) -> None:
    # one write call, so that no other thread's log line gets into it
    sys.stderr.write(f"pilotfish: the node serves on {endpoint}\n")
    sys.stderr.flush()
