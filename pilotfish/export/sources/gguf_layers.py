"""Translate the settings of a GGUF file that depend on the layer, or that count layers.

In: the file's keys, and the names and shapes of its weights. Out: Llama's keys → values. Sizes that
contradict the weights are refused later (`export.sources.weight_check`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pilotfish.engines.manifest import MOST_LAYERS
from pilotfish.export.architectures import Architecture
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.fields import MAX_COUNT, Fields
from pilotfish.export.sources.gguf_file import GgufFile
from pilotfish.export.sources.layer_sizes import FULL
from pilotfish.export.weights import TOKEN_TABLE

HEAD_LAYERS, KINDS = "nextn_predict_layers", "attention.recurrent_layers"
KV_HEADS, WIDTHS = "attention.head_count_kv", "feed_forward_length"
# Llama's keys that this module sets → GGUF's keys, the first that a file has, for errors.
LAYER_KEYS = {
    "layer_types": (KINDS, KV_HEADS),
    "per_layer_config": (KV_HEADS,),
    "linear_value_head_dim": ("ssm.inner_size",),
}


def head_layers(file: GgufFile, name: str) -> range:
    """Return the layers of the multi-token-prediction head; they follow the model's layers.

    `block_count` counts them.

    Raises:
        ExportError: if the file has no others.
    """
    stated = {key: file.metadata.get(f"{name}.{key}") for key in ("block_count", HEAD_LAYERS)}
    fields = Fields(stated, str(file.path), f"{name}.")
    layers, head = fields.count("block_count"), fields.get(HEAD_LAYERS, int, null=0)
    whole = head == 0 or any(layer_number(tensor) == 0 for tensor in file.tensors)
    if not whole or not 0 <= head < layers:
        raise ExportError(
            f"{file.path} has only the multi-token-prediction head of a model "
            f"({name}.{HEAD_LAYERS} {head}): give the file that has the model's layers"
        )
    return range(layers - head, layers)


def layer_number(tensor: str) -> int:
    """Return the layer of a tensor; −1 for a tensor outside the layers."""
    match = re.match(r"blk\.(\d+)\.", tensor)
    return -1 if match is None else int(match[1])


def read_layers(
    fields: Fields, architecture: Architecture, layers: int, weights: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Return the keys of a class with recurrent layers, or with heads that differ between layers.

    Raises:
        ExportError: if a key is missing, or describes layers that the class does not have.
    """
    if "linear_conv_kernel_dim" in architecture.keys:
        return _linear_attention(fields, layers)
    if "conv_L_cache" in architecture.keys:
        return _short_convolutions(fields, layers)
    return _global_heads(fields, layers, weights) if architecture.global_heads else {}


def _linear_attention(fields: Fields, layers: int) -> dict[str, Any]:
    """Read Qwen3.5's keys. Rotary sections that name each pair have no effect on text."""
    inner, heads = fields.count("ssm.inner_size"), fields.count("ssm.time_step_rank")
    if inner % heads:
        raise fields.error(
            f"{fields.prefix}ssm.inner_size {inner} is not a multiple of "
            f"{fields.prefix}ssm.time_step_rank {heads}"
        )
    values: dict[str, Any] = {"linear_value_head_dim": inner // heads}
    key, pairs = "rope.dimension_sections", fields.count("rope.dimension_count") // 2
    sections = _counts(fields, key, 4) if key in fields.values else [pairs] * 3
    # Pair i rotates by position i % 3 of three, if this section has more than i // 3 pairs.
    if any(pairs > 3 * length + i for i, length in enumerate(sections[:3])):
        raise fields.error(
            f"{fields.prefix}{key} {sections} does not name each of the {pairs} rotated pairs"
        )
    if (kinds := fields.items(KINDS)) is not None:
        values["layer_types"] = ["linear_attention" if each else FULL for each in kinds[:layers]]
    return values


def _short_convolutions(fields: Fields, layers: int) -> dict[str, Any]:
    """Read LFM2's keys: layers without key heads are convolutions."""
    counts = _counts(fields, KV_HEADS, layers)
    return {
        "num_key_value_heads": max(counts),
        "layer_types": [FULL if count else "conv" for count in counts],
    }


def _global_heads(
    fields: Fields, layers: int, weights: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Read Gemma 4's keys: sizes of heads and widths per layer, and values that equal keys."""
    fields.count("attention.sliding_window")
    local, width = fields.count("attention.key_length_swa"), fields.count("attention.key_length")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if fields.count(key) != local:
            raise fields.error(
                f"{fields.prefix}{key} differs from {fields.prefix}attention.key_length_swa {local}"
            )
    sliding = fields.items("attention.sliding_window_pattern")
    if not sliding:
        raise fields.error(f"{fields.prefix}attention.sliding_window_pattern is missing")
    kv_heads, widths = (_counts(fields, key, len(sliding)) for key in (KV_HEADS, WIDTHS))
    values: dict[str, Any] = {
        "per_layer_config": {
            str(i): {"head_dim": local if sliding[i] else width, "num_key_value_heads": kv_heads[i]}
            for i in range(len(sliding))
        },
        "num_key_value_heads": kv_heads[0],
        "intermediate_size": widths[0],
        "use_double_wide_mlp": len({*widths}) > 1,
        "attention_k_eq_v": any(
            name.endswith(".k_proj.weight") and name.replace(".k_", ".v_") not in weights
            for name in weights
        ),
    }
    if TOKEN_TABLE in weights:
        values["vocab_size_per_layer_input"] = weights[TOKEN_TABLE][0]
    return values


def _counts(fields: Fields, key: str, length: int) -> list[int]:
    """Return a list of numbers from 0, of which the file may state a single one."""
    stated = fields.values.get(key)
    fields.mark_read(key)
    counts = stated if isinstance(stated, list) else [stated] * min(length, MOST_LAYERS)
    known = [n for n in counts if type(n) is int]
    if len(known) != length or not all(0 <= n <= MAX_COUNT for n in known):
        raise fields.error(f"{fields.prefix}{key} must be a number, or a list of {length} numbers")
    return known
