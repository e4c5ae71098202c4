"""A trial of CUDA graphs: a pass with and without, and whether the logits are equal.

    python benchmarks/_cuda_graphs.py ARTIFACT    (opset24, on a machine with a GPU)

ONNX Runtime records the kernels of a run once, and later starts them all at once. For that all
inputs and outputs lie at fixed addresses in the GPU's memory; the graph has S as an input instead
of by `Shape`, which ONNX Runtime leaves to the CPU; and `gpu_graph_id` names one recording for each
shape of a run. docs/engines.md has figures.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines import backends
from pilotfish.engines.backends.backend import Answers, Binding, Load
from pilotfish.engines.backends.cuda import CudaBackend
from pilotfish.engines.onnx_decoder import Decoder, Pass
from tests.support.prefill import prefill

CONTEXTS, SIZES, REPETITIONS, WARM = (200, 1500), (1, 4, 8, 16), 21, 3
WIDEST = 64  # tokens of a run that is recorded
WIDTH = "chain_width"  # the input that stands for `Shape`


def without_shape(source: Path, out: Path) -> Path:
    """Copy an artifact whose graph reads S by `Shape` once; the copy's has it as an input."""
    import onnx

    shutil.copytree(source, out)
    model = onnx.load(str(source / "model.onnx"), load_external_data=False)
    graph = model.graph
    [shape] = [node for node in graph.node if node.op_type == "Shape"]
    graph.node.remove(shape)
    graph.input.append(onnx.helper.make_tensor_value_info(WIDTH, onnx.TensorProto.INT64, [1]))
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == shape.output[0]:
                node.input[i] = WIDTH
    onnx.save(model, str(out / "model.onnx"))
    manifest = json.loads((out / "manifest.json").read_text())
    digest = hashlib.sha256((out / "model.onnx").read_bytes()).hexdigest()
    manifest["files"]["model.onnx"] = digest
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


class GraphBackend(CudaBackend):
    """The CUDA provider with a recording for each shape of a run."""

    recordings = 0

    def options(self, load: Load) -> dict[str, str]:
        return {"enable_cuda_graph": "1"}

    def bind(self, first: int, count: int) -> Binding:
        return GraphBinding(self, first, count)


@dataclass(frozen=True)
class Recording:
    """An IOBinding, the GPU memory of its inputs and outputs, and the options of its runs."""

    io: Any
    memory: Mapping[str, Any]
    options: Any


class GraphBinding(Binding):
    """The runs over the same neighbouring slots."""

    def __init__(self, backend: GraphBackend, first: int, count: int) -> None:
        self._backend, self._first, self._count = backend, first, count
        self._session, self._cuda = backend._session, backend._cuda
        self._inputs: dict[str, NDArray[Any]] = {}
        self._recordings: dict[tuple[Any, ...], Recording] = {}

    def input(self, name: str, shape: tuple[int, ...], dtype: Any = np.int64) -> NDArray[Any]:
        array = self._inputs.get(name)
        if array is None or array.shape != shape:
            array = self._inputs[name] = self._cuda.host_array(shape, dtype)
        return array

    def run(self, answers: Answers, row: int, rows: int) -> None:
        self.input(WIDTH, (1,))[0] = self._inputs["unpack"].shape[1]
        key = (rows, *(array.shape for array in self._inputs.values()))
        if key not in self._recordings:
            self._recordings[key] = self._prepare(answers, rows)
        recording = self._recordings[key]
        for name, array in self._inputs.items():
            self._cuda.upload(recording.memory[name].address, array)
        self._cuda.synchronize()
        self._session.run_with_iobinding(recording.io, recording.options)
        recording.io.synchronize_outputs()
        for name, answer in answers.items():
            self._cuda.download(answer[row : row + rows], recording.memory[name].address)
        self._cuda.synchronize()

    def _prepare(self, answers: Answers, rows: int) -> Recording:
        import onnxruntime

        backend, device = self._backend, self._backend.device
        io, memory = self._session.io_binding(), {}
        for plane, name in enumerate(backend._names):
            shape = backend.cache.shape(plane, self._count)
            past, present = backend.cache.addresses(plane, self._first)
            dtype = backend.cache.dtype.type
            io.bind_input(f"past.{name}", device, 0, dtype, shape, past)
            io.bind_output(f"present.{name}", device, 0, dtype, shape, present)
        for name, array in self._inputs.items():
            memory[name] = self._cuda.allocate(array.nbytes)
            dtype, address = array.dtype.type, memory[name].address
            io.bind_input(name, device, 0, dtype, array.shape, address)
        for name, answer in answers.items():
            size = (rows, answer.shape[1])
            memory[name] = self._cuda.allocate(rows * answer.shape[1] * answer.itemsize)
            io.bind_output(name, device, 0, np.float32, size, memory[name].address)
        backend.recordings += 1
        is_recorded = len(self._inputs["input_ids"]) <= WIDEST
        options = onnxruntime.RunOptions()
        number = str(backend.recordings) if is_recorded else "-1"
        options.add_run_config_entry("gpu_graph_id", number)
        return Recording(io, memory, options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    source = parser.parse_args().artifact
    with tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as name:
        edited = without_shape(source, Path(name) / "edited")
        backends.PROVIDERS["graphs"] = f"{__name__}:{GraphBackend.__name__}"
        plain = Decoder(source, context=2048, provider="cuda")
        graphs = Decoder(edited, context=2048, provider="graphs")
        tokens = np.random.default_rng(0).integers(0, plain.vocab_size, 2048).astype(np.int64)
        for context in CONTEXTS:
            for size in SIZES:
                before, wanted = timed(plain, tokens, context, size)
                after, got = timed(graphs, tokens, context, size)
                equal = "equal" if np.array_equal(got, wanted) else "DIFFERENT"
                print(f"{context:5} S = {size:2}: {before:.2f} → {after:.2f} ms, logits {equal}")
    return 0


def timed(
    decoder: Decoder, tokens: NDArray[np.int64], context: int, size: int
) -> tuple[float, NDArray[np.float32]]:
    """The median of some passes in ms, and the logits of the last."""
    decoder.rollback(0, min(decoder.length(0), context))
    if decoder.length(0) < context:
        prefill(decoder, 0, tokens[decoder.length(0) : context], rows=0)
    times_ms = []
    for _ in range(WARM + REPETITIONS):
        decoder.rollback(0, context)
        begin = time.perf_counter()
        [output] = decoder.forward([Pass(0, tokens[context : context + size])])
        times_ms.append((time.perf_counter() - begin) * 1e3)
    return median(times_ms[WARM:]), output.logits.copy()


if __name__ == "__main__":
    sys.exit(main())
