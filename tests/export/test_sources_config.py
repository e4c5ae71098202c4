"""Configurations as config.json has them: variants that are read, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from pilotfish.export.architectures import ARCHITECTURES
from pilotfish.export.architectures.architecture import ALL, ATTENTION, MLP, QKV
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model_config import Form, Layer, ModelConfig
from pilotfish.export.parts import Rope
from tests.support.configs import read_config
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
UNGATED = tuple(module for module in ALL if module != "mlp.gate_proj")
OPT_FORM = msgspec.structs.replace(ARCHITECTURES["opt"].form, biases=UNGATED)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rope_of(config: ModelConfig) -> Rope:
    """The rotary embedding of the first layer."""
    rope = config.layer(0).rope
    assert rope is not None
    return rope


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
    np.testing.assert_allclose(rope_of(config_of(values)).frequencies, expected, rtol=1e-12)


def test_rotary_parameters_in_both_forms() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}
    new = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    new |= {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}}
    assert config_of(old) == config_of(new)
    older = LLAMA | {"rope_scaling": {"type": "default"}}
    assert config_of(older) == config_of(LLAMA)


def _quantised(method: str, **settings: Any) -> dict[str, Any]:
    return LLAMA | {"quantization_config": {"quant_method": method, **settings}}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"attention_bias": True}, {"form": Form(biases=ATTENTION)}),
        ({"mlp_bias": True}, {"form": Form(biases=MLP)}),
        ({"num_key_value_heads": None}, {"kv_heads": 4}),
        ({"head_dim": 64}, {"head_dim": 64}),
        ({"model_type": "mistral", "sliding_window": None}, {"model_type": "mistral"}),
        ({"model_type": "mistral", "sliding_window": 64}, {"window": 64}),
        ({"model_type": "mistral"}, {"window": 4096}),
        ({"model_type": "qwen2"}, {"form": Form(biases=QKV), "window": None}),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": 1,
            },
            {"window": 64},
        ),
        (
            {"model_type": "qwen3", "attention_bias": True},
            {"form": Form(biases=ATTENTION, qk_norm="head")},
        ),
        ({"hidden_act": "gelu"}, {"activation": "gelu"}),
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
        ({}, {"form": OPT_FORM, "embedding": None, "tied": True}),
        ({"activation_function": "gelu"}, {"activation": "gelu"}),
        ({"activation_function": "gelu_new"}, {"activation": "gelu_tanh"}),
        ({"enable_bias": False}, {"form": msgspec.structs.replace(OPT_FORM, biases=())}),
        (  # opt-350m
            {"do_layer_norm_before": False, "word_embed_proj_dim": 512, "hidden_size": 1024,
             "num_attention_heads": 16},
            {"form": msgspec.structs.replace(OPT_FORM, sum_norms=True, final_norm=False),
             "embedding": 512, "head_dim": 64},
        ),
        ({"_remove_final_layer_norm": True},
         {"form": msgspec.structs.replace(OPT_FORM, final_norm=False)}),
    ],
)  # fmt: skip
def test_variants_of_opt(change: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_of(OPT | change)
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.pattern == (Layer(),)
    assert config.position_offset == 2


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": "bloom"}, "architecture 'bloom'.*GGUF file with --dialect llamacpp"),
        ({"model_type": "phi-msft"}, "with model_type phi"),
        ({}, "architecture ''"),
        ({"model_type": "dbrx", "num_local_experts": 8}, r"mixture-of-experts.*dbrx"),
        ({"model_type": "phimoe"}, "mixture-of-experts"),
        (_quantised("gptq", bits=3), "bits in quantization_config is 3, but only 4 or 8"),
        (_quantised("gptq", bits=4, checkpoint_format="marlin"), "'marlin'"),
        (_quantised("awq", bits=4, version="gemv"), "'gemv'"),
        (_quantised("compressed-tensors", format="marlin-24"), "'marlin-24'"),
        (_quantised("fp8", weight_block_size=[0, 128]), "weight_block_size"),
        (_quantised("bitsandbytes"), "'bitsandbytes', but only gptq, awq"),
        (LLAMA | {"rope_scaling": {"type": "ntk", "factor": 4.0}}, "'ntk'"),
        (
            LLAMA
            | {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0] * 4,
                }
            },
            "short_factor must be a list of 4",
        ),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "between layers"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor below 1"),
        (LLAMA | {"hidden_act": "mish"}, "'mish'"),
        (LLAMA | {"hidden_act": "xielu"}, "'xielu'"),  # which only Apertus has in float32
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.factor is missing"),
        (
            LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 9.0}},
            "does not read rope_scaling.alpha",
        ),
        (
            LLAMA | {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 0.0}},
            "attention_factor is 0.0, but must be above 0",
        ),
        (
            LLAMA
            | {
                "model_type": "olmo3",
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False},
                },
            },
            "does not read rope_parameters.full_attention.truncate",
        ),
        (LLAMA | {"hidden_size": "32"}, "hidden_size is '32'"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size is missing"),
        (LLAMA | {"sliding_window": 64}, "sliding_window is 64"),
        (
            LLAMA
            | {
                "model_type": "llama4_text",
                "intermediate_size_mlp": 64,
                "moe_layers": [],
                "no_rope_layers": 2**31,
            },
            "Llama 4 is supported only with",
        ),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window"),
        (QWEN2 | {"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
        (OPT | {"activation_function": "quick_gelu"}, "quick_gelu"),
        (OPT | {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
    ],
)
def test_unsupported_configurations_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ExportError, match=named):
        config_of(values)


def test_a_file_without_a_context_has_that_of_its_class() -> None:
    values = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    assert config_of(values).context == 2048  # Llama 1's, whose files state no other
    assert config_of(values | {"model_type": "qwen3"}).context == 32768
    with pytest.raises(ExportError, match="max_position_embeddings is None, but must be of type"):
        config_of(LLAMA | {"max_position_embeddings": None})


@pytest.mark.parametrize("key", ["vocab_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_size_is_called_missing(key: str) -> None:
    with pytest.raises(ExportError, match=f"config.json: {key} is missing$"):
        config_of({name: value for name, value in LLAMA.items() if name != key})


ANY = "if llama.cpp has this model and it is a decoder without recurrent states$"
STATES = "choose another model, since --dialect llamacpp refuses recurrent states, too$"


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, ANY),
        ({"model_type": "baichuan", "layer_types": ["full_attention"]}, ANY),
        ({"model_type": "jamba", "num_experts": 16, "mamba_d_state": 16}, STATES),
        ({"model_type": "rwkv7"}, STATES),
        ({"model_type": "zamba2"}, STATES),
        ({"model_type": "recurrent_gemma", "block_types": ["recurrent", "attention"]}, STATES),
        ({"model_type": "minimax", "layer_types": ["linear_attention"]}, STATES),
        ({"model_type": "t5", "is_encoder_decoder": True}, "choose a decoder, which"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "choose a decoder, which"),
        ({"model_type": "odd", "architectures": "mine", "layer_types": 3}, ANY),
        ({"model_type": "odd", "architectures": [7], "layer_types": [7, [], {}]}, ANY),
    ],
)
def test_the_advice_for_an_unsupported_model_holds(values: dict[str, Any], advice: str) -> None:
    with pytest.raises(ExportError, match=f"not supported.*{advice}"):
        config_of(values)
