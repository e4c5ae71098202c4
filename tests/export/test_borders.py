"""Where a graph can be cut is found in the graph itself; what cannot be cut is refused."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

from pilotfish.export.borders import Dependencies
from pilotfish.export.export_errors import ExportError
from pilotfish.export.stage_graphs import StageGraphs

LAYERS = [
    ("Embed", ["input_ids"], ["x0"]),
    ("Norm", ["x0"], ["h0"]),
    ("Keep", ["past.0.key", "h0"], ["present.0.key"]),
    ("Keep", ["past.0.value", "h0"], ["present.0.value"]),
    ("Attend", ["h0", "present.0.key", "present.0.value", "position_ids"], ["a0"]),
    ("Add", ["x0", "a0"], ["x1"]),
    ("Norm", ["x1"], ["h1"]),
    ("Keep", ["past.1.key", "h1"], ["present.1.key"]),
    ("Keep", ["past.1.value", "h1"], ["present.1.value"]),
    ("Attend", ["h1", "present.1.key", "present.1.value", "position_ids"], ["a1"]),
    ("Add", ["x1", "a1"], ["x2"]),
    ("Gather", ["x2", "logit_rows"], ["rows"]),
    ("Product", ["rows"], ["product"]),
    ("Identity", ["rows"], ["hidden_states"]),
    ("Identity", ["product"], ["logits"]),
]


def sketch(*changes: tuple[int, str, list[str], list[str]]) -> Any:
    """A graph of two layers, of which some nodes are others."""
    nodes = dict(enumerate(LAYERS)) | {at: node for at, *node in changes}
    made = [onnx.helper.make_node(*node) for _, node in sorted(nodes.items())]
    caches = [f"past.{layer}.{what}" for layer in range(2) for what in ("key", "value")]
    names = ["input_ids", "position_ids", "logit_rows", *caches]
    inputs = [onnx.helper.make_tensor_value_info(name, 1, ["T"]) for name in names]
    outs = [name.replace("past", "present") for name in caches] + ["hidden_states", "logits"]
    outputs = [onnx.helper.make_tensor_value_info(name, 1, ["T", 4]) for name in outs]
    inner = [onnx.helper.make_tensor_value_info(name, 1, ["T", 4]) for name in ("x1", "rows")]
    return onnx.helper.make_graph(made, "sketch", inputs, outputs, value_info=inner)


def test_the_residual_stream_is_found_without_names() -> None:
    flow = Dependencies(sketch())
    assert flow.borders(2) == ["x1"]
    assert flow.head_border() == "rows"
    assert flow.subgraph(["x1"], []).inputs == {"input_ids", "position_ids", *caches_of(0)}
    assert flow.subgraph(["rows"], ["x1"]).inputs == {"position_ids", "logit_rows", *caches_of(1)}


def caches_of(layer: int) -> set[str]:
    return {f"past.{layer}.key", f"past.{layer}.value"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # tokens are looked at once more; an early value is used late; a cache is written late
        ((9, "Attend", ["h1", "present.1.key", "present.1.value", "input_ids"], ["a1"]), "cut be"),
        ((9, "Attend", ["h1", "present.1.key", "present.1.value", "h0"], ["a1"]), "cut before"),
        ((9, "Attend", ["h1", "present.1.key", "present.0.key", "x1"], ["a1"]), "cut before"),
        ((7, "Keep", ["past.0.key", "h1"], ["present.1.key"]), "layers 1–1 .* read past.0.key"),
        ((13, "Negate", ["rows"], ["hidden_states"]), "but only a copy"),
        ((12, "Product", ["rows", "x2"], ["product"]), "further values besides hidden_states"),
    ],
)
def test_other_graphs_are_refused(
    change: tuple[int, str, list[str], list[str]], words: str
) -> None:
    with pytest.raises(ExportError, match=words):
        last_stage_and_head(sketch(change))


def last_stage_and_head(graph: Any) -> None:
    made = StageGraphs(onnx.helper.make_model(graph), 2)
    made.head()
    made.stage(1, 1)


def test_a_cache_that_is_written_late_is_refused() -> None:
    first = [("Late", ["past.0.value", "x1"], ["present.0.value"])]
    without = ("Attend", ["h0", "present.0.key", "position_ids"], ["a0"])
    nodes = [*LAYERS[:3], without, *LAYERS[5:6], *LAYERS[6:7], *first, *LAYERS[7:]]
    graph = sketch()
    del graph.node[:]
    graph.node.extend(onnx.helper.make_node(*node) for node in nodes)
    with pytest.raises(ExportError, match="cut before layer 1"):
        Dependencies(graph).borders(2)
