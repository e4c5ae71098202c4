"""Federations for tests: their lists and workers, and their expected outputs.

`Ensemble` computes a federation's expected outputs from local decoders and `speculation.ensemble`.
`WorkerThread` runs a worker's real loop in a thread, so that a test can change its reports.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from pilotfish import EdgeServer
from pilotfish.base.supervisor import Supervisor
from pilotfish.edge_runtime.edge_config import EdgeConfig, EdgeLimits, NodeConfig
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.node.node_daemon import NodeLoop
from pilotfish.edge_runtime.node.node_service import NodeService
from pilotfish.edge_runtime.node.work import NodeWork
from pilotfish.edge_runtime.node.worker import Worker
from pilotfish.edge_runtime.signals import Signals
from pilotfish.edge_runtime.targets.federated import FederatedTarget, open_target
from pilotfish.edge_runtime.targets.target import TargetOptions
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Work, open_engine
from pilotfish.speculation.ensemble import Scheme, acceptance_bound, aggregate, as_logits, top_rows
from pilotfish.speculation.randomness import Purpose
from pilotfish.wire.codecs.topk import decode_topk, encode_topk
from pilotfish.wire.connections import Bounds
from pilotfish.wire.keys import EdgeKeys
from pilotfish.wire.messages import encode
from pilotfish.wire.protocols import SamplingParams
from pilotfish.wire.protocols.baselines import choose
from pilotfish.wire.transport import Listener
from tests.conftest import CONTEXT, PADDED_VOCAB, VOCAB
from tests.support.tiny import tiny_artifact

SESSIONS = 6
NOISE = 1e-3  # of logits; far more than the difference of passes of other shapes
MESSAGE_BYTES = 1 << 26

Frames = Sequence[bytes]
Said = tuple[msgspec.Struct | bytes, Frames]  # a message's header, packed or not, and its frames


class Cast(NamedTuple):
    """Artifact folders: a drafter, and three different models of its vocabulary."""

    draft: Path
    a: Path
    b: Path
    c: Path


def cast_in(folder: Path, sharper: float = 1.0, **changes: Any) -> Cast:
    """Make the models, so alike that the drafter is of use to all; less so if sharper."""
    sizes = {"vocab": VOCAB, "padded_vocab": PADDED_VOCAB, "context": CONTEXT} | changes
    for name, seed, sharpness in (
        ("draft", 1, 0.9), ("a", 1, 0.7), ("b", 2, 0.7), ("c", 3, 0.8),
    ):  # fmt: skip
        tiny_artifact(folder / name, seed=seed, sharpness=sharper * sharpness, **sizes)
    return Cast(*(folder / name for name in Cast._fields))


def endless(cast: Cast) -> Cast:
    """Return the same models without end tokens."""
    for path in (folder / "manifest.json" for folder in cast):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_ids": []}))
    return cast


def worker(target: Path, **options: Any) -> EdgeServer:
    """Make a worker process, to be entered."""
    return EdgeServer(target, action="worker", **{"threads": 1, "sessions": SESSIONS} | options)


def again(target: Path, endpoint: str, **options: Any) -> EdgeServer:
    """Make a worker process at the endpoint of an earlier one."""
    return worker(target, listen=endpoint, **options).start()


def write_list(
    path: Path, workers: Sequence[tuple[str, str]], weights: Sequence[float] = (), **settings: Any
) -> Path:
    """Write the list of workers, given by name and endpoint."""
    lines = [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in settings.items()]
    for index, (name, endpoint) in enumerate(workers):
        lines += ["[[worker]]", f'name = "{name}"', f'address = "{endpoint}"']
        if weights:
            lines.append(f"weight = {weights[index]!r}")
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o644)
    return path


class Running(NamedTuple):
    """An edge over workers in processes of their own; metrics: the edge's port for Prometheus."""

    edge: EdgeServer
    workers: list[EdgeServer]
    metrics: int

    @property
    def endpoint(self) -> str:
        return self.edge.endpoint


