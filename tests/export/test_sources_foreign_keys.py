"""Keys that transformers' class of a model does not read: ignored, unless other code is meant."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotfish.engines.artifact import Artifact
from pilotfish.export.architectures import ARCHITECTURES
from pilotfish.export.architectures.known_keys import load_known_keys
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.sources.huggingface_config import Description
from pilotfish.export.sources.wrapped import text_config
from tests.support.configs import read_config
from tests.support.small_checkpoints import LLAMA, write_directory

SIZES = {key: LLAMA[key] for key in (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings")}  # fmt: skip
NATIVE = {"configuration_mine.MineConfig": "AutoConfig"}
LINEAR = {"rope_type": "linear", "factor": 8.0}
STEPS = {"time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_min": 1e-3,
         "time_step_init_scheme": "random", "time_step_scale": 1.0}  # fmt: skip
# Keys of published files besides the sizes: of a fine-tune, of the model's makers, of a conversion.
PUBLISHED: dict[str, dict[str, Any]] = {
    "fine-tune": {"model_type": "llama", "model_name": "unsloth/Llama-3.1-8B",
                  "unsloth_version": "2026.5.1"},
    "Hunyuan": {"model_type": "hunyuan_v1_dense", "im_end_id": 5, "im_newline_id": 11,
                "im_start_id": 4, "mask_init_id": 12, "org_vocab_size": 264, "pad_id": 1,
                "text_end_id": 7, "text_start_id": 6, "use_cla": False, "use_qk_norm": True,
                "attention_head_dim": 8, "norm_type": "rms", "class_num": 0},
    "Qwen3-Coder": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 32, "mlp_only_layers": [], "use_qk_norm": True,
                    "qkv_bias": False, "shared_expert_intermediate_size": 0,
                    "max_window_layers": 28, "sliding_window": None, "use_sliding_window": False},
    "SmolVLM": {"model_type": "llama", "neftune_noise_alpha": 0.0, "pixel_shuffle_factor": 4,
                "qk_layer_norms": False, "use_resampler": False, "rope_interleaved": False,
                "_flash_attn_2_enabled": True, "perceiver_config": {"model_type": "vllama3"}},
    "Gemma 3n": {"model_type": "gemma3n_text", "altup_lr_multiplier": 1.0,
                 "query_pre_attn_scalar": 256, "num_kv_shared_layers": 0,
                 "layer_types": ["sliding_attention", "full_attention"]},
    "VaultGemma": {"model_type": "vaultgemma", "_sliding_window_pattern": 6,
                   "layer_types": ["full_attention"] * 2},
    "mamba-130m": {**STEPS, "model_type": "mamba", "d_inner": 64, "d_model": 32, "n_layer": 2,
                   "fused_add_norm": True, "pad_vocab_size_multiple": 8, "rms_norm": True,
                   "ssm_cfg": {}, "intermediate_size": 64, "time_step_rank": 2},
    "Bamba": {"model_type": "bamba", "use_mamba_kernels": True, "attn_rotary_emb": 64,
              "num_key_value_heads": 2, "attn_layer_indices": [1], "mamba_n_heads": 4,
              "mamba_d_head": 16},
    "Mamba-Codestral": {**STEPS, "model_type": "mamba2", "norm_before_gate": True,
                        "rms_norm": True, "num_heads": 4, "head_dim": 16, "n_groups": 1,
                        "intermediate_size": 999, "time_step_rank": 256},
    "Nemotron Nano": {"model_type": "nemotron_h", "rms_norm_eps": 1e-5, "auto_map": NATIVE,
                      "architectures": ["NemotronHForCausalLM"], "num_logits_to_keep": 1,
                      "hybrid_override_pattern": "M-", "residual_in_fp32": False,
                      "num_key_value_heads": 2,
                      "use_mamba_kernels": True, "time_step_rank": 256},
    "BitNet": {"model_type": "bitnet", "num_key_value_heads": 2, "auto_map": NATIVE,
               "architectures": ["BitNetForCausalLM"]},
    "Phi-3.5": {"model_type": "phi3", "attention_bias": False, "auto_map": NATIVE,
                "architectures": ["Phi3ForCausalLM"]},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_pass(name: str) -> None:
    described = Description(SIZES | PUBLISHED[name], name, "config.json")
    assert described.config.layers == 2


def test_a_foreign_key_in_a_rotary_table_is_ignored() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    plain = read_config(LLAMA | {"rope_scaling": yarn}, "m", "config.json")
    described = Description(LLAMA | {"rope_scaling": yarn | {"attn_factor": 0.9}}, "m", "m")
    assert described.foreign_keys == ["rope_scaling.attn_factor"]
    assert described.config == plain


def test_the_older_scaling_of_gemma_3_is_that_of_full_layers() -> None:
    types = ["sliding_attention", "full_attention"]
    inner = SIZES | {"model_type": "gemma3_text", "rope_scaling": LINEAR, "layer_types": types}
    outer = {"model_type": "gemma3", "text_config": inner,
             "architectures": ["Gemma3ForConditionalGeneration"]}  # fmt: skip
    values = text_config(outer, "config.json")
    assert values is not None
    described = Description(values, "m", "config.json")
    assert described.foreign_keys == []
    local, full = (layer.rope for layer in described.config.pattern)
    assert local is not None
    assert full is not None
    assert (local.frequencies[0], full.frequencies[0]) == (1.0, 1 / 8)
    windows = Description(values | {"layer_types": types[:1] * 2}, "m", "config.json")
    assert windows.foreign_keys == []


def test_foreign_keys_are_logged_and_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = LLAMA | {"mup_width": 1, "use_qk_norm": True, "architectures": ["LlamaForCausalLM"]}
    source = write_directory(tmp_path / "m", values)
    with caplog.at_level(logging.WARNING, "pilotfish.export"):
        artifact = export_model(str(source), tmp_path / "out")
    assert "does not read the keys mup_width, use_qk_norm" in caplog.text
    assert artifact.manifest.source.ignored_keys == ["mup_width", "use_qk_norm"]
    plain = export_model(str(write_directory(tmp_path / "p")), tmp_path / "plain")
    without = [artifact.path / "model.onnx", plain.path / "model.onnx"]
    assert without[0].read_bytes() == without[1].read_bytes()


@pytest.mark.parametrize(
    ("values", "sign"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "it has an auto_map"),
        ({"architectures": ["MineForCausalLM"]}, "architectures names 'MineForCausalLM'"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures names 'Qwen3ForCausalLM'"),
    ],
)
def test_foreign_keys_for_other_code_are_refused(
    tmp_path: Path, values: dict[str, Any], sign: str
) -> None:
    assert read_config(LLAMA | values, "m", "config.json").layers == 2  # without a foreign key
    source = write_directory(tmp_path / "m", LLAMA | values | {"mup_width": 1})
    with pytest.raises(ExportError, match="unknown keys: mup_width") as refusal:
        export_model(str(source), tmp_path / "out")
    assert f"for other code than transformers': {sign}" in str(refusal.value)
    assert str(refusal.value).endswith("--ignore-key mup_width")
    export_model(str(source), tmp_path / "out", ignore_keys=["mup_width"])
    assert Artifact.open(tmp_path / "out").manifest.source.ignored_keys == ["mup_width"]


def test_more_foreign_keys_than_a_manifest_should_list_are_refused() -> None:
    many = {f"key{i}": 1 for i in range(64)}
    assert len(Description(LLAMA | many, "m", "config.json").foreign_keys) == 64
    for more in ({"key64": 1}, {"key_" + 100 * "x": 1}, {"a\nb": 1}):
        with pytest.raises(ExportError, match="unknown keys: "):
            Description(LLAMA | many | more, "m", "config.json")


def test_a_drafters_key_without_a_mask_token_means_nothing() -> None:
    described = Description(LLAMA | {"spd_type": "pard"}, "m", "config.json")
    assert described.foreign_keys == ["spd_type"]
    assert described.config.mask_token is None


@pytest.mark.parametrize("key", ["to_dict", "get_text_config", "per_layer_config"])
def test_a_name_of_transformers_own_is_refused(key: str) -> None:
    with pytest.raises(ExportError, match=f"{key} is 1, but only None is supported"):
        read_config(LLAMA | {key: 1}, "m", "config.json")
    assert read_config(LLAMA | {key: None}, "m", "config.json").layers == 2


@pytest.mark.parametrize(("inner", "width"), [({}, 64), ({"intermediate_size": 96}, 96)])
def test_mamba_has_the_width_that_its_file_states(inner: dict[str, int], width: int) -> None:
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    config = read_config(sizes | inner | {"model_type": "mamba"}, "m", "config.json")
    assert config.recurrence is not None
    assert config.recurrence.heads == width


# --- the data -------------------------------------------------------------------------------------


def test_the_data_has_every_class() -> None:
    known, shared = load_known_keys()
    assert set(known) == set(ARCHITECTURES)
    for kind, keys in known.items():
        assert keys.defaults, kind
        assert keys.classes, kind
        parts = [set(keys.defaults), set(keys.others), set(keys.without), set(keys.aliases)]
        for i, part in enumerate(parts):
            assert part.isdisjoint(set().union(*parts[i + 1 :])), kind
        assert set(shared.without) <= set(keys.without)
        assert set(keys.aliases.values()).isdisjoint(keys.aliases), kind


def test_the_data_has_a_line_for_each_part() -> None:
    from pilotfish.export.architectures import known_keys

    file = Path(known_keys.__file__).with_name("class_keys.json")
    data = json.loads(file.read_text())
    lines = file.read_text().splitlines()
    assert list(data["each"]) == sorted(data["each"])
    for keys in data["each"].values():
        for part in ("aliases", "defaults", "others"):
            assert list(keys[part]) == sorted(keys[part])
            assert f'  "{part}": {json.dumps(keys[part])},' in lines
        assert f'  "without": {json.dumps(sorted(keys["without"]))}' in lines
    assert msgspec.json.decode(file.read_bytes()) == data


@pytest.mark.parametrize("code", [{"auto_map": NATIVE}, {"architectures": ["MineForCausalLM"]}])
def test_null_says_nothing_to_other_code(code: dict[str, Any]) -> None:
    described = Description(LLAMA | code | {"mup_width": None}, "m", "config.json")
    assert described.foreign_keys == ["mup_width"]
    for value in (False, 0, "", [], {}):  # with which that code may do something
        with pytest.raises(ExportError, match=r"unknown keys: other\. The file is meant"):
            Description(LLAMA | code | {"mup_width": None, "other": value}, "m", "config.json")
