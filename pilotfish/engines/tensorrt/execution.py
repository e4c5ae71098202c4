"""What only a GPU executes: loading an engine's plan, its kernels, and execution contexts.

The standard TensorRT ran here over a double, TensorRT for RTX not at all: see docs/untested.md.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.engines.cache import replace_file
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.tensorrt.edition import Edition
from pilotfish.engines.tensorrt.gates import array_dtype, has

log = logging.getLogger("pilotfish.engines")

Shape = tuple[int, ...]


class EngineOnGpu:
    """A deserialised engine.

    Args:
        kernels: file of the kernels that TensorRT for RTX compiles for this GPU; None: keep none.

    Attributes:
        engine: TensorRT's engine.
    """

    def __init__(self, edition: Edition, runtime: Any, engine: Any, kernels: Path | None) -> None:
        self.engine = engine
        self.edition = edition
        self._runtime = runtime  # must live as long as the engine
        keeps = kernels is not None and has(edition.load(), "runtime cache")
        self._kernels = Kernels(engine, kernels) if kernels is not None and keeps else None

    @classmethod
    def deserialize(cls, edition: Edition, plan: bytes, kernels: Path | None) -> EngineOnGpu | None:
        """Deserialise a plan; None if TensorRT refuses it (see `Edition.last_error`)."""
        runtime = edition.load().Runtime(edition.logger())
        engine = runtime.deserialize_cuda_engine(plan)
        return None if engine is None else cls(edition, runtime, engine, kernels)

    def execution(self, profile: int, stream: int) -> Execution:
        """Open an execution context; see `Execution`."""
        return Execution(self.engine, profile, stream, self._kernels)

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Return the dtype of each input and output.

        Raises:
            ProviderError: if one of them is a shape tensor, which is in host memory.
        """
        trt, engine = self.edition.load(), self.engine
        dtypes = {}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
                raise ProviderError(
                    f"the engine expects {name} in host memory, which no engine of "
                    "our graphs does: build it again"
                )
            dtypes[name] = array_dtype(trt, engine.get_tensor_dtype(name))
        return dtypes


class Kernels:
    """The kernels of an engine, which TensorRT for RTX compiles on this GPU, and their file.

    They are written after the first run of each execution context and when the process ends, since
    TensorRT compiles kernels for further shapes while it runs.
    """

    def __init__(self, engine: Any, path: Path) -> None:
        self._engine, self._path = engine, path
        self._cache = engine.create_runtime_config().create_runtime_cache()
        earlier = _content(path)
        if earlier and not self._cache.deserialize(earlier):
            log.info("the compiled kernels in %s do not fit, and are compiled again", path)
            with suppress(OSError):
                path.unlink()
        weakref.finalize(self, _save_at_end, self._cache, path, os.getpid())

    def config(self) -> Any:
        """Make the configuration of an execution context that uses and adds to the kernels."""
        config = self._engine.create_runtime_config()
        if not config.set_runtime_cache(self._cache):
            raise ProviderError("TensorRT for RTX refuses its cache of kernels")
        return config

    def save(self) -> None:
        """Write the kernels if there are new ones."""
        _save(self._cache, self._path)


def _save(cache: Any, path: Path) -> None:
    data = bytes(cache.serialize())
    if data != _content(path):
        try:
            replace_file(path, data)
        except OSError as error:  # the next load takes longer
            log.info("compiled kernels cannot be kept: %s", error)


def _save_at_end(cache: Any, path: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork
        _save(cache, path)


def _content(path: Path) -> bytes:
    """Return a file's content; b"" if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


class Execution:
    """Runs an engine with the shapes of one profile; a change of the profile would be slow.

    Args:
        profile: index of the profile.
        stream: handle of the CUDA stream on which everything runs.
        kernels: kernels to use and add to; None: TensorRT compiles none.

    Raises:
        ProviderError: if the GPU has too little memory for the engine's activations.
    """

    def __init__(
        self, engine: Any, profile: int, stream: int, kernels: Kernels | None = None
    ) -> None:
        if kernels is None:
            handle = engine.create_execution_context()
        else:
            handle = engine.create_execution_context(runtime_config=kernels.config())
        if handle is None or not handle.set_optimization_profile_async(profile, stream):
            raise ProviderError("TensorRT cannot allocate memory for the engine's activations")
        self._handle = handle
        self._new_kernels = kernels  # None after they were saved
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
        if self._new_kernels is not None:
            self._new_kernels.save()
            self._new_kernels = None
