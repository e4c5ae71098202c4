"""ONNX Runtime on the CPU, for graphs of ONNX Runtime GenAI's builder: one slot per run.

GroupQueryAttention gets a slot's whole buffers of keys and values, which are longer than their
content. The sum of the mask gives the end of the content: cells after it are not read, so a
rollback just lowers the sum. Layers with attention windows also have buffers of full length, so a
rollback loses no cell. A run computes the outputs of all its tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.backends.backend import Answers, Backend, Binding, Load
from pilotfish.engines.backends.cpu import CpuBinding
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.genai.genai_config import (
    GenaiConfig,
    GraphForm,
    Port,
    Ports,
    check_graph,
    read_genai_config,
)
from pilotfish.engines.kv import HostCache
from pilotfish.engines.manifest import Manifest
from pilotfish.engines.runtime import CPU, open_session

# maximum tokens of a run, which bounds the memory for the logits of all its tokens
MOST_RUN_TOKENS = 128
_DTYPES = {"tensor(int64)": "int64", "tensor(float)": "float32", "tensor(float16)": "float16"}


class GenaiBackend(Backend):
    """The backend for graphs of ONNX Runtime GenAI's builder, on the cores of this machine.

    Raises:
        ArtifactError: if graph, genai_config.json and manifest contradict each other.
    """

    batches = False  # GroupQueryAttention takes several slots only with one new token each
    widest = MOST_RUN_TOKENS

    def __init__(self, load: Load) -> None:
        artifact = load.artifact
        self.config = read_genai_config(artifact.genai_path)
        self.session = open_session(artifact.graph_path, load.threads, CPU)
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        self.form = check_graph(self.config, _ports(inputs), _ports(outputs))
        _check_manifest(artifact.manifest, self.config, self.form)
        self.context = load.context
        self.widths = self.form.widths
        self.cache: HostCache = HostCache(artifact.manifest, load.slots, load.context)
        self._rows: dict[str, NDArray[Any]] = {}

    def bind(self, first: int, count: int) -> Binding:
        """Bind a slot's part of the cache as `past` and as `present`."""
        assert count == 1
        return GenaiBinding(self, first)

    def rows(self, name: str, count: int) -> NDArray[Any]:
        """Return a buffer for `count` rows of an output, in the graph's dtype.

        All runs share it.
        """
        buffer = self._rows.get(name)
        if buffer is None or len(buffer) < count:
            buffer = np.empty((count, self.widths[name]), self.form.kinds[name])
            self._rows[name] = buffer
        return buffer[:count]


class GenaiBinding(CpuBinding):
    """The binding for runs of one slot."""

    def __init__(self, backend: GenaiBackend, slot: int) -> None:
        super().__init__(backend.session, [])
        self._backend = backend
        names = zip(backend.config.planes("past"), backend.config.planes("present"), strict=True)
        for plane, (past, present) in enumerate(names):
            self.bind_in_place(past, present, backend.cache.piece(plane, slot, 1))

    def run(self, answers: Answers, row: int, rows: int) -> None:
        """Run the graph once; write the outputs of the last `rows` tokens."""
        backend, section = self._backend, self._backend.config.model.decoder
        size = self._inputs[section.inputs["input_ids"]].shape[1]
        computed = {}
        for name, answer in answers.items():
            whole = rows == size and backend.form.kinds[name] == "float32"
            target = answer[row : row + rows] if whole else backend.rows(name, size)
            self._binding.bind_output(
                section.outputs.get(name, name), "cpu", 0, target.dtype.type, (1, *target.shape),
                target.ctypes.data,
            )  # fmt: skip
            computed[name] = target
        self._session.run_with_iobinding(self._binding)
        for name, answer in answers.items():
            if not np.shares_memory(computed[name], answer):
                answer[row : row + rows] = computed[name][size - rows :]


def _ports(items: Any) -> Ports:
    return {item.name: Port(_DTYPES.get(item.type, item.type), tuple(item.shape)) for item in items}


def _check_manifest(manifest: Manifest, config: GenaiConfig, form: GraphForm) -> None:
    """Raise unless the manifest describes this graph."""
    section, sizes = config.model.decoder, manifest.dimensions
    described = (
        sizes.layers, sizes.kv_heads, sizes.head_dim, sizes.hidden, manifest.padded_vocab_size,
        manifest.kv_dtype, manifest.hidden_states,
    )  # fmt: skip
    graph = (
        section.num_hidden_layers, section.num_key_value_heads, section.head_size,
        section.hidden_size, form.widths["logits"], form.kv_dtype, "hidden_states" in form.widths,
    )  # fmt: skip
    if described != graph:
        raise ArtifactError("manifest.json describes another graph: export the model again")
