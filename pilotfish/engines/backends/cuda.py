"""ONNX Runtime on a GPU: keys and values stay in GPU memory, bound as `past` and as `present`.

Each run binds its small inputs again, because ONNX Runtime copies host inputs at the time of
binding. docs/engines.md has measurements on a GPU.
"""

from __future__ import annotations

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
from pilotfish.engines.backends.cpu import graph_form
from pilotfish.engines.cudart import Cuda
from pilotfish.engines.device_cache import DeviceCache, doubling_capacities
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.forks import keep_in_forks
from pilotfish.engines.runtime import CUDA, open_session

FIRST_CAPACITY = 256


class CudaBackend(Backend):
    """The backend for ONNX Runtime's CUDA provider, and base for others that use CUDA memory.

    Attributes:
        provider: ONNX Runtime's name of the provider.
        others: further providers, for operators that the provider lacks.
        device: IOBinding's name of the memory that holds keys and values.
        apart: whether a run needs separate buffers to read and to write.
    """

    provider: ClassVar[str] = CUDA
    others: ClassVar[tuple[str, ...]] = ()
    device: ClassVar[str] = "cuda"
    apart: ClassVar[bool] = False

    def __init__(self, load: Load) -> None:
        manifest = load.artifact.manifest
        refuse_states(manifest)
        if manifest.dialect == "contrib":
            raise ProviderError(
                "the dialect contrib does not run on GPUs: export the model with --dialect opset24"
            )
        self._session = open_session(
            load.artifact.graph_path, load.threads, self.provider, self.options(load), self.others
        )
        self.context = load.context
        self.batches, self.widths = graph_form(self._session)
        self._cuda = Cuda()  # created after the session, since the session may load libcudart
        self.cache: DeviceCache = DeviceCache(
            self._cuda, manifest, load.slots, self.capacities(load), apart=self.apart
        )
        self._names = plane_names(manifest.cached)

    def options(self, load: Load) -> dict[str, str]:
        """Return the options of the provider."""
        return {}

    def capacities(self, load: Load) -> list[int]:
        """List the capacities of the cache.

        The last, twice the context, is for padding in shared runs.
        """
        longest = [2 * load.context] if load.slots > 1 else []
        return doubling_capacities(min(FIRST_CAPACITY, load.context), load.context) + longest

    def bind(self, first: int, count: int) -> Binding:
        """Bind slots first … first + count − 1 of each cache tensor."""
        binding = DeviceBinding(self._session, self._cuda)
        dtype = self.cache.dtype.type
        for plane, name in enumerate(self._names):
            shape = self.cache.shape(plane, count)
            past, present = self.cache.addresses(plane, first)
            binding.io.bind_input(f"past.{name}", self.device, 0, dtype, shape, past)
            binding.io.bind_output(f"present.{name}", self.device, 0, dtype, shape, present)
        return binding

    def answers(self, shape: tuple[int, int]) -> NDArray[np.float32]:
        """Allocate an output array in pinned memory."""
        return self._cuda.host_array(shape, np.float32)


class DeviceBinding(Binding):
    """An IOBinding with the cache in GPU memory and everything else in host memory."""

    def __init__(self, session: Any, cuda: Cuda) -> None:
        self._session = session
        self._cuda = cuda
        self.io = session.io_binding()
        keep_in_forks(self)
        self._inputs: dict[str, NDArray[Any]] = {}

    def input(self, name: str, shape: tuple[int, ...], dtype: Any = np.int64) -> NDArray[Any]:
        """Return the array that the graph will read as `name`; the caller fills all of it."""
        array = self._inputs.get(name)
        if array is None or array.shape != shape:
            array = self._inputs[name] = np.zeros(shape, dtype)
        return array

    def run(self, answers: Answers, row: int, rows: int) -> None:
        """Run the graph once."""
        for name, array in self._inputs.items():
            self.io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, answer in answers.items():
            part = answer[row : row + rows]
            self.io.bind_output(name, "cpu", 0, np.float32, part.shape, part.ctypes.data)
        # needed since ONNX Runtime uses another stream than the cache's copies
        self._cuda.synchronize()
        self._session.run_with_iobinding(self.io)
        self.io.synchronize_outputs()
