"""A configuration and weights that contradict each other are refused before anything is written."""

from __future__ import annotations

import io
import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.export.architectures import ARCHITECTURES
from pilotfish.export.dialects.contrib import Contrib
from pilotfish.export.dialects.opset24 import Opset24
from pilotfish.export.export_errors import ExportError
from pilotfish.export.graph import GraphWriter
from pilotfish.export.model import export_model
from pilotfish.export.network import write_network
from pilotfish.export.sources import open_source
from pilotfish.export.sources.config_keys import FIELDS
from pilotfish.export.sources.recurrence_keys import SPACE
from pilotfish.export.sources.tensor_names import stored_name
from pilotfish.export.sources.weight_check import FileSettings, check_weights, grown
from pilotfish.export.weight_recorder import shapes
from pilotfish.export.weights import TOKEN_TABLE
from tests.support.small_checkpoints import LLAMA, tiny_weights, write_directory, write_gguf
from tests.support.tiny import FAMILIES, SHARING, STATEFUL, RandomSource, tiny_config

QWEN2 = LLAMA | {"model_type": "qwen2"}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 16}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": None}
OPT: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 264,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LAYER = "model.layers.0."


def opt_weights() -> dict[str, Any]:
    config = tiny_config("opt", vocab_size=264, hidden=32, intermediate=64, context=128, head_dim=8)
    names = ARCHITECTURES["opt"].names
    return {
        stored_name(names, name): np.ones(shape, np.float32)
        for name, shape in shapes(config).items()
    }


def refusal(source: Path, out: Path) -> str:
    """What the export says; it must leave nothing behind."""
    with pytest.raises(ExportError) as caught:
        export_model(str(source), out)
    assert not out.exists()
    assert not list(out.parent.glob(".*partial*"))
    return str(caught.value)


