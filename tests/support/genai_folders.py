"""Tiny models in folders as ONNX Runtime GenAI's model builder writes them, without the builder.

The graph is that of our own contrib dialect, with the inputs and outputs of the builder's (0.18):
token ids and mask of [batch, sequence], the lengths computed from the mask, windows as attributes
of GroupQueryAttention, answers for all tokens. So both engines have the same weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime.capi.onnxruntime_pybind11_state as native
import pytest
from onnx import TensorProto, helper, numpy_helper

from pilotfish.engines.artifact import Artifact
from pilotfish.export.model import export_model
from tests.support.tiny import TEMPLATE, tiny_artifact, tiny_config

# Attributes of the builder's that this onnxruntime's GroupQueryAttention knows.
KNOWN = {
    name
    for each in native.get_all_operator_schema()
    if each.name == "GroupQueryAttention"
    for name in each.attributes
}
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "cohere")


def genai_artifact(path: Path, **how: Any) -> Artifact:
    """Export a tiny model from such a folder, which lies beside `path`; see `genai_folder`."""
    folder = genai_folder(path.with_name(f"{path.name}-folder"), **how)
    return export_model(str(folder), path, dialect="genai")


def genai_folder(
    folder: Path, *, hidden_states: bool = False, architecture: str = "llama", **how: Any
) -> Path:
    """Write a folder; `how` is that of `tiny_artifact`, whose artifact lies beside it."""
    ours = tiny_artifact(
        folder.with_name(f"{folder.name}-ours"),
        architecture=architecture,
        **{"dialect": "contrib", **how},
    )
    folder.mkdir(parents=True, exist_ok=True)
    selection = {each: how[each] for each in how if each in type(tiny_config()).__struct_fields__}
    windows = [
        tiny_config(architecture, **selection).layer(layer).window or -1
        for layer in range(ours.manifest.layers)
    ]
    if max(windows) > 0 and "sliding_window_cache" not in KNOWN:
        pytest.skip("this onnxruntime does not run the builder's windows")
    model = onnx.load(ours.graph_path, load_external_data=False)
    as_builder_writes(model.graph, windows, hidden_states=hidden_states)
    onnx.save(model, folder / "model.onnx")
    os.link(ours.path / "model.onnx.data", folder / "model.onnx.data")
    (folder / "tokenizer.json").write_bytes(ours.tokenizer_path.read_bytes())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    inputs = {value.name for value in model.graph.input}
    config = describe(ours, architecture, windows, inputs)
    (folder / "genai_config.json").write_text(json.dumps(config, indent=4))
    return folder


def describe(
    ours: Artifact, architecture: str, windows: list[int], inputs: set[str]
) -> dict[str, Any]:
    """Make the content of genai_config.json."""
    manifest, sizes = ours.manifest, ours.manifest.dimensions
    rows = ("input_ids", "attention_mask", "position_ids")
    decoder: dict[str, Any] = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": "model.onnx",
        "head_size": sizes.head_dim,
        "hidden_size": sizes.hidden,
        "inputs": {name: name for name in rows if name in inputs}
        | {f"past_{what}_names": f"past_key_values.%d.{what}" for what in ("key", "value")},
        "outputs": {"logits": "logits"}
        | {f"present_{what}_names": f"present.%d.{what}" for what in ("key", "value")},
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
    }
    local = [layer for layer, window in enumerate(windows) if window > 0]
    if local:
        decoder["sliding_window"] = {
            "window_size": windows[local[0]],
            "slide_key_value_cache": False,
            "slide_inputs": False,
            "layers": local,
            "cache_slack": 0,
        }
    return {
        "model": {
            "bos_token_id": None,
            "context_length": sizes.context,
            "decoder": decoder,
            "eos_token_id": manifest.eos_ids[0],
            "pad_token_id": manifest.eos_ids[0],
            "type": architecture,
            "vocab_size": manifest.padded_vocab_size,
        },
        "search": {"max_length": sizes.context, "past_present_share_buffer": True},
    }


def change(folder: Path, changes: Mapping[str, Any]) -> None:
    """Change values of genai_config.json's `model.decoder`, or of `model`, by their keys."""
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        section = config["model"]
        (section["decoder"] if key in section["decoder"] or key not in section else section)[
            key
        ] = value
    path.write_text(json.dumps(config))


