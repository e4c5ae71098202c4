"""A pipeline for a benchmark: stages in processes of one thread each, an emulated link before each.

Edge → stage 2 → … → stage N → edge: each hop crosses one emulator in one direction, so a link of
RTT 2·t₁ before each node delays each of the N hops by t₁. All is encrypted.
"""

import argparse
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from _common import free_port, pair

from pilotfish import Device, EdgeServer
from pilotfish.edge_runtime.edge_config import EdgeConfig, EdgeLimits
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.targets.pipeline import PipelineTarget, open_target
from pilotfish.edge_runtime.targets.target import TargetOptions
from pilotfish.emulation.emulator import Emulator
from pilotfish.engines.artifact import Artifact
from pilotfish.export.split import split_artifact
from pilotfish.wire import keys
from pilotfish.wire.keys import EdgeKeys

_PREFIX = "pilotfish_edge_"


class Spent(NamedTuple):
    """What an edge has counted: seconds of each stage and of the head, and passes."""

    compute_s: dict[str, float]
    passes: float

    def since(self, before: "Spent") -> "Spent":
        """What came after."""
        spent = {name: s - before.compute_s.get(name, 0.0) for name, s in self.compute_s.items()}
        return Spent(spent, self.passes - before.passes)

    @property
    def pass_s(self) -> float:
        """Σ_stages c of a pass, on average; the head counts as part of stage 1."""
        return sum(self.compute_s.values()) / max(1.0, self.passes)


class Pipeline:
    """The nodes of stages 2 … N behind their links, and edges in front of them, one at a time.

    folder: where the stages lie, and keys and list; the keys of an edge and a device are there.
    """

    def __init__(
        self, target: Path, stages: int, folder: Path, *, sessions: int = 4, context: int = 512
    ) -> None:
        self.stages, self.sessions, self.context = stages, sessions, context
        self._folder = folder
        self._cut = folder / f"{target.name}-{stages}"
        if not self._cut.exists():
            split_artifact(target, self._cut, stages=stages)
        self._size = {"sessions": sessions, "context": context, "threads": 1}
        self._nodes: list[EdgeServer] = []
        self._links: list[Emulator] = []
        self._stack = ExitStack()

    def __enter__(self) -> "Pipeline":
        with ExitStack() as stack:
            stack.callback(self._stop_nodes)
            self._make_keys()
            with ThreadPoolExecutor() as pool:
                starting = [pool.submit(self._node(at).start) for at in range(self.stages - 1)]
                self._nodes = [each.result() for each in starting]
            self._links = [stack.enter_context(Emulator(node.endpoint)) for node in self._nodes]
            self._list()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def set_latency(self, one_way_s: float) -> None:
        """t₁, from now on."""
        for link in self._links:
            link.set(rtt_s=2.0 * one_way_s)

    def kill(self, place: int) -> None:
        """SIGKILL the node at this place among the nodes."""
        os.kill(self._nodes[place].pid, signal.SIGKILL)
        self._nodes[place].stop()

    def restart(self, place: int) -> None:
        """Start it again where it was; returns when it serves."""
        self._nodes[place] = self._node(place, self._nodes[place].endpoint).start()

    @contextmanager
    def edge(self) -> Iterator["Edge"]:
        """An edge in a process of its own."""
        port = free_port()
        first, listed = self._cut / "stage-1", self._cut / "stages.toml"
        with EdgeServer(
            first, keys=self._folder, pipeline=listed, metrics=port, **self._size
        ) as server:
            yield Edge(server, port)

    @contextmanager
    def target(self) -> Iterator[PipelineTarget]:
        """Its target alone, in this process."""
        config = EdgeConfig(
            target=self._cut / "stage-1",
            threads=1,
            pipeline=self._cut / "stages.toml",
            limits=EdgeLimits(sessions=self.sessions, context=self.context),
        )
        artifact = Artifact.open(config.target, stage=True)
        opening = TargetOptions(config, artifact, EdgeKeys.load(self._folder), EdgeMetrics())
        with closing(open_target(opening)) as target:
            yield target

    def _stop_nodes(self) -> None:
        for node in self._nodes:
            node.stop()

    def _node(self, place: int, listen: str = "tcp://127.0.0.1:0") -> EdgeServer:
        stage, folder = self._cut / f"stage-{place + 2}", self._keys(place)
        return EdgeServer(stage, listen, keys=folder, action="worker", **self._size)

    def _keys(self, place: int) -> Path:
        return self._cut / f"keys-{place + 2}"

    def _make_keys(self) -> None:
        """For each node, which lets in the edge and the stage before it."""
        for place in range(self.stages - 1):
            folder = self._keys(place)
            if not folder.exists():
                keys.create(folder, keys.EDGE)
                keys.allow(folder, self._folder / "edge.pub", "edge")
                if place:
                    keys.allow(folder, self._keys(place - 1) / "edge.pub", "before")

    def _list(self) -> None:
        lines = []
        for place, link in enumerate(self._links):
            lines += ["[[stage]]", f'name = "stage {place + 2}"', f'address = "{link.endpoint}"']
            lines += [f'key = "{self._keys(place) / "edge.pub"}"']
        path = self._cut / "stages.toml"
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o644)


class Edge(NamedTuple):
    """An edge process, and the port of its figures."""

    server: EdgeServer
    metrics: int

    @property
    def endpoint(self) -> str:
        """Where devices go."""
        return self.server.endpoint

    def spent(self) -> Spent:
        """What it has counted so far."""
        url = f"http://127.0.0.1:{self.metrics}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        table = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
        compute = f"{_PREFIX}node_compute_seconds_total"
        return Spent(
            {name: float(value) for name, value in table.items() if name.startswith(compute)},
            float(table[f"{_PREFIX}batch_sessions_count"]),
        )


class Bench:
    """What all parts share."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.draft, self.target = pair(args)
        self.quick: bool = args.quick
        self.folder = folder

    def pipeline(self, stages: int, **size: int) -> Pipeline:
        """Nodes for so many stages, to be entered."""
        return Pipeline(self.target, stages, self.folder, **size)

    def device(self, edge: "Edge | EdgeServer", **options: Any) -> Device:
        """A device of this edge."""
        return Device(self.draft, edge.endpoint, self.folder, **options)
