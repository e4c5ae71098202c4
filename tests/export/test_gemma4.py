"""Gemma 4 and 3n as they are published: what their keys say of each layer, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.model_config import AttentionHeads, ModelConfig
from pilotfish.export.sources.huggingface_config import Description
from pilotfish.export.sources.tensor_names import stored_name
from pilotfish.export.weight_recorder import shapes
from tests.support.configs import read_config
from tests.support.prefill import prefill
from tests.support.small_checkpoints import VOCAB, write_directory

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": [SLIDING, FULL] * 3,
    "max_position_embeddings": 128,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 259,
}
GEMMA3N = {
    **{key: value for key, value in GEMMA4.items() if "global" not in key},
    "model_type": "gemma3n_text",
    "intermediate_size": [64] * 5 + [96],
    "laurel_rank": 32,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
}
for _key in ("attention_k_eq_v", "use_double_wide_mlp", "use_bidirectional_attention"):
    del GEMMA3N[_key]


def read(values: dict[str, Any]) -> ModelConfig:
    return read_config(values, "tiny", "config.json")


def test_what_is_published_and_what_transformers_saves_are_one_model() -> None:
    saved = {key: value for key, value in GEMMA4.items() if "global" not in key}
    fields = {"head_dim": 32, "num_key_value_heads": 1}
    saved["per_layer_config"] = {str(i): fields for i in (1, 3, 5)}
    assert read(saved) == read(GEMMA4)


def test_layers_have_their_own_sizes_and_sources() -> None:
    config = read(GEMMA4)
    assert [config.heads_of(i) for i in (0, 1)] == [
        AttentionHeads(4, 2, 16),
        AttentionHeads(4, 1, 32),
    ]
    kinds = [config.layer(i) for i in range(6)]
    assert [kind.kv_source for kind in kinds] == [None] * 4 + [2, 3]
    assert [kind.intermediate for kind in kinds] == [None] * 4 + [128] * 2
    assert [kind.tied_values for kind in kinds] == [False, True] * 2 + [False] * 2
    assert [kind.window for kind in kinds] == [8, None] * 3
    assert kinds[1].rope is not None
    turning = np.array(kinds[1].rope.frequencies)
    np.testing.assert_allclose(turning[:4], 1e6 ** -(np.arange(4) / 16))
    assert not turning[4:].any()
    assert config.score_scale == 1.0
    third = read(GEMMA3N)
    assert [third.layer(i).intermediate for i in range(6)] == [None] * 5 + [96]
    assert [third.layer(i).sparsity for i in range(6)] == [0.95] * 2 + [0.0] * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": [FULL, SLIDING] * 3}, "last layer"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1"),
        ({"num_global_key_value_heads": 3}, "not a multiple of the number of key heads, 3"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "differs between layers"),
        ({"per_layer_config": {"6": {"head_dim": 32}}}, "names layer '6'"),
        ({"per_layer_config": {"1": {"skip": ["mlp"]}}}, r"per_layer_config\.1\.skip|differs"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0},
                              SLIDING: {"rope_type": "default", "rope_theta": 1e4}}}, "yarn"),
        ({"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 1e6}}}, "no table"),
        ({"top_k_experts": 4}, "top_k_experts"),
        ({"enable_moe_block": True}, "num_experts"),
    ],
)  # fmt: skip
def test_what_no_graph_has_is_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ExportError, match=words) as refusal:
        read(GEMMA4 | changes)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": [64] * 5}, "intermediate_size"),
        ({"activation_sparsity_pattern": [1.0] * 6}, "activation_sparsity_pattern"),
        ({"altup_active_idx": 4}, "altup_active_idx 4"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input"),
    ],
)
def test_of_3n_too(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ExportError, match=words):
        read(GEMMA3N | changes)


@pytest.mark.parametrize("values", [GEMMA4, GEMMA3N], ids=lambda values: values["model_type"])
def test_a_directory_of_it_cut_and_whole(tmp_path: Path, values: dict[str, Any]) -> None:
    described = Description(values, "tiny", "config.json")
    config, names = described.config, described.architecture.names
    rng = np.random.default_rng(1)
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes(config).items()}
    stored = {stored_name(names, name): value / 4 for name, value in drawn.items()}
    source = write_directory(tmp_path / "m", values, weights=stored, dtype="BF16")
    text = np.arange(40) % 200
    exact = prefill(Decoder(export_model(str(source), tmp_path / "fp32")), 0, text, rows=40).logits
    assert exact.std() > 0.01
    rounded = export_model(str(source), tmp_path / "int8", precision="int8")
    logits = prefill(Decoder(rounded), 0, text, rows=40).logits
    assert np.corrcoef(exact.ravel(), logits.ravel())[0, 1] > 0.99
    cut = export_model(str(source), tmp_path / "cut", first_layers=5)
    assert [each.layer for each in cut.manifest.cached] == [0, 1, 2, 3]
    short = msgspec.structs.replace(config, layers=5)
    assert cut.manifest.dimensions.layers == short.layers
    assert np.isfinite(prefill(Decoder(cut), 0, text, rows=1).logits).all()
    unread = (f"model.layers.5.self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm"))
    published = stored | dict.fromkeys(unread, np.full((2, 2), 9, np.float32))
    other = export_model(
        str(write_directory(tmp_path / "p", values, weights=published, dtype="BF16")),
        tmp_path / "published",
    )
    np.testing.assert_array_equal(prefill(Decoder(other), 0, text, rows=40).logits, exact)
    del stored[stored_name(names, "model.layers.3.self_attn.k_proj.weight")]
    write_directory(tmp_path / "n", values, weights=stored)
    with pytest.raises(ExportError, match=r"layers\.3\.self_attn\.k_proj\.weight"):
        export_model(str(tmp_path / "n"), tmp_path / "refused")
