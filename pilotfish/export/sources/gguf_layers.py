"""Translate the settings of a GGUF file that depend on the layer, or that count layers.

In: the file's keys, and the names and shapes of its weights. Out: Llama's keys → values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pilotfish.engines.manifest import MOST_LAYERS
from pilotfish.export.architectures import Architecture
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.fields import Fields
from pilotfish.export.sources.gguf_file import GgufFile
from pilotfish.export.sources.layer_pattern import FULL
from pilotfish.export.weights import TOKEN_TABLE

Weights = Mapping[str, tuple[int, ...]]
KV_HEADS, WIDTHS = "attention.head_count_kv", "feed_forward_length"
KINDS, SHARED = "attention.recurrent_layers", "attention.shared_kv_layers"
# Llama's keys that this module sets → GGUF's keys, the first that a file has, for errors.
LAYER_KEYS = {
    "layer_types": (KINDS, KV_HEADS),
    "per_layer_config": (KV_HEADS,),
    "linear_value_head_dim": ("ssm.inner_size",),
}
HEAD_LAYERS = "nextn_predict_layers"
# Sizes of linear attention, which llama.cpp requires.
LINEAR = ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank")


def count_layers(file: GgufFile, name: str) -> int:
    """Return the number of layers of the model, without its multi-token-prediction head.

    The layers of this head come last, and `block_count` counts them.

    Raises:
        ExportError: if there are no others.
    """
    stated = {key: file.metadata.get(f"{name}.{key}") for key in ("block_count", HEAD_LAYERS)}
    fields = Fields(stated, str(file.path), f"{name}.")
    layers, head = fields.count("block_count"), fields.get(HEAD_LAYERS, int, null=0)
    whole = head == 0 or any(tensor.startswith("blk.0.") for tensor in file.tensors)
    if not whole or not 0 <= head < layers:
        raise ExportError(
            f"{file.path} has only the multi-token-prediction head of a model "
            f"({name}.{HEAD_LAYERS} {head}): give the file that has the model's layers"
        )
    return layers - head


def layer_number(tensor: str) -> int:
    """Return the layer of a tensor; −1 for a tensor outside the layers."""
    match = re.match(r"blk\.(\d+)\.", tensor)
    return -1 if match is None else int(match[1])


def read_layers(
    fields: Fields, architecture: Architecture, layers: int, weights: Weights
) -> dict[str, Any]:
    """Return the keys of a class with recurrent layers, or with heads that differ between layers.

    Raises:
        ExportError: if a key is missing, or describes layers that the class does not have.
    """
    if "linear_conv_kernel_dim" in architecture.keys:
        return _linear_attention(fields, architecture, layers)
    if "conv_L_cache" in architecture.keys:
        return _short_convolutions(fields, layers)
    if architecture.global_heads:
        return _global_heads(fields, layers, weights)
    return {}


def _linear_attention(fields: Fields, architecture: Architecture, layers: int) -> dict[str, Any]:
    """Read Qwen3.5's keys; for text its rotary sections have no effect if they name each pair."""
    for key in LINEAR:
        fields.count(key)
    inner, heads = fields.count("ssm.inner_size"), fields.count("ssm.time_step_rank")
    if inner % heads:
        raise fields.error(
            f"{fields.prefix}ssm.inner_size {inner} is not a multiple of "
            f"{fields.prefix}ssm.time_step_rank {heads}"
        )
    values: dict[str, Any] = {"linear_value_head_dim": inner // heads}
    key, pairs = "rope.dimension_sections", fields.count("rope.dimension_count") // 2
    sections = [n for n in fields.items(key) or [pairs] * 3 if isinstance(n, int)]
    if len(sections) < 3 or any(i >= 3 * sections[i % 3] for i in range(min(pairs, 1024))):
        raise fields.error(
            f"{fields.prefix}{key} {sections} does not name each of the {pairs} rotated pairs"
        )
    if (kinds := fields.items(KINDS)) is not None:
        recurrent = next(iter(architecture.states))
        values["layer_types"] = [recurrent if each else FULL for each in kinds[:layers]]
    return values


def _short_convolutions(fields: Fields, layers: int) -> dict[str, Any]:
    """Read LFM2's keys: layers without key heads are convolutions."""
    fields.count("shortconv.l_cache")
    values: dict[str, Any] = {"block_auto_adjust_ff_dim": False}
    if isinstance(counts := fields.values.get(KV_HEADS), list):
        fields.mark_read(KV_HEADS)
        values["num_key_value_heads"] = _only(fields, [count for count in counts if count])
        values["layer_types"] = [FULL if count else "conv" for count in counts]
    return values


def _global_heads(fields: Fields, layers: int, weights: Weights) -> dict[str, Any]:
    """Read Gemma 4's keys: sizes of heads and widths per layer, and values that equal keys."""
    fields.count("attention.sliding_window")
    local, width = fields.count("attention.key_length_swa"), fields.count("attention.key_length")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if fields.count(key) != local:
            raise fields.error(
                f"{fields.prefix}{key} differs from {fields.prefix}attention.key_length_swa {local}"
            )
    sliding = fields.items("attention.sliding_window_pattern") or []
    shared = fields.get(SHARED, int, 0)
    counts, widths = (_each(fields, key, len(sliding)) for key in (KV_HEADS, WIDTHS))
    full = [i for i, each in enumerate(sliding) if not each]
    own = [i for i in full if i < layers - shared]
    values: dict[str, Any] = {
        "num_key_value_heads": _only(fields, [n for i, n in enumerate(counts) if i not in full]),
        "per_layer_config": {
            str(i): {"head_dim": width, "num_key_value_heads": counts[i]} for i in full
        },
        "attention_k_eq_v": any(
            f"model.layers.{i}.self_attn.v_proj.weight" not in weights for i in own
        ),
        "intermediate_size": widths[0] if widths else None,
    }
    if TOKEN_TABLE in weights:
        values["vocab_size_per_layer_input"] = weights[TOKEN_TABLE][0]
    if len({*widths}) > 1:
        doubled = [2 * widths[0] if i >= layers - shared else widths[0] for i in range(layers)]
        if widths != doubled:
            raise fields.error(
                f"{fields.prefix}{WIDTHS} must be the same in all layers, or twice as much in "
                f"the {shared} layers that share keys and values"
            )
        values["use_double_wide_mlp"] = True
    return values


def _each(fields: Fields, key: str, layers: int) -> list[int]:
    """Return a count for each layer, of which the file may state a single one."""
    stated = fields.values.get(key)
    if not isinstance(stated, list):
        return [fields.count(key)] * min(layers, MOST_LAYERS)
    each = fields.items(key) or []
    numbers = [Fields({key: n}, fields.where, fields.prefix).count(key) for n in each]
    if len(numbers) != layers:
        raise fields.error(
            f"{fields.prefix}{key} names {len(numbers)} layers, but there are {layers}"
        )
    return numbers


def _only(fields: Fields, counts: list[Any]) -> Any:
    """Return the number of key heads that all of the layers have."""
    if not counts or any(count != counts[0] for count in counts):
        raise fields.error(
            f"{fields.prefix}{KV_HEADS} must be the same in all layers of a type, but is "
            f"{sorted({*map(str, counts)})}"
        )
    return counts[0]