@contextmanager
def federation(
    folder: Path,
    targets: Sequence[Path],
    weights: Sequence[float] = (),
    *,
    metrics: int = 0,
    edge: Path | None = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """Run workers named "a", "b", … and an edge over them, on loopback without keys."""
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(target)) for target in targets]
        named = [(chr(97 + i), each.endpoint) for i, each in enumerate(workers)]
        path = write_list(folder / "workers.toml", named, weights, **settings)
        flags = {"threads": 1, "sessions": SESSIONS, "federate": path} | (options or {})
        if metrics:
            flags["metrics"] = metrics
        served = stack.enter_context(EdgeServer(edge or targets[0], **flags))
        yield Running(served, workers, metrics)
        for each in workers:  # a frozen worker would not react to a stop
            kill(each)


def kill(server: EdgeServer) -> None:
    """Kill a process, if there is one."""
    try:
        os.kill(server.pid, signal.SIGKILL)
    except Exception:  # stopped by the test
        return
    server.stop()


class Ensemble:
    """Computes the outputs of a federation of these models."""

    def __init__(
        self,
        models: Sequence[Path],
        weights: Sequence[float] = (),
        *,
        kept: int = 64,
        values: str = "fp16",
        reconstruction: Scheme = "renormalise",
    ) -> None:
        self._engines = [open_engine(model, threads=1) for model in models]
        self._weights = list(weights) or [1.0] * len(models)
        self._top_k, self._values, self._scheme = kept, values, reconstruction
        manifest = self._engines[0].model.artifact.manifest
        self.vocab = manifest.vocab_size
        self.ends = manifest.eos_ids

    def models_logits(self, tokens: Sequence[int]) -> list[NDArray[np.float32]]:
        """Compute each model's logits f32 [1, V] after these tokens."""
        work = Work(0, np.array(tokens, np.int64))
        return [engine.run([work])[0].logits.copy() for engine in self._engines]

    def average(self, each: Sequence[NDArray[np.float32]], temperature: float) -> NDArray[Any]:
        """Combine the models' logits f32 [1, V] as an edge does; returns logits f32 [1, V]."""
        answers = []
        for logits in each:
            rows = top_rows(logits, temperature, self._top_k)
            frame = encode_topk(rows, self.vocab, self._values)
            answers.append(decode_topk(frame, 1, self._top_k, self.vocab))
        return as_logits(aggregate(self._weights, answers, self.vocab, self._scheme), temperature)

    def omitted(self, tokens: Sequence[int]) -> float:
        """Compute bound (19) after these tokens at temperature 1."""
        each = [top_rows(logits, 1.0, self._top_k) for logits in self.models_logits(tokens)]
        masses = np.stack([rows.retained_mass for rows in each])
        return float(acceptance_bound(self._weights, masses)[0])

    def logits(self, tokens: Sequence[int], temperature: float) -> NDArray[Any]:
        """Compute the ensemble's logits f32 [1, V] after these tokens."""
        return self.average(self.models_logits(tokens), temperature)

    def decode(self, prompt: Sequence[int], count: int, law: SamplingParams) -> list[int]:
        """Generate token by token, as `stream` does, and so `greedy` and `coupled`."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            logits = self.logits(tokens, law.sampling.temperature)[0]
            tokens.append(choose(logits, law, len(tokens), Purpose.TARGET))
            if tokens[-1] in self.ends:
                break
        return tokens[len(prompt) :]

    def choices(
        self, prompt: Sequence[int], answer: Sequence[int], law: SamplingParams
    ) -> list[int]:
        """Choose the token at each position of a given answer."""
        results = []
        for at in range(len(answer)):
            tokens = [*prompt, *answer[:at]]
            logits = self.logits(tokens, law.sampling.temperature)[0]
            results.append(choose(logits, law, len(tokens), Purpose.TARGET))
        return results

    def assert_same(
        self, prompt: Sequence[int], law: SamplingParams, got: Sequence[int], wanted: Sequence[int]
    ) -> None:
        """Assert equal tokens, up to a position where a little noise in the logits decides."""
        if list(got) == list(wanted):
            return
        at = next(i for i, (x, y) in enumerate(zip(got, wanted, strict=False)) if x != y)
        tokens = [*prompt, *wanted[:at]]
        each, random = self.models_logits(tokens), np.random.default_rng(at)
        chosen = set()
        for _ in range(400):
            noisy = [z + random.normal(0, NOISE, z.shape).astype(np.float32) for z in each]
            logits = self.average(noisy, law.sampling.temperature)[0]
            chosen.add(choose(logits, law, len(tokens), Purpose.TARGET))
        assert {got[at], wanted[at]} <= chosen, (
            f"token {at}: {got[at]} for {wanted[at]}, and noise of {NOISE} chooses from {chosen}"
        )


class Opened(NamedTuple):
    """A federated target in this process, and its tally."""

    target: FederatedTarget
    metrics: EdgeMetrics

    def events(self, node: str) -> dict[str, int]:
        """Count a worker's events by name."""
        return {event: n for (name, event), n in self.metrics.node_events.items() if name == node}


