"""The head of a model in stages on TensorRT: hidden states → logits. This has not run on a GPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cudart import Memory
from pilotfish.engines.forks import keep_in_forks
from pilotfish.engines.tensorrt.build import EngineRequest
from pilotfish.engines.tensorrt.edition import Edition
from pilotfish.engines.tensorrt.loading import check_engine_exists, engine_for, open_gpu

Floats = NDArray[np.float32]


class TensorRTHead:
    """The engine of a head, which computes at most `widest` rows at once.

    Args:
        artifact: the first stage, whose folder holds the head's graph.
        build: whether the engine may be built now, which takes minutes.

    Raises:
        ProviderError: if TensorRT is missing, or there is no engine and `build` is false.
    """

    def __init__(self, artifact: Artifact, edition: Edition, *, build: bool) -> None:
        keep_in_forks(self)
        if not build:
            check_engine_exists(edition, artifact, head=True)
        edition.load()
        self._cuda = open_gpu(edition, artifact, 1, 1, head=True, whole=build)
        request = EngineRequest.for_head(self._cuda.describe(), artifact, edition)
        self._loaded = engine_for(request, flexible=False, may_build=build)
        engine = self._loaded.on_gpu.engine
        self._widest = request.profiles.widest
        self.width = int(engine.get_tensor_shape("hidden_states")[1])
        self._columns = int(engine.get_tensor_shape("logits")[1])
        self._execution = self._loaded.on_gpu.execution(0, self._cuda.stream)
        self._rows = 0  # rows for which memory is allocated, on the GPU and pinned on the host
        self._memory: dict[str, Memory] = {}
        self._pinned: dict[str, Floats] = {}

    def logits(self, hidden: Floats) -> Floats:
        """Compute logits, f32 [n, columns of the head], from hidden states, f32 [n, width]."""
        answer = np.empty((len(hidden), self._columns), np.float32)
        for start in range(0, len(hidden), self._widest):
            part = slice(start, start + self._widest)
            self._run(hidden[part], answer[part])
        return answer

    def _run(self, hidden: Floats, answer: Floats) -> None:
        rows = len(hidden)
        self._reserve(rows)
        inputs, outputs = (self._pinned[name][:rows] for name in ("hidden_states", "logits"))
        inputs[:] = hidden
        self._execution.set_shapes({"hidden_states": hidden.shape})
        self._cuda.upload(self._memory["hidden_states"].address, inputs)
        self._execution.run()
        self._cuda.download(outputs, self._memory["logits"].address)
        self._cuda.synchronize()
        answer[:] = outputs

    def _reserve(self, rows: int) -> None:
        """Allocate memory for input and output if there is less than for `rows` rows."""
        if rows <= self._rows:
            return
        self._rows = rows
        for name, width in (("hidden_states", self.width), ("logits", self._columns)):
            pinned = self._pinned[name] = self._cuda.host_array((rows, width), np.float32)
            self._memory[name] = self._cuda.allocate(pinned.nbytes)
            self._execution.set_address(name, self._memory[name].address)
