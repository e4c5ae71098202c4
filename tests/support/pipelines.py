"""Run pipelines: a process for each stage, an edge before them, and links between."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish import Device, EdgeServer
from pilotfish.edge_runtime.edge_config import EdgeConfig, EdgeLimits
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.targets.pipeline import PipelineTarget, open_target
from pilotfish.edge_runtime.targets.target import TargetOptions
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.export.split import split_artifact
from pilotfish.wire.keys import EdgeKeys
from tests.conftest import PADDED_VOCAB, VOCAB, Pair
from tests.support.prefill import prefill
from tests.support.relay import Relay
from tests.support.tiny import tiny_artifact

LAYERS = 4


def made_pair(folder: Path, context: int, *, endless: bool = False) -> Pair:
    """Make a drafter, and a target that can be cut into up to four stages.

    endless: no token ends an answer.
    """
    for name, sharpness in (("draft", 0.9), ("target", 0.7)):
        artifact = tiny_artifact(
            folder / name,
            vocab=VOCAB,
            padded_vocab=PADDED_VOCAB,
            seed=1,
            context=context,
            sharpness=sharpness,
            layers=LAYERS,
            dialect="opset17",
        )
        if endless:
            path = artifact.path / "manifest.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_ids": []}))
    return Pair(folder / "draft", folder / "target")


def cut(target: Path, folder: Path, stages: int) -> Path:
    """Cut a target into stages, unless done before; returns their folder."""
    if not folder.exists():
        split_artifact(target, folder, stages=stages)
    return folder


class Link(Protocol):
    """A relay or an emulator before a node."""

    endpoint: str


# Delays each pass of the stage by the seconds in a file, or ends the process.
_SLOW = """
import os, sys, time
from pathlib import Path
from pilotfish.engines.stage import Stage
from pilotfish.cli import main
forward = Stage.forward
def slow(self, *given):
    pace = Path({pace!r}).read_text()
    os._exit(1) if pace == "die" else time.sleep(float(pace))
    return forward(self, *given)
