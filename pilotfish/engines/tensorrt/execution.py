"""A TensorRT execution context, with the shapes and addresses that were last set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.tensorrt.gates import array_dtype

if TYPE_CHECKING:
    import tensorrt as trt

Shape = tuple[int, ...]


class Execution:
    """Runs an engine with the shapes of one profile; a change of the profile would be slow.

    Args:
        profile: index of the profile.
        stream: handle of the CUDA stream on which everything runs.

    Raises:
        ProviderError: if the GPU has too little memory for the engine's activations.
    """

    def __init__(self, engine: trt.ICudaEngine, profile: int, stream: int) -> None:
        handle = engine.create_execution_context()
        if handle is None or not handle.set_optimization_profile_async(profile, stream):
            raise ProviderError("TensorRT cannot allocate memory for the engine's activations")
        self._handle: trt.IExecutionContext = handle
        self._stream = stream
        self._names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}

    def set_address(self, name: str, address: int) -> None:
        """Set the address on the GPU at which an input is read or an output is written."""
        if self._addresses.get(name) != address:
            if not self._handle.set_tensor_address(name, address):
                raise ProviderError(f"TensorRT refuses the address of {name}")
            self._addresses[name] = address

    def set_shapes(self, shapes: Mapping[str, Shape]) -> None:
        """Set the shapes that changed; check that the context can infer all others.

        Inputs that the engine does not read, and therefore may lack, are skipped.
        """
        if self._shapes == shapes:
            return
        for name in self._names & shapes.keys():
            shape = shapes[name]
            if self._shapes.get(name) != shape and not self._handle.set_input_shape(name, shape):
                raise ProviderError(f"TensorRT refuses the shape {shape} of the input {name}")
        missing = self._handle.infer_shapes()
        if missing:
            raise ProviderError(
                f"TensorRT does not know the shapes or addresses of {', '.join(missing)}"
            )
        self._shapes = dict(shapes)

    def run(self) -> None:
        """Start the engine on the stream; this does not wait for its end."""
        if not self._handle.execute_async_v3(self._stream):
            raise ProviderError(
                "TensorRT could not run the engine: run the command with -v "
                "and see TensorRT's log for the reason"
            )


def tensor_dtypes(engine: trt.ICudaEngine) -> dict[str, np.dtype[Any]]:
    """Return the dtype of each input and output.

    Raise for shape tensors, which are in host memory.
    """
    import tensorrt as trt

    dtypes = {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise ProviderError(
                f"the engine expects {name} in host memory, which no engine of "
                "our graphs does: build it again"
            )
        dtypes[name] = array_dtype(engine.get_tensor_dtype(name))
    return dtypes
