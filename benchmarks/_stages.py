"""A pipeline for a benchmark: stages behind emulated links, which can be killed and restarted."""

import argparse
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from _common import pair

from pilotfish import Device, EdgeServer
from pilotfish.edge_runtime.edge_config import EdgeConfig, EdgeLimits
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.targets.pipeline import PipelineTarget, open_target
from pilotfish.edge_runtime.targets.target import TargetOptions
from pilotfish.engines.artifact import Artifact
from pilotfish.lab.field.papers.emulated_pipeline import EmulatedPipeline, PipelineEdge
from pilotfish.wire.keys import EdgeKeys


class Pipeline(EmulatedPipeline):
    """An emulated pipeline whose nodes can be killed, and whose target this process can open."""

    def kill(self, place: int) -> None:
        """SIGKILL the node at this place among the nodes."""
        os.kill(self.nodes[place].pid, signal.SIGKILL)
        self.nodes[place].stop()

    def restart(self, place: int) -> None:
        """Start it again where it was; returns when it serves."""
        self.nodes[place] = self.make_node(place, self.nodes[place].endpoint).start()

    @contextmanager
    def target(self) -> Iterator[PipelineTarget]:
        """Its target alone, in this process."""
        config = EdgeConfig(
            target=self.cut / "stage-1",
            threads=1,
            pipeline=self.node_list,
            limits=EdgeLimits(sessions=self.sessions, context=self.context),
        )
        artifact = Artifact.open(config.target, stage=True)
        opening = TargetOptions(config, artifact, EdgeKeys.load(self.folder), EdgeMetrics())
        with closing(open_target(opening)) as target:
            yield target


class Bench:
    """What all parts share."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.draft, self.target = pair(args)
        self.quick: bool = args.quick
        self.folder = folder

    def pipeline(self, stages: int, **size: int) -> Pipeline:
        """Nodes for so many stages, to be entered."""
        return Pipeline(self.target, stages, self.folder, **size)

    def device(self, edge: PipelineEdge | EdgeServer, **options: Any) -> Device:
        """A device of this edge."""
        return Device(self.draft, edge.endpoint, self.folder, **options)
