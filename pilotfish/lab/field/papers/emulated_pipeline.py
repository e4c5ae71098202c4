"""A target in stages with emulated hops: one process per stage, an emulated link before each node.

In:  a target's artifact, the number of stages, the one-way time of a hop. Out: an edge that runs
     the first stage, and the computing time of its passes.

A pass crosses edge → stage 2 → … → stage N → edge. Each of these N hops crosses one emulated link
in one direction, so a link with an RTT of 2·t₁ before each node delays every hop by t₁. All
connections are encrypted. Each process has one thread.
"""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pilotfish.edge_runtime.process import EdgeServer
from pilotfish.emulation.emulator import Emulator
from pilotfish.wire import keys

_COMPUTE = "pilotfish_edge_node_compute_seconds_total"
_PASSES = "pilotfish_edge_batch_sessions_count"


class Computed(NamedTuple):
    """Computing time of all stages and the head, in seconds, and the number of passes."""

    seconds: float
    passes: float

    def pass_s(self, before: Computed) -> float:
        """Return Σ_stages c, the mean computing time of a pass since ``before``."""
        return (self.seconds - before.seconds) / max(1.0, self.passes - before.passes)


class PipelineEdge(NamedTuple):
    """An edge in front of the stages, and the port of its metrics."""

    server: EdgeServer
    metrics_port: int

    @property
    def endpoint(self) -> str:
        """The edge's address."""
        return self.server.endpoint

    def computed(self) -> Computed:
        """Read the computing time from the edge's metrics."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        seconds = sum(float(value) for name, value in samples.items() if name.startswith(_COMPUTE))
        return Computed(seconds, float(samples[_PASSES]))


class EmulatedPipeline:
    """The nodes of stages 2 … N, each behind an emulated link, inside a ``with`` block.

    folder: folder for stages, keys and the list of nodes; it has the keys of an edge and a device
    (`make_keys`). sessions, context: limits of the edge and of each stage.
    """

    def __init__(
        self, target: Path, stages: int, folder: Path, *, sessions: int = 4, context: int = 512
    ) -> None:
        self.stages, self.sessions, self.context = stages, sessions, context
        self.cut = folder / f"{target.name}-{stages}"
        self.folder = folder
        if not self.cut.exists():
            from pilotfish.export.split import split_artifact  # imports onnx

            split_artifact(target, self.cut, stages=stages)
        self._limits: dict[str, Any] = {"sessions": sessions, "context": context, "threads": 1}
        self.nodes: list[EdgeServer] = []
        self._links: list[Emulator] = []
        self._stack = ExitStack()

    def __enter__(self) -> EmulatedPipeline:
        with ExitStack() as stack:
            stack.callback(self._stop_nodes)
            self._make_node_keys()
            # listed before they start: if one fails, the others are stopped
            self.nodes = [self.make_node(at) for at in range(self.stages - 1)]
            with ThreadPoolExecutor() as pool:
                list(pool.map(EdgeServer.start, self.nodes))
            self._links = [stack.enter_context(Emulator(node.endpoint)) for node in self.nodes]
            self._write_list()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def set_hop(self, one_way_s: float) -> None:
        """Set t₁, the time of a hop, in seconds."""
        for link in self._links:
            link.set(rtt_s=2.0 * one_way_s)

    @property
    def node_list(self) -> Path:
        """The file that names the nodes for `pilotfish edge serve --pipeline`."""
        return self.cut / "stages.toml"

    @contextmanager
    def edge(self) -> Iterator[PipelineEdge]:
        """Run an edge with the first stage inside the ``with`` block."""
        port = _free_port()
        with EdgeServer(
            self.cut / "stage-1",
            keys=self.folder,
            pipeline=self.node_list,
            metrics=port,
            **self._limits,
        ) as server:
            yield PipelineEdge(server, port)

    def make_node(self, place: int, listen: str = "tcp://127.0.0.1:0") -> EdgeServer:
        """Make the node of stage ``place`` + 2; the caller starts it."""
        stage = self.cut / f"stage-{place + 2}"
        return EdgeServer(
            stage, listen, keys=self._node_keys(place), action="worker", **self._limits
        )

    def _stop_nodes(self) -> None:
        for node in self.nodes:
            node.stop()

    def _node_keys(self, place: int) -> Path:
        return self.cut / f"keys-{place + 2}"

    def _make_node_keys(self) -> None:
        """Make the keys of each node; its list allows the edge and the stage before it."""
        for place in range(self.stages - 1):
            folder = self._node_keys(place)
            if not folder.exists():
                keys.create(folder, keys.EDGE)
                keys.allow(folder, self.folder / "edge.pub", "edge")
                if place:
                    keys.allow(folder, self._node_keys(place - 1) / "edge.pub", "before")

    def _write_list(self) -> None:
        lines = []
        for place, link in enumerate(self._links):
            lines += ["[[stage]]", f'name = "stage {place + 2}"', f'address = "{link.endpoint}"']
            lines += [f'key = "{self._node_keys(place) / "edge.pub"}"']
        self.node_list.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.node_list.chmod(0o644)


def make_keys(folder: Path) -> None:
    """Make the keys of an edge and of a device that the edge allows."""
    keys.create(folder, keys.EDGE)
    keys.allow(folder, keys.create(folder, keys.DEVICE))


def _free_port() -> int:
    """Find a port of this machine without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