def as_builder_writes(graph: Any, windows: list[int], *, hidden_states: bool) -> None:
    """Give a graph of the contrib dialect the builder's inputs and outputs, in place."""
    layer = 0
    for node in graph.node:
        for names in (node.input, node.output):
            for at, name in enumerate(names):
                names[at] = _RENAMED.get(name, name).replace("past.", "past_key_values.")
        if node.op_type == "GroupQueryAttention":
            node.input[9] = node.input[10] = ""  # positions follow the lengths; no bias
            node.attribute.append(helper.make_attribute("local_window_size", windows[layer]))
            if windows[layer] > 0:
                node.attribute.append(helper.make_attribute("sliding_window_cache", 1))
            layer += 1
        elif "logit_rows" in node.input:
            node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output))
    before, after, constants = _ends(hidden_states=hidden_states)
    nodes = [*before, *graph.node, *after]
    graph.initializer.extend(constants)
    answers = [node.output[0] for node in after]
    present = [value for value in graph.output if value.name.startswith("present.")]
    nodes = _alive(nodes, {*answers, *(value.name for value in present)})
    read = {name for node in nodes for name in node.input}
    past = [value for value in graph.input if value.name.startswith("past.")]
    width = {value.name: value.type.tensor_type.shape.dim[-1].dim_value for value in graph.output}
    for value in (*past, *present):
        heads = value.type.tensor_type.shape.dim[1].dim_value
        length = "past_sequence_length" if value in past else "total_sequence_length"
        value.name = value.name.replace("past.", "past_key_values.")
        value.CopyFrom(_value(value.name, TensorProto.FLOAT, [heads, length, "kv_cache_dim"]))
    rows = [
        _value(name, TensorProto.INT64, [length]) for name, length in _ROWS.items() if name in read
    ]
    outputs = [
        _value(name, TensorProto.FLOAT, ["sequence_length", width[name]]) for name in answers
    ]
    for field, values in (
        ("node", nodes), ("input", [*rows, *past]), ("output", [*outputs, *present]),
    ):  # fmt: skip
        copies = [type(value).FromString(value.SerializeToString()) for value in values]
        graph.ClearField(field)
        getattr(graph, field).extend(copies)


_RENAMED = {
    "input_ids": "ids", "position_ids": "positions", "logits": "row_logits",
    "hidden_states": "row_states",
}  # fmt: skip
_ROWS = {
    "input_ids": "sequence_length",
    "attention_mask": "total_sequence_length",
    "position_ids": "sequence_length",
}


def _ends(*, hidden_states: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """Make the nodes before and behind the layers, and their constants."""
    numbers = {"one": np.array([1]), "second": np.array(1), "flat": np.array([-1])}
    constants = [
        numpy_helper.from_array(value.astype(np.int64), f"builder.{name}")
        for name, value in {**numbers, "first": np.array([0])}.items()
    ]
    node = helper.make_node
    before = [
        node("Reshape", ["input_ids", "builder.flat"], ["ids"]),
        node("Reshape", ["position_ids", "builder.flat"], ["positions"]),
        node("ReduceSum", ["attention_mask", "builder.one"], ["sums"], keepdims=0),
        node("Sub", ["sums", "builder.one"], ["ends"]),
        node("Cast", ["ends"], ["seqlens_k"], to=TensorProto.INT32),
        node("Shape", ["attention_mask"], ["mask_shape"]),
        node("Gather", ["mask_shape", "builder.second"], ["total"], axis=0),
        node("Cast", ["total"], ["total_sequence_length"], to=TensorProto.INT32),
    ]
    after = [node("Unsqueeze", ["row_logits", "builder.first"], ["logits"])]
    if hidden_states:
        after.append(node("Unsqueeze", ["row_states", "builder.first"], ["hidden_states"]))
    return before, after, constants


def _alive(nodes: list[Any], wanted: set[str]) -> list[Any]:
    """Return the nodes that something wanted is computed from."""
    remaining = []
    for node in reversed(nodes):
        if wanted & {*node.output}:
            remaining.append(node)
            wanted |= {*node.input} - {""}
    return remaining[::-1]


def _value(name: str, kind: int, shape: list[Any]) -> Any:
    return helper.make_tensor_value_info(name, kind, ["batch_size", *shape])
