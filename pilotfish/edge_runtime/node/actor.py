"""Run a whole model or a stage as an actor of a cluster (`edge_runtime.targets.cluster`).

`NodeActor` is a plain class. The cluster's runtime turns it into an actor and restarts the actor
after a loss. It passes the arguments of a call from the edge, or from the actor of the previous
stage. A restarted actor has empty slots, and refuses steps until `hold` is called again.
"""

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import TargetLostError
from pilotfish.boards.start import warn_of_idle_gpu
from pilotfish.edge_runtime.steps import WorkFrames, decode_works, engine_refusals
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Engine, StageEngine, open_engine
from pilotfish.engines.stage import Stage


class ActorInfo(NamedTuple):
    """Description of an actor: digest of its artifact, positions of a slot, and process id."""

    digest: str
    context: int
    pid: int


class StageResult(NamedTuple):
    """Result of a step after one or more actors.

    states: states for the next stage, f32 [Σ size, width]; from the last stage or a whole model,
    hidden states f32 [Σ rows, d]. compute_ns: computing time of each actor so far. logits: f32
    [Σ rows, V], only from a whole model.
    """

    states: NDArray[np.float32]
    compute_ns: tuple[int, ...]
    logits: NDArray[np.float32] | None = None


class NodeActor:
    """Actor that runs a whole model or a stage; raises the errors of `open_model` and `Stage`."""

    def __init__(
        self, path: str, *, slots: int, context: int, threads: int | None, provider: str
    ) -> None:
        artifact = Artifact.open(Path(path), stage=True)
        self._digest = artifact.manifest.digest
        self._vocab = artifact.manifest.vocab_size
        self._incarnation: bytes | None = None
        options: Any = {
            "slots": slots,
            "context": context,
            "threads": threads,
            "provider": provider,
        }
        self._engine: Engine | StageEngine
        if artifact.manifest.stage is None:
            self._engine = engine = open_engine(artifact, **options)
            idle_gpu = engine.model.idle_gpu
        else:
            stage = Stage(artifact, **options)
            self._engine, idle_gpu = StageEngine(stage), stage.idle_gpu
        warn_of_idle_gpu(artifact, idle_gpu)

    def hold(self, incarnation: bytes) -> ActorInfo:
        """Empty all slots, and accept steps of this incarnation from now on."""
        self._engine.clear_all()
        self._incarnation = incarnation
        return ActorInfo(self._digest, self._engine.contents.context, os.getpid())

    def step(
        self,
        incarnation: bytes,
        sent: WorkFrames,
        previous: StageResult | None,
    ) -> StageResult:
        """Run a step; previous: result of the previous stage, None for the first stage.

        Raises `TargetLostError` if the actor was restarted after the last call of `hold`.
        """
        if incarnation != self._incarnation:
            raise TargetLostError("An actor of the target was restarted and has lost its slots.")
        begun_ns = time.monotonic_ns()
        compute_ns = () if previous is None else previous.compute_ns
        states = None if previous is None else previous.states
        works = decode_works(sent, self._engine, self._vocab)
        logits = None
        with engine_refusals():
            if isinstance(self._engine, StageEngine):
                states = self._engine.run(works, states)
            else:
                outputs = self._engine.run(works)
                states = np.concatenate([output.hidden for output in outputs])
                logits = np.concatenate([output.logits for output in outputs])
        return StageResult(states, (*compute_ns, time.monotonic_ns() - begun_ns), logits)
