"""Every key of a configuration is read, changes nothing, is let pass by name, or is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.engines.artifact import Artifact
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.sources import open_source
from tests.support.configs import read_config
from tests.support.small_checkpoints import LLAMA, write_directory, write_gguf

# config.json of published checkpoints, as their makers wrote them.
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
        "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
        "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
    },
    "Llama-3.2-1B-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "Mistral-7B-Instruct-v0.3": {
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 32768,
    },
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896,
        "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "pythia-160m": {
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
        "hidden_act": "gelu", "hidden_size": 768, "initializer_range": 0.02,
        "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "model_type": "gpt_neox", "num_attention_heads": 12, "num_hidden_layers": 12,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
        "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True,
        "use_parallel_residual": True, "vocab_size": 50304,
    },
    "opt-125m": {
        "_name_or_path": "facebook/opt-125m", "activation_dropout": 0.0,
        "activation_function": "relu", "architectures": ["OPTForCausalLM"],
        "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": True, "dropout": 0.1,
        "eos_token_id": 2, "ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02,
        "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1, "prefix": "</s>",
        "torch_dtype": "float16", "transformers_version": "4.21.0.dev0", "use_cache": True,
        "vocab_size": 50272, "word_embed_proj_dim": 768,
    },
}  # fmt: skip
# What transformers 4.40 writes besides, where it is asked for all keys (use_diff=False).
WRITTEN_IN_FULL: dict[str, Any] = {
    "return_dict": True, "output_hidden_states": False, "output_attentions": False,
    "torchscript": False, "torch_dtype": "float32", "use_bfloat16": False,
    "tf_legacy_loss": False, "pruned_heads": {}, "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False, "is_decoder": False, "cross_attention_hidden_size": None,
    "add_cross_attention": False, "tie_encoder_decoder": False, "max_length": 20, "min_length": 0,
    "do_sample": False, "early_stopping": False, "num_beams": 1, "num_beam_groups": 1,
    "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0,
    "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "num_return_sequences": 1,
    "output_scores": False, "return_dict_in_generate": False, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "remove_invalid_values": False,
    "exponential_decay_length_penalty": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "architectures": None, "finetuning_task": None,
    "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "tokenizer_class": None,
    "prefix": None, "sep_token_id": None, "decoder_start_token_id": None,
    "task_specific_params": None, "problem_type": None, "_name_or_path": "",
    "transformers_version": "4.40.2", "_attn_implementation_autoset": True,
}  # fmt: skip


@pytest.mark.parametrize("written", [{}, WRITTEN_IN_FULL], ids=["as-published", "in-full"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_pass(name: str, written: dict[str, Any]) -> None:
    values = written | PUBLISHED[name]
    config = read_config(values, name, "config.json")
    assert config.vocab_size == values["vocab_size"]


SIZES = {key: LLAMA[key] for key in (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings")}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("phi3", {"lm_head_bias": False}),
        ("gemma", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
                   "num_key_value_heads": 1}),
        ("exaone4", {"sliding_window": 64, "sliding_window_pattern": "LLLG", "head_dim": 8,
                     "num_key_value_heads": 2,
                     "layer_types": ["sliding_attention", "full_attention"]}),
        ("smollm3", {"pretraining_tp": 2, "num_key_value_heads": 2}),
        ("cohere", {"model_max_length": 128}),
        ("cohere2", {"layer_switch": 4, "head_dim": 8}),
        ("starcoder2", {"norm_epsilon": 1e-3, "layer_norm_epsilon": 1e-3}),
        ("hunyuan_v1_dense", {"use_cla": False, "use_qk_norm": True, "head_dim": 8,
                              "attention_head_dim": 8, "norm_type": "rms"}),
        ("nemotron", {"partial_rotary_factor": 0.5, "rope_percent": 0.5}),
        ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 0.5, "rotary_emb_base": 5e4,
                      "rope_theta": 5e4}),
    ],
)  # fmt: skip
def test_keys_that_published_files_have_besides_pass(family: str, extra: dict[str, Any]) -> None:
    assert read_config({**SIZES, "model_type": family, **extra}, "m", "config.json").layers == 2


def test_a_share_of_pythias_heads_turns() -> None:
    values = {**SIZES, "model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 100}
    rope = read_config(values, "m", "config.json").pattern[0].rope
    assert rope is not None
    assert rope.frequencies == (1.0, 0.1)


OLMO = {"model_type": "olmo3", "num_key_value_heads": 2, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (OLMO | {"rope_theta": 5e4}, "rope_theta is 50000"),
        (OLMO | {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rename it to rope_type"),
        ({"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 4.0}},
         "rename it to rope_type"),
    ],
)  # fmt: skip
def test_keys_that_a_class_takes_otherwise_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ExportError, match=named):
        read_config({**SIZES, **change}, "m", "config.json")


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", {"logit_scale": 0.5}),
        ("llama", {"embedding_multiplier": None}),
        ("llama", {"clip_qkv": 8, "alibi": True}),
        ("llama", {"num_local_experts": 4}),
        ("llama", {"pretraining_tp": 2}),
        ("mistral", {"attention_bias": True, "sliding_window": None}),
        ("qwen2", {"attention_bias": False}),
        ("gpt_neox", {"rope_theta": 5e4, "partial_rotary_factor": 0.5}),
        ("gemma", {"hidden_activation": "silu"}),
        ("starcoder2", {"layer_norm_epsilon": 1e-3}),
        ("qwen3_moe", {"n_group": 2}),
    ],
)
def test_keys_that_a_class_does_not_read_change_nothing(kind: str, keys: dict[str, Any]) -> None:
    values = {**SIZES, "model_type": kind, "num_key_value_heads": 4}
    window = {key: value for key, value in keys.items() if key == "sliding_window"}
    plain = read_config(values | window, "m", "config.json")
    assert read_config(values | keys, "m", "config.json") == plain


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"is_causal": False}, "is_causal is False, but only True"),
        ({"is_causal": None}, "is_causal is None, but only True"),
        ({"sliding_window": 64}, "sliding_window is 64"),
        ({"attention_chunk_size": 16}, "attention_chunk_size is 16, but only None is supported"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 32, "attention_chunk_size": 1.5}, "but only None is supported"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config"),
        ({"model_type": "olmo", "clip_qkv": 8.0}, "clip_qkv is 8.0, but only None"),
        ({"model_type": "falcon", "alibi": True}, "alibi is True, but only False"),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm is True, but only False"),
        ({"model_type": "mamba", "rescale_prenorm_residual": True}, "rescale_prenorm_residual is"),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, r"rope_scaling\.factor is 4"),
        ({"rope_scaling": {"factor": 4.0}}, r"rope_scaling\.factor is 4.0, but the table names"),
        ({"original_max_position_embeddings": 64}, "original_max_position_embeddings is 64"),
        ({"model_type": "olmo2", "head_dim": 16}, "head_dim is 16, but only a file without"),
        ({"rope_scaling": 4}, "rope_scaling is 4, but must be an object"),
        ({"quantization_config": False}, "quantization_config is False, but must be an object"),
    ],
)  # fmt: skip
def test_keys_with_an_effect_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ExportError, match=named):
        read_config(LLAMA | change, "tiny", "config.json")


ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    "both",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": ROPE},
        {"rope_parameters": ROPE, "rope_scaling": ROPE | {"factor": 4.0}},
        {"rope_parameters": ROPE, "rope_scaling": {**ROPE, "rope_theta": 1e4}},
    ],
)
def test_two_rotary_settings_that_differ_are_refused(both: dict[str, Any]) -> None:
    with pytest.raises(ExportError, match="rope_parameters and rope_scaling are both"):
        read_config(LLAMA | both, "tiny", "config.json")


def test_two_rotary_settings_that_agree_are_one() -> None:
    once = read_config(LLAMA | {"rope_parameters": ROPE}, "tiny", "config.json")
    without = {key: value for key, value in ROPE.items() if key != "rope_theta"}
    twice = LLAMA | {"rope_parameters": ROPE, "rope_scaling": without, "rope_theta": 5e5}
    assert read_config(twice, "tiny", "config.json") == once
    empty = LLAMA | {"rope_parameters": ROPE, "rope_scaling": None}
    assert read_config(empty, "tiny", "config.json") == once


def test_a_key_is_let_pass_by_name_and_the_manifest_says_so(tmp_path: Path) -> None:
    source = write_directory(
        tmp_path / "m", LLAMA | {"mup_width": 1, "note": "mine", "auto_map": {}}
    )
    command = [sys.executable, "-m", "pilotfish", "export", "model", str(source)]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        line = [*command, "--out", str(tmp_path / "out"), *options]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    refused = run("--ignore-key", "note")
    assert refused.returncode == 65
    assert "unknown keys: mup_width" in refused.stderr
    assert "--ignore-key mup_width" in refused.stderr
    assert not (tmp_path / "out").exists()
    passed = run("--ignore-key", "note", "--ignore-key", "mup_width")
    assert passed.returncode == 0, passed.stderr
    assert "mup_width is ignored" in passed.stderr
    manifest = Artifact.open(tmp_path / "out").manifest
    assert manifest.source.ignored_keys == ["note", "mup_width"]
    plain = export_model(str(write_directory(tmp_path / "p")), tmp_path / "plain")
    assert "ignored_keys" not in json.loads((plain.path / "manifest.json").read_bytes())["source"]


@pytest.mark.parametrize("name", ["hidden_size", "mup_widht"])
def test_a_key_that_is_read_or_absent_cannot_be_ignored(tmp_path: Path, name: str) -> None:
    with pytest.raises(ExportError, match=f"{name} cannot be ignored"):
        open_source(str(write_directory(tmp_path / "m")), ignore_keys=[name])
    with pytest.raises(ExportError, match=f"{name} cannot be ignored"):
        open_source(str(write_gguf(tmp_path / "m.gguf")), ignore_keys=[name])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"{}.attention.causal": False}, r"llama\.attention\.causal is False"),
        ({"{}.logit_scale": 0.5}, r"llama\.logit_scale is 0\.5"),
        (
            {"{}.attention.logit_softcapping": 30.0},
            r"keys: .*llama\.attention\.logit_softcapping",
        ),
        (
            {"{}.rope.scaling.attn_factor": 2.0},
            r"keys: .*llama\.rope\.scaling\.attn_factor",
        ),
    ],
)
def test_metadata_with_an_effect_is_refused(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ExportError, match=named):
        open_source(str(write_gguf(tmp_path / "a.gguf", settings=settings)))


@pytest.mark.parametrize(
    "settings",
    [
        {"{}.rope.scaling.factor": 4.0},  # which llama.cpp takes as linear
        {"{}.rope.scale_linear": 4.0},
        {"{}.rope.scaling.type": "linear", "{}.rope.scaling.factor": 4.0},
    ],
)
def test_a_linear_scaling_of_gguf_is_followed(tmp_path: Path, settings: dict[str, Any]) -> None:
    plain = open_source(str(write_gguf(tmp_path / "a.gguf"))).config
    config = open_source(str(write_gguf(tmp_path / "a.gguf", settings=settings))).config
    rope, scaled = plain.pattern[0].rope, config.pattern[0].rope
    assert rope is not None
    assert scaled is not None
    np.testing.assert_allclose(4 * np.array(scaled.frequencies), rope.frequencies, rtol=1e-6)


def test_metadata_without_effect_pass(tmp_path: Path) -> None:
    settings = {
        "{}.rope.scaling.type": "none",
        "{}.rope.scaling.factor": 4.0,  # of a scaling that is switched off
        "{}.rope.dimension_count": 8,
        "{}.vocab_size": 264,
        "{}.attention.causal": True,
        "general.quantized_by": "somewhere",
    }
    plain = open_source(str(write_gguf(tmp_path / "a.gguf"))).config
    assert open_source(str(write_gguf(tmp_path / "a.gguf", settings=settings))).config == plain
    linear = {"{}.rope.scaling.factor": 1.0}
    assert open_source(str(write_gguf(tmp_path / "a.gguf", settings=linear))).config == plain
    unknown = {"{}.mup_width": 1}
    path = write_gguf(tmp_path / "a.gguf", settings=unknown)
    source = open_source(str(path), ignore_keys=["llama.mup_width"])
    assert source.description.ignored_keys == ["llama.mup_width"]
    assert source.config == plain


@pytest.mark.parametrize(
    ("values", "named", "unsaid"),
    [
        ({"model_type": "dbrx", "num_local_experts": 0}, "'dbrx' is not", "mixture"),
        ({"model_type": "dbrx", "num_local_experts": 4},
         "mixture-of-experts.* GGUF file with --dialect llamacpp, if", "original weights"),
        ({"model_type": "bloom", "quantization_config": {"quant_method": "awq"}},
         "architecture 'bloom'.* GGUF file with --dialect llamacpp, if", "original weights"),
        (PUBLISHED["opt-125m"] | {"quantization_config": {"quant_method": "hqq"}},
         "give the original weights", "GGUF"),
        (LLAMA | {"quantization_config": {"quant_method": "hqq"}}, "or a GGUF file", "mixture"),
        (LLAMA | {"quantization_config": {"quant_method": "hqq"}, "hidden_act": "mish"},
         "hqq", "mixture"),
    ],
)  # fmt: skip
def test_advice_is_given_where_it_helps(values: dict[str, Any], named: str, unsaid: str) -> None:
    with pytest.raises(ExportError, match=named) as caught:
        read_config(values, "tiny", "config.json")
    assert unsaid not in str(caught.value)
