"""The head of a model in stages on TensorRT: hidden states → logits. This has not run on a GPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cudart import Cuda, Memory
from pilotfish.engines.forks import keep_in_forks
from pilotfish.engines.tensorrt.build import EngineRequest, check_engine_exists, engine_for
from pilotfish.engines.tensorrt.execution import Execution
from pilotfish.engines.tensorrt.gates import tensorrt_version

Floats = NDArray[np.float32]


class TensorRTHead:
    """The engine of a head, which computes at most `widest` rows at once.

    Args:
        artifact: the first stage, whose folder holds the head's graph.
        build: whether the engine may be built now, which takes minutes.

    Raises:
        ProviderError: if TensorRT is missing, or there is no engine and `build` is false.
    """

    def __init__(self, artifact: Artifact, *, build: bool) -> None:
        keep_in_forks(self)
        if not build:
            check_engine_exists(artifact, head=True)
        tensorrt_version()
        self._cuda = Cuda()
        request = EngineRequest.for_head(self._cuda, artifact)
        self._loaded = engine_for(request, flexible=False, may_build=build)
        engine = self._loaded.engine
        self._widest = request.profiles.widest
        self.width = int(engine.get_tensor_shape("hidden_states")[1])
        self._columns = int(engine.get_tensor_shape("logits")[1])
        self._execution = Execution(engine, 0, self._cuda.stream)
        self._memory: dict[str, Memory] = {}
        self._rows = 0

    def logits(self, hidden: Floats) -> Floats:
        """Compute logits, f32 [n, columns of the head], from hidden states, f32 [n, width]."""
        parts = [hidden[at : at + self._widest] for at in range(0, len(hidden), self._widest)]
        return np.concatenate([self._run(part) for part in parts])

    def _run(self, hidden: Floats) -> Floats:
        rows = len(hidden)
        self._reserve(rows)
        inputs = self._cuda.host_array(hidden.shape, np.float32)
        inputs[:] = hidden
        answer = self._cuda.host_array((rows, self._columns), np.float32)
        self._execution.set_shapes({"hidden_states": (rows, self.width)})
        self._cuda.upload(self._memory["hidden_states"].address, inputs)
        self._execution.run()
        self._cuda.download(answer, self._memory["logits"].address)
        self._cuda.synchronize()
        return answer

    def _reserve(self, rows: int) -> None:
        """Allocate GPU memory for input and output if it has fewer than `rows` rows."""
        if rows <= self._rows:
            return
        self._rows = rows
        for name, width in (("hidden_states", self.width), ("logits", self._columns)):
            self._memory[name] = self._cuda.allocate(rows * width * np.dtype(np.float32).itemsize)
            self._execution.set_address(name, self._memory[name].address)
