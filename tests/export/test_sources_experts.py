"""Where the weights of a mixture of experts come from, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from pilotfish.export.export_errors import ExportError
from pilotfish.export.parts import Experts
from pilotfish.export.sources.huggingface import DirectorySource
from tests.support.configs import read_config
from tests.support.small_checkpoints import LLAMA, tiny_weights, write_directory

Floats = NDArray[np.float32]
MIXTRAL: dict[str, Any] = LLAMA | {
    "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
GRANITE = MIXTRAL | {"model_type": "granitemoe"}
QWEN = LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 8,
    "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
GPT_OSS = MIXTRAL | {
    "model_type": "gpt_oss", "head_dim": 8, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
# Routers with a bias for the choice of experts.
GLM = LLAMA | {
    "model_type": "glm4_moe", "n_routed_experts": 3, "num_experts_per_tok": 2, "head_dim": 8,
    "moe_intermediate_size": 32, "first_k_dense_replace": 0, "num_nextn_predict_layers": 2,
}  # fmt: skip
ERNIE = LLAMA | {
    "model_type": "ernie4_5_moe", "moe_num_experts": 3, "moe_k": 2, "moe_layer_start_index": 0,
    "moe_num_shared_experts": 1, "moe_intermediate_size": 32, "tie_word_embeddings": False,
}  # fmt: skip
EXAONE = LLAMA | {
    "model_type": "exaone_moe", "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 8,
    "moe_intermediate_size": 32, "mlp_layer_types": ["sparse"] * 2, "sliding_window": 16,
}  # fmt: skip
MINIMAX = MIXTRAL | {"model_type": "minimax_m2", "head_dim": 8, "rotary_dim": 4}
QWEN_VL = QWEN | {"model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 48}
CHOICE_BIASES: dict[str, tuple[str, tuple[int, ...]]] = {
    "glm4_moe": ("mlp.gate.e_score_correction_bias", (3,)),
    "ernie4_5_moe": ("mlp.moe_statics.e_score_correction_bias", (1, 3)),
    "exaone_moe": ("mlp.e_score_correction_bias", (3,)),
}
EXTRA = {
    "glm4_moe": ("model.layers.2.eh_proj.weight", "model.layers.3.shared_head.norm.weight"),
    "ernie4_5_moe": ("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight"),
    "exaone_moe": ("mtp.layers.0.mlp.gate.weight",),
}
# As published, without keys for training.
GLM_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408,
    "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
    "topk_group": 1, "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
# K-EXAONE's settings, with four layers.
K_EXAONE: dict[str, Any] = {
    "architectures": ["ExaoneMoEForCausalLM"], "first_last_k_dense_replace": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 18432,
    "is_moe_layer": [False, True, True, True],
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "max_position_embeddings": 262144, "model_type": "exaone_moe", "moe_intermediate_size": 2048,
    "n_group": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 4, "num_key_value_heads": 8,
    "num_shared_experts": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "sliding_window": 128,
    "sliding_window_pattern": "LLLG", "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "vocab_size": 153600,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "expand": 2, "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": False,
    "max_position_embeddings": 262144, "mlp_bias": False, "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h", "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52,
    "num_key_value_heads": 2, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": False,
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "ssm_state_size": 128,
    "tie_word_embeddings": False, "topk_group": 1, "use_bias": False, "use_conv_bias": True,
    "vocab_size": 131072,
}  # fmt: skip
HIDDEN, INNER, COUNT = LLAMA["hidden_size"], LLAMA["intermediate_size"], 3


def weights_of(config: Mapping[str, Any]) -> dict[str, Floats]:
    """Make the weights of a mixture, by the names that its class gives them."""
    rng = np.random.default_rng(4)
    kind, inner = config["model_type"], config.get("moe_intermediate_size", INNER)
    results = {k: v for k, v in tiny_weights(config).items() if ".mlp." not in k}
    fields: dict[str, tuple[int, ...]] = {}
    if kind in CHOICE_BIASES:
        name, shape = CHOICE_BIASES[kind]
        fields[name] = shape
        fields |= {
            f"mlp.shared_experts.{part}_proj.weight": (HIDDEN, inner)[
                :: 1 if part == "down" else -1
            ]
            for part in ("gate", "up", "down")
        }
    if kind in {"qwen3_moe", "exaone_moe", "qwen3_vl_moe_text"}:
        fields |= {f"self_attn.{name}_norm.weight": (8,) for name in "qk"}
    if kind == "granitemoe":
        fields |= {
            "block_sparse_moe.router.layer.weight": (COUNT, HIDDEN),
            "block_sparse_moe.input_linear.weight": (COUNT, 2 * inner, HIDDEN),
            "block_sparse_moe.output_linear.weight": (COUNT, HIDDEN, inner),
        }
    elif kind == "gpt_oss":
        fields |= {
            **{f"self_attn.{name}_proj.bias": (rows,) for name, rows in
               (("q", HIDDEN), ("k", 16), ("v", 16), ("o", HIDDEN))},
            "self_attn.sinks": (4,),
            "mlp.router.weight": (COUNT, HIDDEN),
            "mlp.router.bias": (COUNT,),
            "mlp.experts.gate_up_proj": (COUNT, HIDDEN, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (COUNT, 2 * inner),
            "mlp.experts.down_proj": (COUNT, inner, HIDDEN),
            "mlp.experts.down_proj_bias": (COUNT, HIDDEN),
        }  # fmt: skip
    else:
        mixtral = kind == "mixtral"
        block = "block_sparse_moe" if mixtral else "mlp"
        parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        fields[f"{block}.gate.weight"] = (COUNT, HIDDEN)
        for j in range(COUNT):
            shapes = ((inner, HIDDEN), (inner, HIDDEN), (HIDDEN, inner))
            fields |= {
                f"{block}.experts.{j}.{part}.weight": shape
                for part, shape in zip(parts, shapes, strict=True)
            }
    for layer in range(config["num_hidden_layers"]):
        results |= {
            f"model.layers.{layer}.{name}": rng.standard_normal(shape, np.float32)
            for name, shape in fields.items()
        }
    return results


def opened(path: Path, config: Mapping[str, Any], weights: Mapping[str, Floats]) -> DirectorySource:
    write_directory(path, config, weights=weights)
    return DirectorySource(path, lambda *_: None)


def test_experts_of_their_own_are_renamed(tmp_path: Path) -> None:
    weights = weights_of(MIXTRAL)
    source = opened(tmp_path, MIXTRAL, weights)
    for theirs, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        np.testing.assert_array_equal(
            source.tensor(f"model.layers.1.mlp.experts.2.{ours}.weight"),
            weights[f"model.layers.1.block_sparse_moe.experts.2.{theirs}.weight"],
        )


@pytest.mark.parametrize("config", [GLM, ERNIE, EXAONE])
def test_a_bias_of_the_choice_is_read_and_further_tokens_are_left_out(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    weights = weights_of(config)
    extra = EXTRA[config["model_type"]]
    source = opened(tmp_path, config, weights | {name: np.ones(2, np.float32) for name in extra})
    name, _ = CHOICE_BIASES[config["model_type"]]
    np.testing.assert_array_equal(
        source.tensor("model.layers.1.mlp.expert_bias"),
        weights[f"model.layers.1.{name}"].reshape(-1),
    )
    np.testing.assert_array_equal(
        source.tensor("model.layers.0.mlp.shared_expert.up_proj.weight"),
        weights["model.layers.0.mlp.shared_experts.up_proj.weight"],
    )
    left = source.description.left_out
    assert left
    assert all(any(name.startswith(f"{each}.") for each in left) for name in extra)


def test_layers_of_further_tokens_that_no_key_counts_are_refused(tmp_path: Path) -> None:
    weights = weights_of(GLM) | {"model.layers.4.eh_proj.weight": np.ones(2, np.float32)}
    with pytest.raises(ExportError, match=r"layers\.4\.eh_proj.*num_hidden_layers 2"):
        opened(tmp_path, GLM, weights)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_stacked_experts_are_taken_one_by_one(tmp_path: Path, dtype: str) -> None:
    weights = weights_of(GRANITE)
    write_directory(tmp_path, GRANITE, weights=weights, dtype=dtype)
    source = DirectorySource(tmp_path, lambda *_: None)
    both = weights["model.layers.1.block_sparse_moe.input_linear.weight"][2]
    name = "model.layers.1.mlp.experts.2"
    for part, rows in (("gate_proj", both[:INNER]), ("up_proj", both[INNER:])):
        np.testing.assert_allclose(source.tensor(f"{name}.{part}.weight"), rows, rtol=2**-8)


def test_columns_that_take_turns_are_told_apart(tmp_path: Path) -> None:
    weights = weights_of(GPT_OSS)
    source = opened(tmp_path, GPT_OSS, weights)
    stored = "model.layers.0.mlp.experts.gate_up_proj"
    for start, part in enumerate(("gate_proj", "up_proj")):
        name = f"model.layers.0.mlp.experts.1.{part}"
        columns = weights[stored][1][:, start::2]
        np.testing.assert_array_equal(source.tensor(f"{name}.weight"), columns.T)
        np.testing.assert_array_equal(
            source.tensor(f"{name}.bias"), weights[f"{stored}_bias"][1][start::2]
        )
    down = weights["model.layers.0.mlp.experts.down_proj"][2].T
    np.testing.assert_array_equal(
        source.tensor("model.layers.0.mlp.experts.2.down_proj.weight"), down
    )


def in_blocks(path: Path, **shapes: tuple[int, ...]) -> Path:
    """Write a gpt-oss in MXFP4: codes count up, scales are 2⁻², but for `shapes`."""
    config = GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}
    write_directory(path, config, weights=weights_of(GPT_OSS))
    stored = load_file(path / "model.safetensors")
    for layer in range(2):
        for name, rows, width in (
            ("gate_up_proj", 2 * INNER, HIDDEN),
            ("down_proj", HIDDEN, INNER),
        ):
            ours = f"model.layers.{layer}.mlp.experts.{name}"
            del stored[ours]
            blocks = shapes.get("blocks", (COUNT, rows, width // 32, 16))
            scales = shapes.get("scales", (COUNT, rows, width // 32))
            stored[f"{ours}_blocks"] = np.arange(np.prod(blocks), dtype=np.uint8).reshape(blocks)
            stored[f"{ours}_scales"] = np.full(scales, 125, np.uint8)
    save_file(stored, path / "model.safetensors")
    return path


def test_blocks_of_mxfp4_are_read_as_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = DirectorySource(in_blocks(tmp_path), lambda *_: None)
    assert "MXFP4" in caplog.text
    row = source.tensor("model.layers.0.mlp.experts.0.up_proj.weight")[0]
    # Row 1 of the stored ones, whose bytes are 16 to 31: the low halves count, the high ones are 1.
    positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    np.testing.assert_array_equal(row[0::2], np.concatenate([positive, -positive]) / 4)
    np.testing.assert_array_equal(row[1::2], np.full(16, 0.5 / 4))


def test_the_published_configuration_of_gpt_oss_is_read() -> None:
    config = read_config(PUBLISHED, "gpt-oss-20b", "config.json")
    assert config.experts == Experts(
        count=32, chosen=4, width=2880, normed=True, steepness=1.702, lift=1.0, limit=7.0
    )
    assert config.form.sinks
    assert [(kind.window, kind.experts) for kind in config.pattern[:2]] == [
        (128, True), (None, True),
    ]  # fmt: skip


def test_published_routers_with_biases_are_read() -> None:
    air = read_config(GLM_AIR, "GLM-4.5-Air", "config.json")
    assert air.experts == Experts(
        count=128, chosen=8, width=1408, normed=True, scores="sigmoid", biased=True,
        epsilon=1e-20, shared=1408,
    )  # fmt: skip
    assert [layer.experts for layer in air.pattern] == [False] + [True] * 45
    exaone = read_config(K_EXAONE, "K-EXAONE", "config.json")
    assert exaone.experts is not None
    assert (exaone.experts.factor, exaone.experts.shared) == (2.5, 2048)
    assert [layer.experts for layer in exaone.pattern] == [False] + [True] * 3
    nano = read_config(NEMOTRON, "Nemotron-3-Nano", "config.json")
    assert nano.experts is not None
    assert (nano.experts.shared, nano.experts.latent) == (3712, None)
    assert [layer.kind for layer in nano.pattern[:6]] == [
        "space", "none", "space", "none", "space", "attention",
    ]  # fmt: skip
    assert sum(layer.experts for layer in nano.pattern) == 23
    without = NEMOTRON | {"hybrid_override_pattern": "M-M*", "n_routed_experts": 0}
    assert read_config(without, "Nemotron-Nano-2", "config.json").experts is None


# What is refused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scales": (COUNT, 5, 1)}, "not in MXFP4"),
        ({"blocks": (COUNT, 5, 1, 8)}, "not in MXFP4"),
        ({"blocks": (COUNT, 5, 1, 16), "scales": (COUNT, 5, 1)}, "has shape .* requires"),
    ],
)
def test_other_blocks_are_refused(tmp_path: Path, change: Any, words: str) -> None:
    with pytest.raises(ExportError, match=words):
        DirectorySource(in_blocks(tmp_path, **change), lambda *_: None)


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (MIXTRAL, {"num_experts_per_tok": 4}, "num_experts_per_tok is 4, but there are 3 experts"),
        (MIXTRAL, {"num_local_experts": 4}, r"gate\.weight has .*num_local_experts 4 requires"),
        (MIXTRAL, {"num_experts": 4}, "two names of the same key, but have different values"),
        (MIXTRAL, {"intermediate_size": 32}, r"experts\.0\.w1.*intermediate_size 32"),
        (GRANITE, {"num_local_experts": 2}, r"router\.layer.*num_local_experts 2 requires"),
        (GRANITE, {"intermediate_size": 96}, r"input_linear.*intermediate_size 96"),
        (QWEN, {"moe_intermediate_size": 64}, r"experts\.0\.gate.*moe_intermediate_size 64"),
        (QWEN, {"mlp_only_layers": [1]}, r"mlp\.gate_proj"),
        (QWEN, {"decoder_sparse_step": 2}, r"layers\.0\.mlp\.gate_proj"),
        (QWEN, {"mlp_only_layers": ["all"]}, "must be a list of layer numbers"),
        (QWEN, {"attention_chunk_size": 16}, "attention_chunk_size is 16"),
        (QWEN, {"quantization_config": {"quant_method": "mxfp4"}}, "is quantised"),
        (GPT_OSS, {"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        (GLM, {"n_group": 3}, "n_group is 3, but only 1 is supported"),
        (GLM, {"scoring_func": "softmax"}, "scoring_func .* only 'sigmoid' is supported"),
        (GLM, {"n_shared_experts": 2}, r"moe_intermediate_size · n_shared_experts = 64 requires"),
        (GLM, {"first_k_dense_replace": 1}, r"lacks .*layers\.0\.mlp\.gate_proj"),
        (ERNIE, {"moe_gate_act": "sigmoid"}, "moe_gate_act is 'sigmoid', but only"),
        (ERNIE, {"moe_layer_interval": 2}, r"lacks .*layers\.0\.mlp\.gate_proj"),
        (EXAONE, {"mlp_layer_types": ["dense", "sparse"]}, r"lacks .*layers\.0\.mlp\.gate_proj"),
        (EXAONE, {"mlp_layer_types": ["sparse"]}, "for each of 2 layers"),
        (QWEN, {"model_type": "deepseek_v3"}, "this mixture-of-experts model is not supported"),
    ],
)  # fmt: skip
def test_a_mixture_that_does_not_fit_is_refused(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    opened(tmp_path / "right", config, weights_of(config))
    with pytest.raises(ExportError, match=words):
        opened(tmp_path / "wrong", config | change, weights_of(config))


def test_an_expert_too_many_or_too_few_is_refused(tmp_path: Path) -> None:
    weights = weights_of(MIXTRAL)
    name = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
    more = weights | {name.format(3): weights[name.format(2)]}
    with pytest.raises(ExportError, match=r"experts\.3\.w2.*contradicts num_local_experts 3"):
        opened(tmp_path / "more", MIXTRAL, more)
    fewer = {key: value for key, value in weights.items() if key != name.format(1)}
    with pytest.raises(ExportError, match=r"lacks .*experts\.1\.w2.*num_local_experts 3 requires"):
        opened(tmp_path / "fewer", MIXTRAL, fewer)
    stacked = weights_of(GRANITE)
    name = "model.layers.1.block_sparse_moe.output_linear.weight"
    with pytest.raises(ExportError, match=r"lacks .*output_linear.*num_local_experts 3 requires"):
        opened(tmp_path / "stacked", GRANITE, stacked | {name: stacked[name][:2]})


@pytest.mark.parametrize("published", [True, False])
def test_stacked_experts_of_qwen3_vl_may_be_transposed(tmp_path: Path, published: bool) -> None:
    others = {name: each for name, each in weights_of(QWEN_VL).items() if "experts" not in name}
    rng = np.random.default_rng(6)
    stored: dict[str, Floats] = {}
    for layer in range(2):
        both = rng.standard_normal((COUNT, 96, HIDDEN), np.float32)
        down = rng.standard_normal((COUNT, HIDDEN, 48), np.float32)
        prefix = f"model.layers.{layer}.mlp.experts."
        stored |= {f"{prefix}gate_up_proj": both, f"{prefix}down_proj": down}
    written = {
        name: np.ascontiguousarray(each.transpose(0, 2, 1)) if published else each
        for name, each in stored.items()
    }
    source = opened(tmp_path / "m", QWEN_VL, others | written)
    prefix = "model.layers.1.mlp.experts."
    both, down = stored[f"{prefix}gate_up_proj"][2], stored[f"{prefix}down_proj"][2]
    for part, wanted in (("gate", both[:48]), ("up", both[48:]), ("down", down)):
        np.testing.assert_array_equal(source.tensor(f"{prefix}2.{part}_proj.weight"), wanted)
    square = {name: np.zeros((COUNT, HIDDEN, HIDDEN), np.float32) for name in stored}
    with pytest.raises(ExportError, match=r"the square tensor .* does not show which"):
        opened(tmp_path / "square", QWEN_VL | {"moe_intermediate_size": HIDDEN}, others | square)


@pytest.mark.parametrize(
    ("keys", "pairs"),
    [
        ({}, 2),
        ({"rotary_dim": None}, 4),
        ({"partial_rotary_factor": 0.25}, 1),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 2),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}, 3),
    ],
)
def test_minimax_rotates_as_many_channels_as_its_file_states(
    keys: dict[str, Any], pairs: int
) -> None:
    rope = read_config(MINIMAX | keys, "m", "config.json").pattern[0].rope
    assert rope is not None
    assert len(rope.frequencies) == pairs


@pytest.mark.parametrize(
    "change",
    [{"scoring_func": "softmax"}, {"use_routing_bias": False}, {"qk_norm_type": "per_head"},
     {"shared_intermediate_size": 64}, {"use_qk_norm": False}],
)  # fmt: skip
def test_other_forms_of_minimax_are_refused(change: dict[str, Any]) -> None:
    [key] = change
    with pytest.raises(ExportError, match=f"{key} is .*, but only"):
        read_config(MINIMAX | change, "m", "config.json")
