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
from pilotfish.export.sources.huggingface import DirectorySource, open_directory
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
HIDDEN, INNER, COUNT = LLAMA["hidden_size"], LLAMA["intermediate_size"], 3


def weights_of(config: Mapping[str, Any]) -> dict[str, Floats]:
    """Make the weights of a mixture, by the names that its class gives them."""
    rng = np.random.default_rng(4)
    kind, inner = config["model_type"], config.get("moe_intermediate_size", INNER)
    results = {k: v for k, v in tiny_weights(config).items() if ".mlp." not in k}
    fields: dict[str, tuple[int, ...]] = {}
    if kind == "qwen3_moe":
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
    return open_directory(str(path), lambda *_: None)


def test_experts_of_their_own_are_renamed(tmp_path: Path) -> None:
    weights = weights_of(MIXTRAL)
    source = opened(tmp_path, MIXTRAL, weights)
    for theirs, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        np.testing.assert_array_equal(
            source.tensor(f"model.layers.1.mlp.experts.2.{ours}.weight"),
            weights[f"model.layers.1.block_sparse_moe.experts.2.{theirs}.weight"],
        )


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_stacked_experts_are_taken_one_by_one(tmp_path: Path, dtype: str) -> None:
    weights = weights_of(GRANITE)
    write_directory(tmp_path, GRANITE, weights=weights, dtype=dtype)
    source = open_directory(str(tmp_path), lambda *_: None)
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
    source = open_directory(str(in_blocks(tmp_path)), lambda *_: None)
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
        open_directory(str(in_blocks(tmp_path, **change)), lambda *_: None)


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
        (QWEN, {"use_sliding_window": True}, "only False is supported"),
        (QWEN, {"n_group": 2}, "keys: .*n_group"),
        (QWEN, {"quantization_config": {"quant_method": "mxfp4"}}, "is quantised"),
        (GPT_OSS, {"quantization_config": {"quant_method": "hqq"}}, "hqq"),
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
