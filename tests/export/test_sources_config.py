"""Configurations as config.json has them: variants that are read, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pilotfish.export.config import ModelConfig
from pilotfish.export.errors import ExportError
from pilotfish.export.sources.huggingface_config import read_config
from tests.support.small_checkpoints import (
    LLAMA,
)

QWEN2 = LLAMA | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32}
OPT = {
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
    "do_layer_norm_before": True,
    "activation_function": "relu",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config_of(values: dict[str, Any]) -> ModelConfig:
    return read_config(values, "tiny", "config.json")


def test_llama3_scaling_is_transformers_rule() -> None:
    values = LLAMA | {"hidden_size": 512, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}
    frequencies = [5e5 ** -(2 * i / 128) for i in range(64)]
    expected = []
    for frequency in frequencies:  # as in transformers, one at a time
        wavelength = 2 * math.pi / frequency
        if wavelength < 64 / 4.0:
            expected.append(frequency)
        elif wavelength > 64 / 1.0:
            expected.append(frequency / 8.0)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    np.testing.assert_allclose(config_of(values).inverse_frequencies(), expected, rtol=1e-12)


def test_rotary_parameters_in_both_forms() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}
    new = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    new |= {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}}
    assert config_of(old) == config_of(new)
    assert config_of(new).rope_theta == 5e5
    older = LLAMA | {"rope_scaling": {"type": "default"}}
    assert config_of(older) == config_of(LLAMA)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"attention_bias": True}, {"attention_bias": True, "output_bias": True}),
        ({"mlp_bias": True}, {"mlp_bias": True}),
        ({"num_key_value_heads": None}, {"kv_heads": 4}),
        ({"head_dim": 64}, {"head_dim": 64}),
        ({"model_type": "mistral", "sliding_window": None}, {"model_type": "mistral"}),
        ({"model_type": "mistral", "sliding_window": 4096}, {"context": 128}),  # covers it all
        ({"model_type": "qwen2"}, {"attention_bias": True, "output_bias": False}),
        ({"model_type": "qwen3", "attention_bias": True}, {"qk_norm": True, "output_bias": True}),
        ({"rms_norm_eps": 1}, {"norm_eps": 1.0}),
        ({"layer_types": ["full_attention"] * 2}, {"layers": 2}),
    ],
)
def test_variants_of_rotary_models(change: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_of(LLAMA | change)
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"pre_norm": True, "final_norm": True, "embedding": None, "tied": True}),
        ({"activation_function": "gelu"}, {"activation": "gelu"}),
        ({"enable_bias": False}, {"mlp_bias": False, "attention_bias": False}),
        (  # opt-350m
            {"do_layer_norm_before": False, "word_embed_proj_dim": 512, "hidden_size": 1024,
             "num_attention_heads": 16},
            {"pre_norm": False, "final_norm": False, "embedding": 512, "head_dim": 64},
        ),
        ({"_remove_final_layer_norm": True}, {"pre_norm": True, "final_norm": False}),
    ],
)  # fmt: skip
def test_variants_of_opt(change: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_of(OPT | change)
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.rope_theta is None
    assert config.position_offset == 2
    with pytest.raises(ValueError, match="no rotary"):
        config.inverse_frequencies()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": "gemma2"}, "architecture 'gemma2'"),
        ({}, "architecture ''"),
        ({"model_type": "mixtral", "num_local_experts": 8}, r"mixture-of-experts.*mixtral"),
        ({"model_type": "qwen2_moe"}, "mixture-of-experts"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, "awq"),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "'linear'"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "between layers"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "part of the head"),
        (LLAMA | {"hidden_act": "gelu"}, "'gelu'"),
        (LLAMA | {"hidden_size": "32"}, "hidden_size is '32'"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size is None"),
        (LLAMA | {"model_type": "mistral", "sliding_window": 64}, "sliding-window.*64"),
        (LLAMA | {"model_type": "mistral", "max_position_embeddings": 32768}, "sliding-window"),
        (QWEN2 | {"use_sliding_window": True}, "sliding-window"),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "full attention"),
        (OPT | {"activation_function": "gelu_new"}, "gelu_new"),
        (OPT | {"layer_norm_elementwise_affine": False}, "layer norms without"),
    ],
)
def test_unsupported_configurations_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ExportError, match=named):
        config_of(values)