# What is true of the weights, what config.json says instead, and the key and tensor to be named.
CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (LLAMA, {"hidden_size": 48}, "hidden_size 48", "model.embed_tokens.weight"),
    (LLAMA, {"hidden_size": 16}, "hidden_size 16", "model.embed_tokens.weight"),
    (LLAMA, {"intermediate_size": 80}, "intermediate_size 80", f"{LAYER}mlp.gate_proj.weight"),
    (LLAMA, {"intermediate_size": 32}, "intermediate_size 32", f"{LAYER}mlp.gate_proj.weight"),
    (LLAMA, {"num_attention_heads": 2}, "num_attention_heads = 16", "k_proj.weight"),
    (LLAMA, {"num_attention_heads": 8}, "num_attention_heads = 4", "k_proj.weight"),
    (QWEN3, {"num_attention_heads": 2}, "num_attention_heads 2 × head_dim 16", "q_proj.weight"),
    (LLAMA, {"num_key_value_heads": 4}, "num_key_value_heads 4", f"{LAYER}self_attn.k_proj.weight"),
    (LLAMA, {"num_key_value_heads": 1}, "num_key_value_heads 1", f"{LAYER}self_attn.k_proj.weight"),
    (LLAMA, {"num_key_value_heads": None}, "num_key_value_heads (by default) 4", "k_proj.weight"),
    (LLAMA, {"head_dim": 16}, "num_attention_heads 4 × head_dim 16", "q_proj.weight"),
    (QWEN3, {"head_dim": 8}, "num_attention_heads 4 × head_dim 8", "q_proj.weight"),
    (LLAMA, {"vocab_size": 300}, "vocab_size 300", "model.embed_tokens.weight"),
    (LLAMA, {"vocab_size": 261}, "vocab_size 261", "model.embed_tokens.weight"),
    (LLAMA, {"num_hidden_layers": 3}, "num_hidden_layers 3", "model.layers.2.input_layernorm"),
    (LLAMA, {"num_hidden_layers": 1}, "num_hidden_layers 1", "model.layers.1."),
    (LLAMA, {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers 2147", "model.layers.2.input"),
    (LLAMA, {"attention_bias": True}, "attention_bias True", f"{LAYER}self_attn.q_proj.bias"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias True", f"{LAYER}mlp.gate_proj.bias"),
    (LLAMA, {"model_type": "qwen2"}, "model_type qwen2", f"{LAYER}self_attn.q_proj.bias"),
    (QWEN2, {"model_type": "llama"}, "attention_bias False", "_proj.bias"),
    (QWEN3, {"model_type": "mistral", "sliding_window": None}, "model_type mistral", "_norm."),
    (OPT, {"ffn_dim": 80}, "ffn_dim 80", "model.decoder.layers.0.fc1.weight"),
    (OPT, {"max_position_embeddings": 64}, "max_position_embeddings 64", "embed_positions.weight"),
    (OPT, {"word_embed_proj_dim": 16}, "word_embed_proj_dim 16", "embed_tokens.weight"),
    (OPT, {"enable_bias": False}, "enable_bias False", ".bias"),
    (OPT, {"do_layer_norm_before": False}, "do_layer_norm_before False", "final_layer_norm"),
    (OPT, {"tie_word_embeddings": False}, "tie_word_embeddings False", "lm_head.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("true", "options", "key", "tensor"), CONTRADICTIONS)
def test_contradictions_of_a_directory(
    tmp_path: Path, true: dict[str, Any], options: dict[str, Any], key: str, tensor: str
) -> None:
    weights = opt_weights() if true is OPT else tiny_weights(true)
    source = write_directory(tmp_path / "m", true | options, weights=weights)
    info = refusal(source, tmp_path / "out")
    assert key in info
    assert tensor in info


@pytest.mark.parametrize(
    ("true", "options", "key", "tensor"),
    [
        (LLAMA, {"hidden_size": 48}, "embedding_length 48", "token_embd.weight"),
        (LLAMA, {"intermediate_size": 80}, "feed_forward_length 80", "blk.0.ffn_gate.weight"),
        (LLAMA, {"num_attention_heads": 2}, "llama.attention.head_count = 16",
         "blk.0.attn_k.weight"),
        (LLAMA, {"num_key_value_heads": 4}, "attention.head_count_kv 4", "blk.0.attn_k.weight"),
        (QWEN3, {"num_key_value_heads": 1}, "attention.head_count_kv 1", "blk.0.attn_k.weight"),
        (QWEN3, {"head_dim": 8}, "qwen3.attention.key_length 8", "blk.0.attn_q.weight"),
        (LLAMA, {"num_hidden_layers": 3}, "llama.block_count 3", "blk.2.attn_norm.weight"),
        (LLAMA, {"num_hidden_layers": 1}, "llama.block_count 1", "blk.1."),
        (LLAMA, {"vocab_size": 300}, "llama.vocab_size 300", "token_embd.weight"),
    ],
)  # fmt: skip
def test_contradictions_of_a_gguf_file(
    tmp_path: Path, true: dict[str, Any], options: dict[str, Any], key: str, tensor: str
) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        true,
        settings={"{}.vocab_size": (true | options)["vocab_size"]},
        say=options,
    )
    info = refusal(path, tmp_path / "out")
    assert key in info
    assert tensor in info


@pytest.mark.parametrize("family", [*FAMILIES, *SHARING, *STATEFUL])
def test_each_size_that_contradicts_the_weights_is_named(family: str) -> None:
    config = tiny_config(family)
    fields = [*FIELDS, *(f"recurrence.{each}" for each in (*SPACE, "space.rank"))]
    settings = FileSettings({field: f"<{field}>" for field in fields}, {})
    true = shapes(config)
    check_weights(config, true, settings, "the file")
    larger = dict(grown(config, fields))
    assert {"hidden", "layers", "vocab_size", "context"} <= larger.keys()
    for field, other in larger.items():
        if shapes(other) == true:  # the family has no weight of this size
            continue
        with pytest.raises(ExportError) as caught:
            check_weights(other, true, settings, "the file")
        if "has shape" in str(caught.value):
            assert f"<{field}> {attrgetter(field)(other)}" in str(caught.value)
        else:
            assert field in {"layers", "experts.count", "streams.count"}  # further weights


@pytest.mark.parametrize("family", [*FAMILIES, *SHARING, *STATEFUL])
def test_a_graph_reads_each_weight_that_is_recorded(family: str) -> None:
    config = tiny_config(family)
    source = RandomSource(config, 1)
    wanted, read = shapes(config), {}

    class Watched:
        quantized, rows = source.quantized, source.rows

        @staticmethod
        def tensor(name: str) -> Any:
            read[name] = source.tensor(name)
            return read[name]

    for dialect in (Opset24, Contrib):
        read.clear()
        write_network(dialect(GraphWriter(io.BytesIO(), ""), config, Watched, "fp32"), config)
        tables = {TOKEN_TABLE} & wanted.keys()  # read in parts
        assert {name: array.shape for name, array in read.items()} == {
            name: shape for name, shape in wanted.items() if name not in tables
        }


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"model.layers.0.self_attn.sinks": np.ones(4)}, "self_attn.sinks"),
        ({"model.layers.0.self_attn.q_norm.weight": np.ones(8)}, "q_norm.weight"),
        ({"model.layers.0.mlp.gate_proj.weight_scale": np.ones(1)}, "gate_proj.weight_scale"),
        ({"score.weight": np.ones((2, 32))}, "score.weight"),
    ],
)
def test_a_weight_without_use_is_refused(tmp_path: Path, extra: Any, named: str) -> None:
    source = write_directory(tmp_path / "m", weights=tiny_weights(LLAMA) | extra)
    assert named in refusal(source, tmp_path / "out")


