"""Tiny checkpoints, and the GGUF files that llama.cpp's converter makes of them.

tests/data/converted.json holds what the converter made (`tests.reference.make_converted`):
metadata, names, and a checksum of each tensor. `convert` does here what it does there;
`write_converted` checks that the outcome is the same, byte for byte, so that tests need neither
torch nor llama.cpp.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.support.small_checkpoints import (
    add_byte_vocabulary,
    add_setting,
    add_tensor,
    interleave,
    write_directory,
)

DATA = Path(__file__).parent.parent / "data" / "converted.json"
CONVERTED: dict[str, dict[str, Any]] = json.loads(DATA.read_text()) if DATA.is_file() else {}
LAYER = re.compile(r"\.(\d+)\.")
Weights = dict[str, NDArray[np.float32]]

INTERLEAVED = {"llama", "mistral3", "smollm3", "granite", "granitemoe", "olmo", "arcee"}
PLUS_ONE = {"gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next"}


def made_weight(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Make a weight of its name: numbers that every machine computes alike."""
    count = math.prod(shape)
    codes = (np.arange(count, dtype=np.uint64) * 2654435761 + zlib.crc32(name.encode())) % (1 << 32)
    codes = ((codes ^ (codes >> np.uint64(15))) * 2246822519) % (1 << 32) >> np.uint64(16)
    values = codes.astype(np.float32) / 32768 - 1  # −1 … 1, in steps of 2⁻¹⁵
    if len(shape) == 1:
        return values / 4 + (1 if "norm" in name and name.endswith("weight") else 0)
    return (values * 2.0 ** (1 - round(math.log2(shape[-1]) / 2))).reshape(shape)


def made_weights(shapes: Mapping[str, Any], layers: int) -> Weights:
    """Make all weights; {} in a name stands for each layer."""
    names = {
        name.format(i): tuple(shape)
        for name, shape in shapes.items()
        for i in (range(layers) if "{}" in name else [0])
    }
    return {name: made_weight(name, shape) for name, shape in names.items()}


def by_layer(weights: Mapping[str, Any], prefix: str, layers: int) -> dict[str, Any]:
    """Collapse the layers of names: {} stands for each, if all have the name with this value."""
    number = re.compile(rf"^({re.escape(prefix)})\d+\.")
    results: dict[str, Any] = {}
    for name in reversed(list(weights)):
        whole = number.sub(r"\g<1>{}.", name)
        values = [weights.get(whole.format(i)) for i in range(layers)]
        results[whole if values == [weights[name]] * layers else name] = weights[name]
    return results


def checksums(weights: Mapping[str, NDArray[np.float32]]) -> dict[str, Any]:
    """Return shape and checksum of each tensor; {} in a name stands for all layers."""
    results: dict[str, Any] = {}
    for name in sorted(weights, key=lambda name: [int(n) for n in LAYER.findall(name)]):
        whole = re.sub(r"^blk\.\d+\.", "blk.{}.", name)
        value = np.ascontiguousarray(weights[name], np.float32)
        value = value.round(5) if name.endswith("ssm_a") else value  # exponentials
        sum_before = results.get(whole, [0, 0])[1]
        results[whole] = [list(value.shape), zlib.crc32(value.tobytes(), sum_before)]
    return results


# --- what the converter does ---------------------------------------------------------------------


def convert(weights: Weights, config: Mapping[str, Any], architecture: str) -> Weights:
    """Make GGUF's tensors of a checkpoint's, as conversion/*.py does."""
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, layers)
    results: Weights = {}
    for name, value in CHANGES.get(architecture, lambda weights, _: weights)(
        weights, config
    ).items():
        norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
        if architecture in PLUS_ONE and norm:
            value = value + np.float32(1)
        if architecture in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads"]
            kv_heads = config.get("num_key_value_heads") or heads
            value = interleave(value, heads if ".q_proj." in name else kv_heads)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        for ending, other in NAMED.items():
            if name.endswith(ending):
                stored = f"blk.{LAYER.findall(name)[0]}.{other}"
        assert stored is not None, name
        results[stored] = value
    return results


def _stacked(weights: Weights, _: Any) -> Weights:
    """Stack the experts of a layer."""
    results: Weights = {}
    experts: dict[str, dict[int, NDArray[np.float32]]] = {}
    for name, value in weights.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if match:
            whole = f"{match[1]}.{match[3]}"
            # what the converters of Mixtral and LFM2 MoE call them
            whole = whole.replace("model.layers", "layers").replace(
                "block_sparse_moe", "feed_forward"
            ) if re.search(r"\.w\d\.", whole) else whole  # fmt: skip
            experts.setdefault(whole, {})[int(match[2])] = value
        else:
            results[name] = value
    return results | {
        name: np.stack([each[i] for i in sorted(each)]) for name, each in experts.items()
    }


