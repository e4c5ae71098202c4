"""A double of NVIDIA's `tensorrt`, of a given version; nothing here ran on a GPU.

It has the published names that our code uses, and none that the version lacks
(`tests/tensorrt_names.json`, from NVIDIA's binding sources). Its engines run the ONNX graph with
ONNX Runtime on the CPU, on the "device memory" of `cudart_double`. Cases that TensorRT leaves
undefined fail here: a tensor written where it is read, except by KVCacheUpdate; unaligned
addresses; shapes outside the profile; a network without its flags. Engines lack the inputs that no
node reads.
"""

from __future__ import annotations

import ctypes
import pickle
import shutil
import sys
import tempfile
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx
import onnxruntime

from tests.support import cudart_double

MAGIC = b"double of a TensorRT plan\n"
TYPES = {1: "FLOAT", 10: "HALF", 6: "INT32", 7: "INT64"}  # of ONNX
NUMPY = {"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32, "INT64": np.int64}
OPSET24_OPERATORS = {"TensorScatter", "RMSNormalization", "RotaryEmbedding"}
_sessions: dict[bytes, onnxruntime.InferenceSession] = {}


def number(version):
    return tuple(int(part) for part in version.split(".")[:2])


def install(monkeypatch, version="10.16", *, gpu=None, **faults):
    """Make `import tensorrt` and libcudart these doubles; returns the module and the GPU."""
    gpu = gpu or cudart_double.Gpu()
    cudart_double.install(monkeypatch, gpu)
    module = tensorrt(version, gpu, **faults)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    return module, gpu


def tensorrt(version, gpu, *, on_build=lambda: None, refuse_plans=False, fail_build=False):
    """Make the module. `on_build` is called while an engine is built."""
    at = number(version)
    trt = ModuleType("tensorrt")
    trt.__version__ = version
    state = SimpleNamespace(builds=0, seen_timing=[], gpu=gpu)
    trt.double = state
    int64 = ["INT64"] if at >= (10, 0) else []
    trt.DataType = IntEnum("DataType", ["FLOAT", "HALF", "INT32", "BOOL", *int64], start=0)
    trt.TensorLocation = IntEnum("TensorLocation", ["DEVICE", "HOST"], start=0)
    fp16 = ["FP16"] if at < (11, 0) else []
    trt.BuilderFlag = IntEnum("BuilderFlag", ["DEBUG", *fp16], start=0)
    creation = ["EXPLICIT_BATCH"] if at < (11, 0) else []
    creation += ["STRONGLY_TYPED"] if at >= (10, 0) else []
    trt.NetworkDefinitionCreationFlag = IntEnum("NetworkDefinitionCreationFlag", creation, start=0)

    class ILogger:
        Severity = IntEnum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE", start=0)

        def __init__(self):
            self.ready = True

    for member in ILogger.Severity:
        setattr(ILogger, member.name, member)

    class IHostMemory(bytes):
        __slots__ = ()

        @property
        def nbytes(self):
            return len(self)

    class Dims(tuple):
        __slots__ = ()

    class ITimingCache:
        def __init__(self, content):
            self._content = content

        def serialize(self):
            return IHostMemory(self._content + b"+")

    class IOptimizationProfile:
        def __init__(self):
            self._shapes = {}

        def set_shape(self, input, min, opt, max):
            if not all(a <= b <= c for a, b, c in zip(min, opt, max, strict=True)):
                raise ValueError("inconsistent shapes")
            self._shapes[input] = (tuple(min), tuple(opt), tuple(max))

    class IBuilderConfig:
        def __init__(self):
            self._flags, self._profiles, self._timing = set(), [], None

        def set_flag(self, flag):
            self._flags.add(trt.BuilderFlag(flag))

        def add_optimization_profile(self, profile):
            self._profiles.append(profile._shapes)
            return len(self._profiles) - 1

        def create_timing_cache(self, serialized_timing_cache):
            return ITimingCache(bytes(serialized_timing_cache))

        def set_timing_cache(self, cache, ignore_mismatch):
            if b"garbage" in cache._content:
                return False
            self._timing = cache
            return True

    class INetworkDefinition:
        def __init__(self, flags):
            self._flags = flags
            self._graph = self._model = None

        def _is(self, name):
            flag = getattr(trt.NetworkDefinitionCreationFlag, name, None)
            return flag is not None and bool(self._flags >> int(flag) & 1)

    class ParserError:
        def __init__(self, words):
            self._words = words

        def desc(self):
            return self._words

    class OnnxParser:
        def __init__(self, network, logger):
            assert logger.ready
            self._network, self._errors = network, []

        @property
        def num_errors(self):
            return len(self._errors)

        def get_error(self, index):
            return ParserError(self._errors[index])

        def supports_operator(self, op_name):
            return op_name not in OPSET24_OPERATORS or at >= (10, 15)

        def parse_from_file(self, model):
            return self.parse(Path(model).read_bytes(), model)

        def parse(self, model, path=None):
            try:
                graph = onnx.load_model_from_string(bytes(model)).graph
            except Exception as error:
                self._errors.append(str(error))
                return False
            static = {each.name: _dims(each) for each in graph.input}
            for node in graph.node:
                if node.domain or not self.supports_operator(node.op_type):
                    self._errors.append(f"No importer registered for op: {node.op_type}")
                elif node.op_type == "TensorScatter" and -1 in static[node.input[0]][2:]:
                    self._errors.append("KVCacheUpdate needs a static sequence length")
            if at < (10, 0) and not self._network._is("EXPLICIT_BATCH"):
                self._errors.append("the network must be created with EXPLICIT_BATCH")
            self._network._graph = (bytes(model), str(path))
            return not self._errors

    class Builder:
        def __init__(self, logger):
            assert logger.ready

        def create_network(self, flags=0):
            assert flags >> len(creation) == 0, "a flag that this version does not have"
            return INetworkDefinition(flags)

        def create_builder_config(self):
            return IBuilderConfig()

        def create_optimization_profile(self):
            return IOptimizationProfile()

        def build_serialized_network(self, network, config):
            state.builds += 1
            state.seen_timing.append(config._timing._content if config._timing else None)
            monitor = getattr(config, "progress_monitor", None)
            if monitor:
                monitor.phase_start("Building", None, 3)
                monitor.phase_start("Tactics", "Building", 1)
                monitor.step_complete("Tactics", 0)
                for step in range(3):
                    if not monitor.step_complete("Building", step):
                        return None
                monitor.phase_finish("Tactics")
                monitor.phase_finish("Building")
            on_build()
            model, path = network._graph
            graph = onnx.load_model_from_string(model).graph
            half = any(each.type.tensor_type.elem_type == 10 for each in graph.input)
            typed = network._is("STRONGLY_TYPED") or (
                fp16 and trt.BuilderFlag.FP16 in config._flags
            )
            if fail_build or (half and not typed) or not config._profiles:
                return None
            for each in graph.input:
                if -1 in _dims(each) and any(each.name not in p for p in config._profiles):
                    return None
            model = _without_idle_inputs(model)
            plan = (version, gpu.name, gpu.compute, model, path, config._profiles)
            return IHostMemory(MAGIC + pickle.dumps(plan) + b"end")

    class ICudaEngine:
        def __init__(self, model, path, profiles):
            graph = onnx.load_model_from_string(model).graph
            self._session = _session(model, path)
            self._profiles = profiles
            self._inputs = [each.name for each in graph.input]
            self._shapes = {e.name: _dims(e) for e in (*graph.input, *graph.output)}
            kinds = {e.name: e.type.tensor_type.elem_type for e in (*graph.input, *graph.output)}
            narrow = {} if int64 else {"INT64": "INT32"}
            self._onnx_types = {name: TYPES[kind] for name, kind in kinds.items()}
            self._types = {name: narrow.get(kind, kind) for name, kind in self._onnx_types.items()}
            self._names = list(self._shapes)
            self._aliases = {
                node.output[0]: node.input[0]
                for node in graph.node
                if node.op_type == "TensorScatter"
            }

        @property
        def num_io_tensors(self):
            return len(self._names)

        def get_tensor_name(self, index):
            return self._names[index]

        def get_tensor_location(self, name):
            assert name in self._shapes
            return trt.TensorLocation.DEVICE

        def get_tensor_dtype(self, name):
            return trt.DataType[self._types[name]]

        def get_tensor_shape(self, name):
            return self._shapes[name]

        def create_execution_context(self):
            return IExecutionContext(self)

    if at >= (10, 15):
        ICudaEngine.get_aliased_input_tensor = lambda self, name: self._aliases.get(name)

    class IExecutionContext:
        def __init__(self, engine):
            self._engine, self._profile = engine, 0
            self._set, self._addresses = {}, {}

        def set_optimization_profile_async(self, profile_index, stream_handle):
            assert stream_handle, "the default stream costs synchronisations"
            self._profile, self._set = profile_index, {}
            return profile_index < len(self._engine._profiles)

        def set_input_shape(self, name, shape):
            if name not in self._engine._inputs:
                return False
            low, _, high = self._engine._profiles[self._profile][name]
            static = self._engine._shapes[name]
            if not all(
                a <= size <= b and fixed in {-1, size}
                for a, size, b, fixed in zip(low, shape, high, static, strict=True)
            ):
                return False
            self._set[name] = tuple(shape)
            return True

        def set_tensor_address(self, name, memory):
            assert type(memory) is int
            assert memory % 256 == 0, f"the address of {name} is not aligned"
            self._addresses[name] = memory
            return name in self._engine._shapes

        def infer_shapes(self):
            return [name for name in self._engine._inputs if name not in self._set]

        def execute_async_v3(self, stream_handle):
            if self.infer_shapes() or set(self._engine._names) - self._addresses.keys():
                return False
            shapes, addresses = dict(self._set), dict(self._addresses)
            gpu.queue.append(lambda: _execute(self._engine, gpu, shapes, addresses))
            return True

    class Runtime:
        def __init__(self, logger):
            assert logger.ready
            self._logger = logger

        def deserialize_cuda_engine(self, serialized_engine):
            data = bytes(serialized_engine)
            if refuse_plans or not (data.startswith(MAGIC) and data.endswith(b"end")):
                self._logger.log(ILogger.ERROR, "the plan is not valid")
                return None
            built, name, compute, *rest = pickle.loads(data[len(MAGIC) :])
            if (built, name, compute) != (version, gpu.name, gpu.compute):
                self._logger.log(ILogger.ERROR, "the plan was built for another TensorRT or GPU")
                return None
            return ICudaEngine(*rest)

    classes = [Dims, ILogger, IHostMemory, ITimingCache, IOptimizationProfile, IBuilderConfig]
    classes += [ParserError, OnnxParser, Builder, ICudaEngine, IExecutionContext, Runtime]
    if at >= (10, 0):

        class IProgressMonitor:
            def __init__(self):
                pass

        classes.append(IProgressMonitor)
    for each in classes:
        setattr(trt, each.__name__, each)
    return trt


def _without_idle_inputs(model):
    """Remove the inputs that no node reads."""
    changed = onnx.load_model_from_string(model)
    read = {name for node in changed.graph.node for name in node.input}
    inputs = [each for each in changed.graph.input if each.name in read]
    if len(inputs) == len(changed.graph.input):
        return model
    del changed.graph.input[:]
    changed.graph.input.extend(inputs)
    return changed.SerializeToString()


def _dims(value):
    """Return the sizes of an ONNX input or output; -1 for named ones."""
    dims = value.type.tensor_type.shape.dim
    return tuple(d.dim_value if d.HasField("dim_value") else -1 for d in dims)


def _session(model, path):
    """Load the graph on the CPU; writes a changed one beside a copy of the weights."""
    if model not in _sessions:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        with tempfile.TemporaryDirectory() as folder:
            for file in Path(path).parent.iterdir():
                shutil.copy(file, folder)  # ONNX Runtime follows no links out of a folder
            copy = Path(folder) / "changed.onnx"
            copy.write_bytes(model)
            _sessions[model] = onnxruntime.InferenceSession(
                str(copy), options, providers=["CPUExecutionProvider"]
            )
    return _sessions[model]


def _execute(engine, gpu, shapes, addresses):
    """Read the inputs, compute, and write the outputs."""
    for present, past in engine._aliases.items():
        assert addresses[present] == addresses[past], f"{present} must be in place"
    feeds = {}
    for name, shape in shapes.items():
        dtype = np.dtype(NUMPY[engine._types[name]])
        size = int(np.prod(shape)) * dtype.itemsize
        array = gpu.view(addresses[name], size).view(dtype).reshape(shape)
        feeds[name] = array.astype(NUMPY[engine._onnx_types[name]])
    names = [name for name in engine._names if name not in engine._inputs]
    reads = {
        (addresses[name], addresses[name] + feed.nbytes)
        for name, feed in feeds.items()
        if name not in engine._aliases.values()
    }
    for name, answer in zip(names, engine._session.run(names, feeds), strict=True):
        begin, end = addresses[name], addresses[name] + answer.nbytes
        for low, high in reads:
            assert end <= low or high <= begin, f"{name} is written where an input is read"
        ctypes.memmove(gpu.view(begin, answer.nbytes).ctypes.data, answer.ctypes.data, end - begin)
