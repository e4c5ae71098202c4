"""Inspect a graph of ONNX Runtime GenAI's model builder.

In: the graph's folder and `genai_config.json`. Out: the graph's files, inputs and outputs, and the
context (positions) up to which it computes correctly. Of the weights, only float ones are read, to
check that they are finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto

from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.genai.genai_config import GenaiConfig, GraphForm, Port, Ports, check_graph
from pilotfish.export.checked_weights import check_tensors
from pilotfish.export.export_errors import ExportError

MOST_BYTES = 2**31  # maximum size of a graph file (bytes): the limit of a protobuf message
_ATTENTION = "GroupQueryAttention"  # the operator that can update keys and values in place
_KINDS: dict[int, str] = {
    TensorProto.INT64: "int64",
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
}


@dataclass(frozen=True)
class GenaiGraph:
    """A graph that the engine can run.

    Attributes:
        files: names of the graph file and its weight files, within the folder.
        form: inputs and outputs.
        opset: opset version of ONNX's standard operators.
        window: smallest attention window in the graph, positions; None if the graph has no windows.
        context: number of positions up to which the graph computes correctly.
        reason: reason why `context` is less than stated in genai_config.json; "" if it is equal.
    """

    files: list[str]
    form: GraphForm
    opset: int
    window: int | None
    context: int
    reason: str


def read_graph(folder: Path, config: GenaiConfig) -> GenaiGraph:
    """Read and check a folder's graph.

    Raises:
        ExportError: if the graph is damaged, contradicts the configuration, or cannot be run.
    """
    name = config.model.decoder.filename
    path = folder / name
    if Path(name).name != name or not path.is_file():
        raise ExportError(f"{folder} lacks the graph {name!r}, which its genai_config.json names")
    if path.stat().st_size > MOST_BYTES:
        raise ExportError(f"{path} is too large to be a graph")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises several error classes
        raise ExportError(f"{path} is not an ONNX graph: {error}") from None
    graph = model.graph
    try:
        form = check_graph(config, _ports(graph.input), _ports(graph.output))
    except ArtifactError as error:
        raise ExportError(f"{path}: {error}") from None
    windows = _windows(path, graph, config)
    context, reason = _context(path, graph, config, windows)
    versions = {opset.version for opset in model.opset_import if opset.domain in {"", "ai.onnx"}}
    if len(versions) != 1:
        raise ExportError(f"{path} does not state exactly one version of ONNX's operators")
    files = [name, *_data_files(folder, graph)]
    check_tensors(_tensors(graph), folder)
    return GenaiGraph(
        files=files,
        form=form,
        opset=versions.pop(),
        window=min((window for window in windows if window), default=None),
        context=context,
        reason=reason,
    )


def _ports(values: Iterable[ValueInfoProto]) -> Ports:
    ports = {}
    for value in values:
        tensor = value.type.tensor_type
        shape = tuple(
            size.dim_value if size.HasField("dim_value") else size.dim_param or None
            for size in tensor.shape.dim
        )
        ports[value.name] = Port(_KINDS.get(tensor.elem_type, f"type {tensor.elem_type}"), shape)
    return ports


def _windows(path: Path, graph: GraphProto, config: GenaiConfig) -> list[int]:
    """Return the attention window of each layer in the graph, positions; 0 for no window."""
    layer_of = {name: at // 2 for at, name in enumerate(config.planes("past"))}
    windows: dict[int, int] = {}
    for node in graph.node:
        if node.op_type == _ATTENTION:
            window = max(_int_attribute(node, "local_window_size", -1), 0)
            windows |= {layer_of[name]: window for name in node.input if name in layer_of}
    layers = config.model.decoder.num_hidden_layers
    if len(windows) < layers:
        raise ExportError(
            f"{path} has layers without {_ATTENTION}, the only supported attention: build the "
            "graph in fp32 or int4, or in fp16 for CUDA (the builder's fp16 for the CPU lacks "
            "the operator), or export the original checkpoint"
        )
    return [windows[layer] for layer in range(layers)]


def _context(
    path: Path, graph: GraphProto, config: GenaiConfig, windows: list[int]
) -> tuple[int, str]:
    """Return the context up to which the graph computes correctly, and the reason for a limit."""
    context, reason = config.model.context_length, ""
    sliding = config.model.decoder.sliding_window
    if sliding is not None and sliding.window_size > 0:
        layers = sliding.layers or range(len(windows))
        followed = all(
            0 <= layer < len(windows) and windows[layer] == sliding.window_size for layer in layers
        )
        if not followed and sliding.window_size < context:
            context = max(sliding.window_size, 2)
            reason = (
                f"genai_config.json states a window of {sliding.window_size} tokens, which the "
                "graph does not implement"
            )
    for node in _nodes(graph):
        if node.op_type in {"Loop", "Scan"}:
            raise ExportError(f"{path} has a {node.op_type} operator, which is not supported")
        if node.op_type != "If":
            continue
        limit = _branch_length(graph, node)
        if limit is None:
            raise ExportError(f"{path} has an If operator whose condition is not supported")
        if limit < context:
            context = limit
            reason = (
                "beyond this number the graph uses other rotary factors for new tokens, but "
                "keeps old keys"
            )
    if context < 2:
        raise ExportError(f"{path} is correct only for {context} positions")
    return context, reason


def _branch_length(graph: GraphProto, node: NodeProto) -> int | None:
    """Return the number of tokens above which node If takes its first branch; None if unknown."""
    producers = {output: other for other in graph.node for output in other.output}
    condition = producers.get(node.input[0])
    if condition is None or condition.op_type != "Greater" or len(condition.input) != 2:
        return None
    constants = {tensor.name: tensor for tensor in graph.initializer}
    source = producers.get(condition.input[1])
    tensor = constants.get(condition.input[1])
    if source is not None and source.op_type == "Constant":
        tensor = next((each.t for each in source.attribute if each.name == "value"), None)
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
        return None
    value = onnx.numpy_helper.to_array(tensor)
    return int(value.reshape(-1)[0]) if value.size == 1 and value.dtype.kind == "i" else None


def _data_files(folder: Path, graph: GraphProto) -> list[str]:
    """Return the names of the graph's weight files; raise if a file is missing."""
    names = set()
    for tensor in _tensors(graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in tensor.external_data}.get("location", "")
            names.add(place)
    for name in sorted(names):
        if not name or Path(name).name != name:
            raise ExportError(f"{folder}: the graph's weights are outside the folder ({name!r})")
        if not (folder / name).is_file():
            raise ExportError(f"{folder} lacks {name}, a weight file of its graph")
    return sorted(names)


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for inner in _graphs(node):
            yield from _nodes(inner)


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in _nodes(graph):
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors
        for inner in _graphs(node):
            yield from inner.initializer


def _graphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _int_attribute(node: NodeProto, name: str, default: int) -> int:
    return next((each.i for each in node.attribute if each.name == name), default)