def _granite_experts(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """Split the rows of gate and up, of all experts and of the shared one."""
    results: Weights = {}
    for name, value in weights.items():
        if name.endswith("input_linear.weight"):
            half = value.shape[-2] // 2
            shared = "shared_mlp" in name
            base = name.replace("shared_mlp.input_linear.weight", "mlp.shared_expert.").replace(
                "block_sparse_moe.input_linear.weight", "mlp.experts."
            )
            parts = ("gate_proj", "up_proj")
            rows = value[..., :half, :], value[..., half:, :]
            assert shared == (value.ndim == 2)
            results |= {f"{base}{p}.weight": r for p, r in zip(parts, rows, strict=True)}
        elif name.endswith("shared_mlp.output_linear.weight"):
            results[name.replace("shared_mlp.output_linear", "mlp.shared_expert.down_proj")] = value
        else:
            results[name] = value
    return results


def _gpt_oss(weights: Weights, _: Any) -> Weights:
    results: Weights = {}
    for name, value in weights.items():
        if name.endswith("gate_up_proj_bias"):
            for i, part in enumerate(("gate_proj", "up_proj")):
                results[name.replace("gate_up_proj_bias", f"{part}.bias")] = value[..., i::2]
        elif name.endswith("gate_up_proj"):
            for i, part in enumerate(("gate_proj", "up_proj")):
                results[name.replace("gate_up_proj", f"{part}.weight")] = value.swapaxes(1, 2)[
                    :, i::2
                ]
        elif name.endswith("down_proj_bias"):
            results[name.replace("_bias", ".bias")] = value
        elif name.endswith("down_proj"):
            results[f"{name}.weight"] = value.swapaxes(1, 2)
        else:
            results[f"{name}.weight" if name.endswith("sinks") else name] = value
    return results


def _gpt2(weights: Weights, _: Any) -> Weights:
    linear = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return {name: value.T if name.endswith(linear) else value for name, value in weights.items()}


def _gpt_neox(weights: Weights, config: Mapping[str, Any]) -> Weights:
    results: Weights = {}
    for name, value in weights.items():
        if "query_key_value" in name:
            heads = value.reshape(config["num_attention_heads"], 3, -1, *value.shape[1:])
            value = heads.swapaxes(0, 1).reshape(value.shape)
        results[name] = value
    return results


def _linear_attention(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """Change Qwen3-Next's weights: experts, rates, convolutions, fused projections."""
    groups, each = config["linear_num_key_heads"], config["linear_value_head_dim"]
    each *= config["linear_num_value_heads"] // groups
    sizes = np.cumsum([config["linear_key_head_dim"]] * 2 + [each])
    results: Weights = {}
    for name, value in _stacked(weights, config).items():
        if name.endswith(".A_log"):
            value = -np.exp(value.astype(np.float64)).astype(np.float32)
        name = name.replace(".dt_bias", ".dt_proj.bias")
        value = value[:, 0] if "conv1d" in name else value
        if "in_proj_qkvz" in name:
            parts = np.split(value.reshape(groups, -1, value.shape[1]), sizes, axis=1)
            q, k, v, z = (part.reshape(-1, value.shape[1]) for part in parts)
            results[name.replace("qkvz", "qkv")] = np.concatenate([q, k, v])
            results[name.replace("qkvz", "z")] = z
        else:
            results[name] = value
    return results


def _qwen35(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """Order the heads of values by their number within the group of a key head."""
    groups, dim = config["linear_num_key_heads"], config["linear_value_head_dim"]
    heads = config["linear_num_value_heads"]

    def tiled(value: NDArray[np.float32], width: int) -> NDArray[np.float32]:
        first, rest = np.split(value, [len(value) - heads * width])
        split = rest.reshape(groups, heads // groups, width, *value.shape[1:])
        return np.concatenate([first, split.swapaxes(0, 1).reshape(rest.shape)])

    results: Weights = {}
    for name, value in _linear_attention(weights, config).items():
        if "linear_attn" in name and "out_proj" in name:
            value = tiled(value.T, dim).T
        elif "linear_attn" in name and ".norm." not in name:
            small = ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_proj.bias")
            value = tiled(value, 1 if name.endswith(small) else dim)
        results[name] = value
    return results


def _lfm2(weights: Weights, config: Mapping[str, Any]) -> Weights:
    return {
        name.replace("expert_bias", "expert_bias.bias"): value[:, 0]
        if "conv.conv" in name
        else value
        for name, value in _stacked(weights, config).items()
    }


def _gemma4(weights: Weights, _: Any) -> Weights:
    ends = ("layer_scalar", "experts.gate_up_proj", "experts.down_proj")
    return {f"{name}.weight" if name.endswith(ends) else name: weights[name] for name in weights}


CHANGES: dict[str, Callable[[Weights, Mapping[str, Any]], Weights]] = {
    "llama": _stacked,
    "qwen2moe": _stacked,
    "qwen3moe": _stacked,
    "olmoe": _stacked,
    "granitemoe": _granite_experts,
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "gptneox": _gpt_neox,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "qwen3next": _linear_attention,
    "gemma4": _gemma4,
}
# Tensors that the converter names itself.
NAMED = {
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}


# --- files ---------------------------------------------------------------------------------------


def write_checkpoint(path: Path, family: str) -> Path:
    """Write the Hugging Face directory that the converter had."""
    made = CONVERTED[family]
    return write_directory(
        path, made["config"], weights=made_weights(made["stored"], made["layers"])
    )


def write_converted(
    path: Path,
    family: str,
    *,
    say: Mapping[str, Any] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    more: Mapping[str, NDArray[np.float32] | None] | None = None,
) -> Path:
    """Write the GGUF file that the converter made of it; `say`: other metadata, None = without.

    kind: the type of matrices. more: other tensors, None = without.
    """
    made = CONVERTED[family]
    architecture = made["architecture"]
    weights = convert(made_weights(made["stored"], made["layers"]), made["config"], architecture)
    assert checksums(weights) == made["tensors"]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (made["metadata"] | dict(say or {})).items():
        if value is not None:
            add_setting(writer, f"{architecture}.{key}", value)
    add_byte_vocabulary(writer)
    extra = {name: np.array(values, np.float32) for name, values in made["extra"].items()}
    for name, value in (weights | extra | dict(more or {})).items():
        if value is not None:
            whole = "norm" not in name and value.shape[-1] % 32 == 0
            add_tensor(writer, name, value, kind if whole else gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
