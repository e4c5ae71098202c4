"""Run an artifact's graph on the CPU in parts, with one part's weights in memory at a time.

In: an artifact. Out: a `Decoder`. A session of the whole graph holds all weights, most of them as
copies in the kernels' layout. Here each run opens a session for one part after the other, and hands
on the values between them; so a run takes seconds, and is for long texts. All else is the engine's:
inputs, keys and values, states, and the artifact's own operators and weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, ValueInfoProto, helper

from pilotfish.engines.backends import OpenedBackend
from pilotfish.engines.backends.backend import Answers, Backend, Binding, Load, plane_names
from pilotfish.engines.backends.cpu import state_arrays
from pilotfish.engines.kv import HostCache
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.runtime import CPU, open_session
from pilotfish.engines.states import StateCache, StateStep
from pilotfish.export.borders import Dependencies, Part

PART_BYTES = 96 << 20  # weights of a part, unless one operator has more
CACHES = ("present.", "settled.")


class PartsDecoder(Decoder):
    """A decoder whose sessions are open only during a run, one at a time."""

    @property
    def part_bytes(self) -> int:
        """The size of the weights of the largest part."""
        assert isinstance(self._backend, _PartsBackend)
        return self._backend.parts.largest_bytes

    def _open(self, load: Load, provider: str) -> OpenedBackend:
        backend = _PartsBackend(load)
        self._backend, self._cache = backend, backend.cache
        self._allocate(1)
        return OpenedBackend(backend, provider, None)


class _PartsBackend(Backend):
    """The backend of a graph that is cut into parts."""

    trusted = True

    def __init__(self, load: Load) -> None:
        manifest = load.artifact.manifest
        whole = onnx.load(load.artifact.graph_path, load_external_data=False)
        self.parts = GraphParts(whole, load.artifact.path, load.threads)
        self.context = load.context
        self.batches = any(item.name == "unpack" for item in whole.graph.input)
        self.widths = {
            item.name: item.type.tensor_type.shape.dim[1].dim_value
            for item in whole.graph.output
            if not item.name.startswith(CACHES)
        }
        self.cache: HostCache = HostCache(manifest, load.slots, load.context)
        self.layers: list[int] = []
        if manifest.states is not None:
            self.states = StateCache(manifest.states, load.slots)
            self.layers = self.states.layout.layers
        self._names = plane_names(manifest.cached)

    def bind(self, first: int, count: int) -> Binding:
        """Bind slots first … first + count − 1."""
        binding = _PartsBinding(self)
        for plane, name in enumerate(self._names):
            piece = self.cache.piece(plane, first, count)
            binding.read[f"past.{name}"] = binding.written[f"present.{name}"] = piece
        return binding


class _PartsBinding(Binding):
    """The inputs of a run.

    Attributes:
        read: arrays by input.
        written: arrays by output that the run fills, except its answers.
    """

    def __init__(self, backend: _PartsBackend) -> None:
        self._backend = backend
        self.read: dict[str, NDArray[Any]] = {}
        self.written: dict[str, NDArray[Any]] = {}

    def input(self, name: str, shape: tuple[int, ...], dtype: Any = np.int64) -> NDArray[Any]:
        """Return the array that the graph will read as `name`."""
        self.read[name] = np.zeros(shape, dtype)
        return self.read[name]

    def bind_states(self, step: StateStep) -> None:
        """Make the next run read and write these states."""
        for name, array in state_arrays(self._backend.layers, step):
            (self.read if name.startswith("past.") else self.written)[name] = array

    def run(self, answers: Answers, row: int, rows: int) -> None:
        """Run one part after the other."""
        places = {name: answer[row : row + rows] for name, answer in answers.items()}
        self._backend.parts.run(self.read, self.written | places)


class GraphParts:
    """A graph in parts, whose weights stay in their file until a part runs.

    Args:
        whole: the graph, without its external weights.
        folder: folder of the weights, and of temporary graphs.
        threads: threads per run; None = the cores that this process may use.
    """

    def __init__(self, whole: ModelProto, folder: Path, threads: int | None) -> None:
        self._whole, self._folder, self._threads = whole, folder, threads
        self._inputs = {item.name: item for item in whole.graph.input}
        self._weights = {item.name: item for item in whole.graph.initializer}
        self._sizes = {name: _size(weight) for name, weight in self._weights.items()}
        self.parts = Dependencies(whole.graph).parts(self._sizes, PART_BYTES)

    @property
    def largest_bytes(self) -> int:
        """The size of the weights of the largest part."""
        return max(sum(self._sizes[name] for name in part.graph.weights) for part in self.parts)

    def run(self, read: dict[str, NDArray[Any]], written: dict[str, NDArray[Any]]) -> None:
        """Run all parts.

        read: arrays by input of the whole graph. written: arrays by output, to fill.
        """
        values: dict[str, NDArray[Any]] = {}  # values between the parts
        for part in self.parts:
            feeds = {name: values[name] for name in part.inputs}
            feeds |= {name: read[name] for name in part.graph.inputs}
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".onnx") as file:
                file.write(self._model(part, values).SerializeToString())
                file.flush()
                session = open_session(Path(file.name), self._threads, CPU, lasting=False)
            binding = session.io_binding()
            for name, value in feeds.items():
                binding.bind_cpu_input(name, np.ascontiguousarray(value))
            for name in part.outputs:
                array = written.get(name)
                if array is None:
                    binding.bind_output(name, "cpu")
                else:
                    place = array.dtype.type, array.shape, array.ctypes.data
                    binding.bind_output(name, "cpu", 0, *place)
            session.run_with_iobinding(binding)
            made = zip(part.outputs, binding.get_outputs(), strict=True)
            values |= {
                name: written[name] if name in written else value.numpy() for name, value in made
            }
            values = {name: value for name, value in values.items() if name in part.crossing}
            del session, binding

    def _model(self, part: Part, values: dict[str, NDArray[Any]]) -> ModelProto:
        """Build the graph of a part; `values` have the types of its inputs."""
        inputs = [self._inputs[name] for name in sorted(part.graph.inputs)]
        for name in part.inputs:
            kind = helper.np_dtype_to_tensor_dtype(values[name].dtype)
            inputs.append(helper.make_tensor_value_info(name, kind, [None] * values[name].ndim))
        outputs = [ValueInfoProto(name=name) for name in part.outputs]  # the runtime infers types
        weights = [self._weights[name] for name in sorted(part.graph.weights)]
        graph = helper.make_graph(part.graph.nodes, "part", inputs, outputs, weights)
        model: ModelProto = helper.make_model(graph, opset_imports=self._whole.opset_import)
        model.ir_version = self._whole.ir_version
        return model


def _size(weight: Any) -> int:
    """Return the size of a weight in bytes."""
    stated = {entry.key: entry.value for entry in weight.external_data}
    return int(stated["length"]) if stated else int(weight.ByteSize())
