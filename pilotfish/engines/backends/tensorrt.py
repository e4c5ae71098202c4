"""TensorRT without ONNX Runtime: an engine, an execution context per profile, one stream.

The inputs of a run share one pinned block, which is copied to fixed addresses on the GPU. Keys and
values never leave the GPU. The standard TensorRT and TensorRT for RTX differ by their edition
alone. This has not run on a GPU yet: see docs/engines.md.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.backends.backend import (
    Answers,
    Backend,
    Binding,
    Load,
    plane_names,
    refuse_states,
)
from pilotfish.engines.cudart import Memory
from pilotfish.engines.device_cache import DeviceCache
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.forks import keep_in_forks
from pilotfish.engines.tensorrt.build import EngineRequest
from pilotfish.engines.tensorrt.edition import RTX, STANDARD, Edition
from pilotfish.engines.tensorrt.execution import Shape
from pilotfish.engines.tensorrt.gates import has
from pilotfish.engines.tensorrt.loading import check_engine_exists, engine_for, open_gpu

ALIGNMENT = 256  # alignment (bytes) of tensors, equal to cudaMalloc's
MASK = "attention_mask"


class TensorRTBackend(Backend):
    """The backend for TensorRT engines of the standard dialects."""

    edition: ClassVar[Edition] = STANDARD

    def __init__(self, load: Load) -> None:
        artifact, manifest = load.artifact, load.artifact.manifest
        refuse_states(manifest)
        keep_in_forks(self)
        if not load.build:
            check_engine_exists(self.edition, artifact)
        # called first, since it raises if TensorRT is missing, which is the most common fault
        trt = self.edition.load()
        context = 1 if load.flexible else load.context
        self._cuda = open_gpu(self.edition, artifact, load.slots, context, whole=load.build)
        request = EngineRequest.for_this_machine(
            self._cuda, artifact, load.slots, load.context, self.edition
        )
        loaded = engine_for(request, flexible=load.flexible, may_build=load.build)
        self._loaded = loaded
        profiles = loaded.request.profiles
        self.batches = True
        self.context = loaded.request.context
        self.narrow, self.widest = profiles.narrow, profiles.widest
        self.names = plane_names(manifest.cached)
        engine = loaded.on_gpu.engine
        self._dtypes = loaded.on_gpu.dtypes()
        inputs = profiles.decode.maximum
        self.widths = {
            name: int(engine.get_tensor_shape(name)[1])
            for name in self._dtypes
            if name not in inputs and not name.startswith("present.")
        }
        self.cache: DeviceCache = DeviceCache(
            self._cuda,
            manifest,
            load.slots,
            profiles.capacities,
            apart=not (has(trt, "opset 24") and _is_in_place(engine, self.names)),
        )
        self._executions = [
            loaded.on_gpu.execution(index, self._cuda.stream) for index in range(len(profiles.all))
        ]
        self._cuda.synchronize()
        self._pieces: list[object] = [None] * len(self._executions)
        largest = {
            name: max(math.prod(each.maximum[name]) for each in profiles.all)
            for name in self._dtypes
            if name in inputs and not name.startswith("past.")
        }
        self._lay_out_inputs(largest)
        self._memory: dict[str, Memory] = {}
        self._rows = 0

    def bind(self, first: int, count: int) -> Binding:
        """Bind slots first … first + count − 1 of each cache tensor."""
        return TensorRTBinding(self, first, count)

    def answers(self, shape: tuple[int, int]) -> NDArray[np.float32]:
        """Allocate an output array in pinned memory."""
        return self._cuda.host_array(shape, np.float32)

    def input(self, name: str, shape: Shape) -> NDArray[Any]:
        """Return this input's part of the pinned block, in the engine's dtype.

        An input that the engine does not read is not in the block.
        """
        if name not in self._offsets:
            return np.empty(shape, np.int64)
        begin, dtype = self._offsets[name], self._dtypes[name]
        size = math.prod(shape) * dtype.itemsize
        return self._host[begin : begin + size].view(dtype).reshape(shape)

    def run(
        self,
        piece: object,
        shapes: dict[str, Shape],
        cache: dict[str, tuple[int, int]],
        answers: Answers,
    ) -> None:
        """Run the engine once: copy inputs to the GPU, compute, copy outputs back.

        piece: identity of `cache`; its addresses are set again only when `piece` changes.
        shapes: shapes of all inputs.
        cache: address to read and address to write, for each cache tensor.
        answers: output arrays; all their rows are filled.
        """
        slots, size = shapes["unpack"]
        is_prefill = slots == 1 and size > (self.narrow or size)
        execution = self._executions[is_prefill]
        if self._pieces[is_prefill] is not piece:
            for name, (past, present) in cache.items():
                execution.set_address(f"past.{name}", past)
                execution.set_address(f"present.{name}", present)
            self._pieces[is_prefill] = piece
        self._reserve_answers(len(next(iter(answers.values()))))
        for name, memory in self._memory.items():
            execution.set_address(name, memory.address)
        execution.set_shapes(shapes)
        mask_bytes = math.prod(shapes[MASK]) * self._dtypes[MASK].itemsize
        self._cuda.upload(self._device.address, self._host[: self._offsets[MASK] + mask_bytes])
        execution.run()
        for name, array in answers.items():
            self._cuda.download(array, self._memory[name].address)
        self._cuda.synchronize()

    def _lay_out_inputs(self, largest: dict[str, int]) -> None:
        """Assign each input an offset in the block; the mask, by far the longest, comes last."""
        self._offsets: dict[str, int] = {}
        end = 0
        for name in sorted(largest, key=lambda name: name == MASK):
            self._offsets[name] = end
            size = largest[name] * self._dtypes[name].itemsize
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self._host = self._cuda.host_array((end,), np.uint8)
        self._device = self._cuda.allocate(end)
        for execution in self._executions:
            for name, place in self._offsets.items():
                execution.set_address(name, self._device.address + place)

    def _reserve_answers(self, rows: int) -> None:
        """Allocate GPU memory for outputs if it has fewer than `rows` rows."""
        if rows > self._rows:
            self._rows = rows
            for name, width in self.widths.items():
                size = rows * width * np.dtype(np.float32).itemsize
                self._memory[name] = self._cuda.allocate(size)


class TensorRTForRtxBackend(TensorRTBackend):
    """The backend for engines of TensorRT for RTX."""

    edition: ClassVar[Edition] = RTX


class TensorRTBinding(Binding):
    """The shapes and addresses for runs over the same neighbouring slots."""

    def __init__(self, backend: TensorRTBackend, first: int, count: int) -> None:
        self._backend = backend
        self._piece = object()
        cache = backend.cache
        self._cache = {
            name: cache.addresses(plane, first) for plane, name in enumerate(backend.names)
        }
        self._shapes: dict[str, Shape] = {
            f"past.{name}": cache.shape(plane, count) for plane, name in enumerate(backend.names)
        }
        self._arrays: dict[str, NDArray[Any]] = {}

    def input(self, name: str, shape: Shape, dtype: Any = np.int64) -> NDArray[Any]:
        """Return the array that the engine will read as `name`; the caller fills all of it."""
        array = self._arrays.get(name)
        if array is None or array.shape != shape:
            array = self._arrays[name] = self._backend.input(name, shape)
            self._shapes[name] = shape
        return array

    def run(self, answers: Answers, row: int, rows: int) -> None:
        """Run the engine once."""
        parts = {name: answer[row : row + rows] for name, answer in answers.items()}
        self._backend.run(self._piece, self._shapes, self._cache, parts)


def _is_in_place(engine: Any, names: list[str]) -> bool:
    """Whether the engine updates the cache in place, as TensorRT's KVCacheUpdate does.

    Any other engine needs separate buffers to read and to write.
    """
    aliased = [
        engine.get_aliased_input_tensor(f"present.{name}") == f"past.{name}" for name in names
    ]
    if any(aliased) and not all(aliased):
        raise ProviderError(
            "the engine writes some cache tensors in place and others not: build it again"
        )
    return all(aliased)
