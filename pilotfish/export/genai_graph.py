"""What a graph of ONNX Runtime GenAI's model builder holds, as far as running it must know.

In: its folder and its `genai_config.json`. Out: its files and form, and up to which position it is
right. Weights are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto

from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.genai.genai_config import GenaiConfig, GraphForm, Port, Ports, check_graph
from pilotfish.export.export_errors import ExportError

MOST_BYTES = 2**31  # of a graph: more is no protobuf message
_ATTENTION = "GroupQueryAttention"  # may read and write one buffer of keys and values
_KINDS: dict[int, str] = {
    TensorProto.INT64: "int64",
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
}


@dataclass(frozen=True)
class GenaiGraph:
    """A graph that can be run.

    Attributes:
        files: names of the graph and of the files with its weights, in the folder.
        form: what it takes and gives.
        opset: of ONNX's own operators.
        window: positions that a token of some layer sees, which the graph sees to; None if all.
        context: positions up to which it is right.
        reason: why these are fewer than genai_config.json says; empty if they are not.
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
        ExportError: if it is damaged, contradicts the configuration, or cannot be run here.
    """
    name = config.model.decoder.filename
    path = folder / name
    if Path(name).name != name or not path.is_file():
        raise ExportError(f"{folder} lacks the graph {name!r} that its genai_config.json names")
    if path.stat().st_size > MOST_BYTES:
        raise ExportError(f"{path} is too large to be a graph")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises foreign classes
        raise ExportError(f"{path} is no ONNX graph: {error}") from None
    graph = model.graph
    try:
        form = check_graph(config, _ports(graph.input), _ports(graph.output))
    except ArtifactError as error:
        raise ExportError(f"{path}: {error}") from None
    windows = _windows(path, graph, config)
    context, reason = _context(path, graph, config, windows)
    versions = {opset.version for opset in model.opset_import if opset.domain in {"", "ai.onnx"}}
    if len(versions) != 1:
        raise ExportError(f"{path} does not say one version of ONNX's operators")
    return GenaiGraph(
        files=[name, *_data_files(folder, graph)],
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
    """Return the window that each layer's attention keeps to in the graph, 0 for none."""
    layer_of = {name: at // 2 for at, name in enumerate(config.planes("past"))}
    windows: dict[int, int] = {}
    for node in graph.node:
        if node.op_type == _ATTENTION:
            window = max(_int_attribute(node, "local_window_size", -1), 0)
            windows |= {layer_of[name]: window for name in node.input if name in layer_of}
    layers = config.model.decoder.num_hidden_layers
    if len(windows) < layers:
        raise ExportError(
            f"{path} has layers without {_ATTENTION}, which alone is run here: build it in fp32 or "
            "int4 (the builder's fp16 for the CPU has none, that for CUDA does), or export the "
            "checkpoint itself"
        )
    return [windows[layer] for layer in range(layers)]


def _context(
    path: Path, graph: GraphProto, config: GenaiConfig, windows: list[int]
) -> tuple[int, str]:
    """Return up to which position the graph is right, and why that is not all of them."""
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
                f"genai_config.json tells of a window of {sliding.window_size} tokens, which the "
                "graph does not keep to"
            )
    for node in _nodes(graph):
        if node.op_type in {"Loop", "Scan"}:
            raise ExportError(f"{path} has a {node.op_type}, of which nothing is known here")
        if node.op_type != "If":
            continue
        limit = _branch_length(graph, node)
        if limit is None:
            raise ExportError(f"{path} branches (If) by something that is not known here")
        if limit < context:
            context = limit
            reason = (
                "behind them it takes other rotary factors for new tokens, and keeps the old keys"
            )
    if context < 2:
        raise ExportError(f"{path} is right for {context} positions alone")
    return context, reason


def _branch_length(graph: GraphProto, node: NodeProto) -> int | None:
    """Return the number of tokens above which an If takes its first branch; None if unknown."""
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
    """Return the names of the files with weights; each must be there."""
    names = set()
    for tensor in _tensors(graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in tensor.external_data}.get("location", "")
            names.add(place)
    for name in sorted(names):
        if not name or Path(name).name != name:
            raise ExportError(f"{folder}: the graph's weights lie outside of the folder ({name!r})")
        if not (folder / name).is_file():
            raise ExportError(f"{folder} lacks {name}, in which its graph has weights")
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
