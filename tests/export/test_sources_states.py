"""Configurations and weights of models whose layers keep states, as files have them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pilotfish.export.export_errors import ExportError
from pilotfish.export.model_config import Layer
from pilotfish.export.parts import Recurrence, StateSpace
from pilotfish.export.sources import open_source
from pilotfish.export.sources.huggingface import describe_directory
from pilotfish.export.weight_recorder import shapes
from tests.support.configs import read_config
from tests.support.small_checkpoints import LLAMA, VOCAB, tokenizer_json

SIZES = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
GRANITE: dict[str, Any] = SIZES | {
    "model_type": "granitemoehybrid", "num_hidden_layers": 3, "num_local_experts": 4,
    "num_experts_per_tok": 2, "intermediate_size": 32, "shared_intermediate_size": 64,
    "layer_types": ["mamba", "mamba", "attention"], "position_embedding_type": "nope",
    "mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_d_state": 16, "mamba_n_groups": 2,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "rope_scaling": None,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-", "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
}  # fmt: skip
NEXT: dict[str, Any] = LLAMA | {
    "model_type": "qwen3_next", "num_hidden_layers": 1, "layer_types": ["linear_attention"],
    "head_dim": 8, "partial_rotary_factor": 0.5, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 4, "linear_value_head_dim": 5,
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip


def read(values: dict[str, Any], **changes: Any) -> Any:
    return read_config(values | changes, "tiny", "config.json")


def test_state_spaces_are_read() -> None:
    config = read(GRANITE)
    assert config.recurrence == Recurrence(4, 8, 2, 16, 8, StateSpace())
    assert [layer.kind for layer in config.pattern] == ["space", "space", "attention"]
    assert all(layer.experts and layer.has_mlp and layer.rope is None for layer in config.pattern)
    assert config.experts.shared == 64
    dense = read(GRANITE, num_local_experts=0, num_experts_per_tok=0)
    assert (dense.experts, dense.intermediate) == (None, 64)


def test_layers_of_one_part_are_read_in_either_spelling() -> None:
    spelt = read(NEMOTRON)
    kinds = [(layer.kind, layer.has_mlp) for layer in spelt.pattern]
    assert kinds == [("space", False), ("none", True), ("attention", False), ("none", True)]
    assert (spelt.recurrent, spelt.cached) == ([0], [2])
    listed = {key: value for key, value in NEMOTRON.items() if key != "hybrid_override_pattern"}
    types = ["linear_attention", "mlp", "full_attention", "mlp"]
    assert read(listed, layers_block_type=types) == spelt


@pytest.mark.parametrize("infinity", ['{"__float__": "Infinity"}', "Infinity"])
def test_steps_have_limits_as_files_write_them(infinity: str, tmp_path: Path) -> None:
    text = json.dumps(GRANITE | {"time_step_limit": [0.01, "?"]}).replace('"?"', infinity)
    (tmp_path / "config.json").write_text(text)
    config = describe_directory(tmp_path, "tiny", ()).config
    assert config.recurrence is not None
    assert config.recurrence.space == StateSpace(shortest=0.01, longest=math.inf)


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (GRANITE, {"time_step_limit": [2.0, 1.0]}, "impossible bounds of a step, 2.0 to 1.0"),
        (GRANITE, {"time_step_limit": None}, "must be two numbers"),
        (GRANITE, {"mamba_d_head": 16}, "mamba_n_heads 8 × mamba_d_head 16"),
        (GRANITE, {"mamba_n_groups": 3}, "not a multiple of mamba_n_groups 3"),
        (GRANITE, {"mamba_d_conv": 1}, "mamba_d_conv is 1, but only 2 to 16"),
        (GRANITE, {"hidden_act": "gelu"}, "'silu', not"),
        (NEMOTRON, {"mamba_head_dim": 10**9}, "channels, but at most 1048576 are supported"),
        (NEMOTRON, {"hybrid_override_pattern": "MXM*"}, "layers of type 'X' are not supported"),
        (NEMOTRON, {"layers_block_type": ["mlp"]}, "differ: remove one"),
        (NEMOTRON, {"hybrid_override_pattern": ""}, "which lists the layers"),
        (NEMOTRON, {"mamba_hidden_act": "gelu"}, "'silu', not"),
    ],
)
def test_what_contradicts_itself_is_refused(
    values: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        read(values, **changes)


def test_rows_of_a_key_head_are_taken_apart(tmp_path: Path) -> None:
    """Qwen3-Next: each key head has its query, key, values, gates in a row; mtp is left out."""
    recurrence = read(NEXT).recurrence
    random = np.random.default_rng(0)
    ours = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in shapes(read(NEXT)).items()
    }
    linear = "model.layers.0.linear_attn.in_proj"
    qkv, z, b, a = (ours.pop(f"{linear}_{part}.weight") for part in ("qkv", "z", "b", "a"))
    q, k, v = np.split(qkv, [recurrence.keys, 2 * recurrence.keys])
    stored = {name.replace("mlp.router", "mlp.gate"): array for name, array in ours.items()}
    stored[f"{linear}_qkvz.weight"] = by_key_head([q, k, v, z], recurrence.key_heads)
    stored[f"{linear}_ba.weight"] = by_key_head([b, a], recurrence.key_heads)
    stored["mtp.norm.weight"] = np.ones(32, np.float32)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(NEXT))
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    source = open_source(str(tmp_path))
    assert source.description.left_out == ["mtp"]
    wanted = {"qkv": qkv, "z": z, "b": b, "a": a}
    for part, array in wanted.items():
        np.testing.assert_array_equal(source.tensor(f"{linear}_{part}.weight"), array)
    cut = load_file(tmp_path / "model.safetensors")
    cut[f"{linear}_ba.weight"] = cut[f"{linear}_ba.weight"][:-1].copy()
    save_file(cut, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match="in_proj_ba"):
        open_source(str(tmp_path))


def by_key_head(parts: list[Any], heads: int) -> Any:
    rows = [part.reshape(heads, -1, part.shape[1]) for part in parts]
    return np.ascontiguousarray(np.concatenate(rows, axis=1).reshape(-1, parts[0].shape[1]))


def test_layers_of_one_part_have_one_norm() -> None:
    config = msgspec.structs.replace(read(NEMOTRON), layers=2)
    norms = [name for name in shapes(config) if "layernorm" in name]
    assert norms == [f"model.layers.{i}.input_layernorm.weight" for i in range(2)]
    assert config.layer(1) == Layer(kind="none")