def test_a_weight_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    source = write_directory(tmp_path / "m", shards=2)
    first, second = sorted(source.glob("model-*.safetensors"))
    save_file(load_file(second) | {"model.norm.weight": np.ones(32, np.float32)}, second)
    save_file(load_file(first) | {"model.norm.weight": np.zeros(32, np.float32)}, first)
    info = refusal(source, tmp_path / "out")
    assert "model.norm.weight" in info
    assert second.name in info


def test_separate_tensors_of_a_class_whose_files_have_fused_ones_are_refused(
    tmp_path: Path,
) -> None:
    path = write_directory(tmp_path / "m")
    edit = json.loads((path / "config.json").read_text()) | {"model_type": "phi3"}
    (path / "config.json").write_text(json.dumps(edit))
    text = refusal(path, tmp_path / "out")
    assert "is no tensor of this model_type, whose files have mlp.gate_up_proj" in text


def test_a_weight_with_two_prefixes_of_a_multimodal_model_is_refused(tmp_path: Path) -> None:
    name = f"{LAYER}mlp.up_proj.weight"
    weights = {f"language_model.{name}": value for name, value in tiny_weights(LLAMA).items()}
    weights[f"model.language_model.{name.removeprefix('model.')}"] = np.ones((64, 32), np.float32)
    config = {"model_type": "llava", "text_config": LLAMA, "tie_word_embeddings": False}
    path = write_directory(tmp_path / "m", config, weights=weights)
    text = refusal(path, tmp_path / "out")
    assert "stand for the same weight" in text
    assert f"language_model.{name}" in text


def test_a_head_of_its_own_in_a_tied_model_is_refused(tmp_path: Path) -> None:
    tied = LLAMA | {"tie_word_embeddings": True}
    weights = tiny_weights(tied)
    embedding = weights["model.embed_tokens.weight"]
    other = embedding.copy()
    other[-1, -1] += 1  # of a padding row, even
    source = write_directory(tmp_path / "m", tied, weights=weights | {"lm_head.weight": other})
    info = refusal(source, tmp_path / "out")
    assert "tie_word_embeddings" in info
    assert "lm_head.weight" in info
    same = write_directory(
        tmp_path / "same", tied, weights=weights | {"lm_head.weight": embedding}, shards=2
    )
    assert "lm_head.weight" not in open_source(str(same)).names()


def test_qwen3_of_gguf_without_its_norms_is_refused(tmp_path: Path) -> None:
    weights = {name: w for name, w in tiny_weights(QWEN3).items() if "q_norm" not in name}
    info = refusal(write_gguf(tmp_path / "m.gguf", QWEN3, weights=weights), tmp_path / "out")
    assert "blk.0.attn_q_norm.weight" in info


def test_an_end_of_text_that_is_no_token_of_gguf_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", settings={"tokenizer.ggml.eot_token_id": 262})
    info = refusal(path, tmp_path / "out")
    assert "tokenizer.ggml.eot_token_id 262" in info


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # Each class has its own number where the key is absent.
        (MISTRAL | {"num_attention_heads": 16, "head_dim": 8}, {"kv_heads": 8}),
        (QWEN2 | {"num_attention_heads": 64, "head_dim": 8}, {"kv_heads": 32}),
        (QWEN3 | {"num_attention_heads": 32, "head_dim": 8}, {"kv_heads": 32}),
        (LLAMA, {"kv_heads": 4, "head_dim": 8}),
    ],
)
def test_absent_heads_are_the_class_s(
    tmp_path: Path, change: dict[str, Any], expected: dict[str, Any]
) -> None:
    whole = change | {"num_key_value_heads": expected["kv_heads"]}
    absent = {key: value for key, value in change.items() if key != "num_key_value_heads"}
    source = open_source(str(write_directory(tmp_path / "m", absent, weights=tiny_weights(whole))))
    assert {key: getattr(source.config, key) for key in expected} == expected


def test_qwen3_s_heads_are_128_wide_where_the_key_is_absent(tmp_path: Path) -> None:
    absent = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    weights = tiny_weights(QWEN3 | {"head_dim": 128})
    assert (
        open_source(str(write_directory(tmp_path, absent, weights=weights))).config.head_dim == 128
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 7}, "width 7"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"hidden_act": None}, "hidden_act is None"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types names 3 layers"),
        ({"layer_types": "full_attention"}, "must be a list"),
        ({"eos_token_id": 262}, "eos_token_id 262.*260 tokens"),
        ({"eos_token_id": [259, -1]}, "eos_token_id"),
    ],
)
def test_numbers_that_cannot_be(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    source = write_directory(tmp_path / "m", LLAMA | change, weights=tiny_weights(LLAMA))
    with pytest.raises(ExportError, match=named):
        open_source(str(source))
