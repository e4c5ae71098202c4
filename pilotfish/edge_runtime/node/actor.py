"""Run a whole model or a stage as an actor of a cluster (`edge_runtime.targets.cluster`).

`NodeActor` is a plain class. The cluster's runtime turns it into an actor and restarts the actor
after a loss. It passes the arguments of a call from the edge, or from the actor of the previous
stage. A restarted actor has empty slots, and refuses steps until `hold` is called again.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import TargetLostError
from pilotfish.edge_runtime.step_slots import ModelSlots, StageSlots
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.language_model import LanguageModel, open_model
from pilotfish.engines.stage import Stage
from pilotfish.wire.nodes import Item


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
        self._incarnation: bytes | None = None
        opened = open_model if artifact.manifest.stage is None else Stage
        engine = opened(artifact, slots=slots, context=context, threads=threads, provider=provider)
        self._context = engine.context
        self._slots = (
            ModelSlots(engine) if isinstance(engine, LanguageModel) else StageSlots(engine)
        )

    def hold(self, incarnation: bytes) -> ActorInfo:
        """Empty all slots, and accept steps of this incarnation from now on."""
        self._slots.forget()
        self._incarnation = incarnation
        return ActorInfo(self._digest, self._context, os.getpid())

    def step(
        self,
        incarnation: bytes,
        items: list[Item],
        inputs: "NDArray[np.int64] | StageResult",
        parents: bytes,
    ) -> StageResult:
        """Run a step; inputs: tokens i64 [Σ size], or the result of the previous stage.

        Raises `TargetLostError` if the actor was restarted after the last call of `hold`.
        """
        if incarnation != self._incarnation:
            raise TargetLostError("An actor of the target was restarted and has lost its slots.")
        begun_ns = time.monotonic_ns()
        before = inputs.compute_ns if isinstance(inputs, StageResult) else ()
        if isinstance(self._slots, StageSlots):
            values = inputs.states if isinstance(inputs, StageResult) else inputs
            states, logits = self._slots.run(items, values, parents), None
        else:
            assert not isinstance(inputs, StageResult)
            outputs = self._slots.run(items, inputs, parents)
            states = np.concatenate([answer.hidden for answer in outputs])
            logits = np.concatenate([answer.logits for answer in outputs])
        return StageResult(states, (*before, time.monotonic_ns() - begun_ns), logits)