@contextmanager
def opened(path: Path, artifact: Path, keys: Path | None = None, **limits: Any) -> Iterator[Opened]:
    """Open the target of this list, as an edge does."""
    edge_metrics = EdgeMetrics()
    config = EdgeConfig(
        target=artifact,
        federate=path,
        limits=EdgeLimits(**{"sessions": SESSIONS, "context": CONTEXT} | limits),
    )
    held = EdgeKeys.load(keys) if keys is not None else None
    target = open_target(TargetOptions(config, Artifact.open(artifact), held, edge_metrics))
    try:
        yield Opened(target, edge_metrics)
    finally:
        target.close()


class SpoilingListener(Listener):
    """A node's socket; ``spoil`` replaces each report."""

    def __init__(self, *arguments: Any) -> None:
        self.spoil: Callable[[msgspec.Struct, Frames], Iterable[Said]] = _as_it_is
        super().__init__(*arguments)

    def send(self, client: bytes, message: msgspec.Struct, frames: Sequence[Any] = ()) -> int:
        for header, others in self.spoil(message, [bytes(frame) for frame in frames]):
            packed = header if isinstance(header, bytes) else encode(header)
            self.socket.send_multipart([client, packed, *others], zmq.NOBLOCK)
        return 0


def _as_it_is(message: msgspec.Struct, frames: Frames) -> Iterable[Said]:
    yield message, frames


class WorkerThread:
    """Runs the real loop, service and work of a node in a thread."""

    def __init__(
        self,
        target: Path,
        endpoint: str = "tcp://127.0.0.1:0",
        keys: EdgeKeys | None = None,
        work: NodeWork | None = None,
    ) -> None:
        self.work = work or Worker(open_engine(target, slots=SESSIONS, context=CONTEXT, threads=1))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        bounds = Bounds(32, 32, MESSAGE_BYTES)
        self.listener = SpoilingListener(self._context, endpoint, keys, bounds)
        self.endpoint = self.listener.endpoint
        self.service = NodeService(self.listener, self.work, MESSAGE_BYTES)
        self._tie, theirs = socket.socketpair()
        self._theirs = theirs
        loop = NodeLoop(
            listener=self.listener,
            service=self.service,
            work=self.work,
            signals=Signals(),
            supervisor=Supervisor(),
            config=NodeConfig(target=target),
            lifeline=theirs.fileno(),
        )
        self._thread = threading.Thread(target=loop.run, daemon=True)

    def lies(self, spoil: Callable[[msgspec.Struct, Frames], Iterable[Said]]) -> None:
        """Spoil its reports from now on."""
        self.listener.spoil = spoil

    def hold(self, seconds: float) -> None:
        """Delay its next answer."""

        def late(message: msgspec.Struct, frames: Frames) -> Iterable[Said]:
            self.is_honest()
            time.sleep(seconds)
            return [(message, frames)]

        self.lies(late)

    def is_honest(self) -> None:
        """Spoil no more reports."""
        self.listener.spoil = _as_it_is

    def __enter__(self) -> WorkerThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._tie.close()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._theirs.close()
        self.listener.close()
        self._context.destroy(linger=0)


def await_(truth: Callable[[], object], within_s: float = 30.0, turn: Any = None) -> None:
    """Wait until ``truth`` returns true; ``turn`` is called meanwhile."""
    deadline_s = time.monotonic() + within_s
    while not truth():
        assert time.monotonic() < deadline_s, "it did not become true in time"
        if turn is not None:
            turn()
        time.sleep(0.01)