Stage.forward = slow
sys.exit(main(sys.argv[1:]))
"""


class Node:
    """A stage in a process of its own, which a test may kill, freeze and start again.

    pace: a file with the seconds by which each pass is delayed; "die" ends the process.
    """

    def __init__(self, artifact: Path, *, pace: Path | None = None, **options: Any) -> None:
        self._artifact, self._pace = artifact, pace
        self._options = {"threads": 1, **options}
        self.endpoint = "tcp://127.0.0.1:0"
        self.restart()

    def kill(self) -> None:
        """Kill the process."""
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()

    def restart(self, artifact: Path | None = None, **options: Any) -> None:
        """Start it, or start it again at the same address, perhaps with another artifact."""
        if hasattr(self, "server"):
            self.server.stop()
        self.server = EdgeServer(
            artifact or self._artifact,
            self.endpoint,
            action="worker",
            **{**self._options, **options},
        )
        if self._pace is not None:
            words = self.server._command
            words[1:3] = ["-c", _SLOW.format(pace=str(self._pace))]
        self.server.start()
        self.endpoint = self.server.endpoint

    @property
    def died(self) -> bool:
        """Whether it has ended by itself."""
        child = self.server._child
        return child is None or child.process.poll() is not None

    def freeze(self) -> None:
        """Send SIGSTOP."""
        os.kill(self.server.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Send SIGCONT."""
        os.kill(self.server.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it in any state."""
        with suppress(Exception):
            self.thaw()
        self.server.stop()


class Row:
    """The stages 2 … N as nodes, and their list.

    links: the relay or emulator before each node.
    """

    def __init__(self, folder: Path, nodes: Sequence[Node], links: Sequence[Link]) -> None:
        self.folder, self.nodes, self.links = folder, nodes, links

    @property
    def first(self) -> Path:
        """The edge's artifact."""
        return self.folder / "stage-1"

    def listed(
        self, path: Path, keys: Sequence[str] = (), digests: Sequence[str] = (), **settings: Any
    ) -> Path:
        """Write the edge's list. keys, digests: of each node."""
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        for index, link in enumerate(self.links):
            lines += ["[[stage]]", f'name = "stage {index + 2}"', f'address = "{link.endpoint}"']
            lines += [f'key = "{keys[index]}"'] if keys else []
            lines += [f'digest = "{digests[index]}"'] if digests else []
        path.write_text("\n".join(lines) + "\n")
        return path


@contextmanager
def row(
    folder: Path, *, link: Any = None, options: Sequence[dict[str, Any]] = (), **common: Any
) -> Iterator[Row]:
    """Run the nodes of the stages in ``folder``. options: of each, in addition to ``common``."""
    stages = sorted(folder.glob("stage-*"))[1:]
    ours = options or [{}] * len(stages)
    nodes: list[Node] = []
    links: list[Any] = []
    try:
        with ThreadPoolExecutor() as pool:
            starting = [
                pool.submit(partial(Node, path, **{**common, **item}))
                for path, item in zip(stages, ours, strict=True)
            ]
            nodes = [each.result() for each in starting]
        links = [node if link is None else link(node.endpoint) for node in nodes]
        yield Row(folder, nodes, links)
    finally:
        for each in links:
            if each not in nodes:
                (each.close if isinstance(each, Relay) else each.stop)()
        for node in nodes:
            node.stop()


@contextmanager
def served(
    row: Row, path: Path, *, server: dict[str, Any], **settings: Any
) -> Iterator[EdgeServer]:
    """Run an edge on these nodes. server: options of its command; settings: of the list."""
    listed = row.listed(path, **settings)
    with EdgeServer(row.first, pipeline=listed, **{"threads": 1, **server}) as edge:
        yield edge


@contextmanager
def opened(
    row: Row,
    path: Path,
    *,
    slots: int,
    context: int,
    metrics: EdgeMetrics | None = None,
    owned: EdgeKeys | None = None,
    first: Path | None = None,
    on_wait: Callable[[str], None] = lambda trouble: None,
    **settings: Any,
) -> Iterator[PipelineTarget]:
    """Open the target on these nodes in this process. owned: the edge's keys."""
    config = EdgeConfig(
        target=first or row.first,
        threads=1,
        pipeline=row.listed(path, **settings),
        limits=EdgeLimits(sessions=slots, context=context),
    )
    artifact = Artifact.open(config.target, stage=True)
    target = open_target(TargetOptions(config, artifact, owned, metrics or EdgeMetrics(), on_wait))
    try:
        yield target
    finally:
        target.close()


class EnoughError(Exception):
    """Ends a wait for nodes; holds the edge's message."""


def waited_for(row: Row, path: Path, *words: str, **how: Any) -> str:
    """Return the edge's message while it waits for nodes, once it has all these words."""
    end_s = time.monotonic() + 20.0

    def on_wait(trouble: str) -> None:
        assert time.monotonic() < end_s, trouble
        if all(each in trouble for each in words):
            raise EnoughError(trouble)

    with pytest.raises(EnoughError) as caught, opened(row, path, on_wait=on_wait, **how):
        pytest.fail("it waits for nothing")
    return str(caught.value)


def whole_logits(decoder: Decoder, tokens: Sequence[int], rows: int) -> NDArray[np.float32]:
    """Compute the whole model's logits [rows, V] from empty slots."""
    decoder.rollback(0, 0)
    return prefill(decoder, 0, list(tokens), rows=rows).logits.copy()


class Answering(threading.Thread):
    """Generates an answer in a thread, for a test to watch."""

    def __init__(self, device: Device, prompt: Sequence[int], **wish: Any) -> None:
        super().__init__(daemon=True)
        self._device, self._prompt, self._wish = device, prompt, wish
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self.ended_s = 0.0
        self.start()

    def run(self) -> None:
        """Generate the answer."""
        try:
            for piece in self._device.stream(self._prompt, **self._wish):
                self.tokens += piece.tokens
        except Exception as error:
            self.error = error
        self.ended_s = time.monotonic()

    def until(self, count: int, limit_s: float = 30.0) -> None:
        """Wait until it has so many tokens; it must not have ended by then."""
        end_s = time.monotonic() + limit_s
        while len(self.tokens) < count:
            assert self.is_alive(), (self.error, len(self.tokens))
            assert time.monotonic() < end_s, f"{len(self.tokens)} tokens in {limit_s} s"
            time.sleep(0.001)

    def result(self, limit_s: float = 60.0) -> list[int]:
        """Wait for the end; returns all tokens, or raises the error."""
        self.join(limit_s)
        assert not self.is_alive(), f"it hangs after {len(self.tokens)} tokens"
        if self.error is not None:
            raise self.error
        return self.tokens


def holdings(pid: int) -> tuple[int, int]:
    """Count the open descriptors and threads of a process."""
    return tuple(len(list(Path(f"/proc/{pid}/{what}").iterdir())) for what in ("fd", "task"))
