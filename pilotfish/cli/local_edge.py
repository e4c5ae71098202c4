"""An edge on this machine, in a child process of the command that serves or uses it.

The edge listens on loopback at a free port, without keys: it leaves nothing on disk, and ends with
its parent. Each end has half of the CPUs, so that neither waits for the other's threads.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pilotfish.base.cpus import split_cpus
from pilotfish.base.settings import settings
from pilotfish.cli.default_models import DEFAULT, drafter_folder, target_folder
from pilotfish.cli.flags import add_flag
from pilotfish.device_runtime.device_config import DeviceConfig
from pilotfish.edge_runtime.edge_config import EdgeConfig, EdgeLimits
from pilotfish.edge_runtime.process import EdgeServer


class BothEnds(NamedTuple):
    """A launched edge, and what a device needs to use it: drafter and number of threads."""

    edge: EdgeServer
    draft: Path
    threads: int


def target_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--target``, as `edge serve` has it, with the default model as default."""
    [target] = [setting for setting in settings(EdgeConfig) if setting.name == "target"]
    add_flag(parser, target._replace(default=Path(DEFAULT)))


@contextmanager
def both_ends(
    config: DeviceConfig, target: Path, *, lanes: int = 1, context: int | None = None
) -> Iterator[BothEnds]:
    """Export the two models if that is needed, and launch an edge with this target.

    The edge loads the target while the caller loads the drafter; see `EdgeServer.await_target`.
    lanes: number of conversations at a time. context: the edge's limit; None: the default limit.
    """
    draft, target = (
        drafter_folder(config.draft, config.provider),
        target_folder(target, config.provider),
    )
    theirs, ours = split_cpus()
    limits = EdgeLimits()
    room = {
        name: max(getattr(limits, name), 2 * lanes)
        for name in ("sessions", "sessions_per_client", "connections_per_client")
    }
    server = EdgeServer(
        target,
        provider=config.provider,
        threads=len(theirs),
        context=limits.context if context is None else context,
        traces=False if config.traces is None else config.traces,
        **room,
    )
    try:
        server.launch()
        yield BothEnds(server, draft, config.threads or len(ours))
    finally:
        server.stop()
