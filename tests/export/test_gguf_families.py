"""GGUF files of every architecture that is read: the checkpoint that they were made of, again.

The files are llama.cpp's converter's, byte for byte (`tests.support.converted`).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.engines.runtime import SESSION_CONFIG
from pilotfish.export.architectures import ARCHITECTURES
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.sources import open_source
from pilotfish.export.sources.gguf_config import GgufDescription, find_class
from pilotfish.export.sources.gguf_file import GgufFile
from pilotfish.export.sources.gguf_names import gguf_names
from pilotfish.export.sources.tensor_names import find_weights
from tests.support.converted import CONVERTED, made_weights, write_checkpoint, write_converted
from tests.support.runnable import needs

# What the converter leaves out, or writes otherwise.
SAID_OTHERWISE = {
    "Mistral Nemo": {"model_type"},  # as llama, which it is without a window
    "Hunyuan": {"context"},  # 256k, whatever the checkpoint says
}


def plain(value: Any) -> Any:
    """Turn a configuration into dicts and lists, with numbers as float32 has them."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


@pytest.mark.parametrize("family", CONVERTED)
def test_a_file_is_the_checkpoint_that_it_was_made_of(tmp_path: Path, family: str) -> None:
    checkpoint = open_source(str(write_checkpoint(tmp_path / "hf", family)))
    file = open_source(str(write_converted(tmp_path / "m.gguf", family)))
    wanted = plain(checkpoint.config)
    for field in SAID_OTHERWISE.get(family, set()) | {"name"}:
        wanted[field] = getattr(file.config, field)
    results = {name: getattr(file.config, name) for name in file.config.__struct_fields__}
    for field, value in results.items():
        assert plain_numbers(value) == wanted[field], field
    assert set(file.names()) == set(checkpoint.names())
    for name in checkpoint.names():
        rounding = 2e-7 if name.endswith("A_log") else 0  # files have exponentials
        result, wanted = file.tensor(name), checkpoint.tensor(name)
        np.testing.assert_allclose(result, wanted, rtol=0, atol=rounding, err_msg=name)


def plain_numbers(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: plain_numbers(getattr(value, name)) for name in value.__struct_fields__}
    return [plain_numbers(each) for each in value] if isinstance(value, tuple | list) else value


def test_every_architecture_that_is_read_is_among_them() -> None:
    read = {
        architecture.gguf.name
        for architecture in ARCHITECTURES.values()
        if architecture.gguf is not None
    }
    assert read == {made["architecture"] for made in CONVERTED.values()}


def logits(source: Path, out: Path, **settings: Any) -> NDArray[np.float32]:
    decoder = Decoder(export_model(str(source), out, **settings), provider="cpu")
    [scores] = decoder.forward([Pass(0, (7 * np.arange(60)) % decoder.vocab_size)])
    return scores.logits.copy()


@pytest.mark.parametrize("family", ["Gemma 3 4B", "Gemma 4 E2B", "gpt-oss", "Phi 4 mini",
                                    "Qwen 3.5 MoE", "SmolLM 3"])  # fmt: skip
def test_its_graph_computes_what_the_checkpoints_does(tmp_path: Path, family: str) -> None:
    wanted = logits(write_checkpoint(tmp_path / "hf", family), tmp_path / "a")
    result = logits(write_converted(tmp_path / "m.gguf", family), tmp_path / "b")
    assert float(wanted.std()) > 0.1
    np.testing.assert_allclose(result, wanted, atol=1e-4)


@pytest.mark.parametrize(
    "family",
    ["Phi 4 mini", "Granite 3", "Qwen 3 MoE", "Granite MoE, shared", "Qwen 3.5 MoE", "Qwen3-Next",
     "LFM2.5", "Gemma 4 26B-A4B"],
)  # fmt: skip
def test_blocks_are_kept_where_rows_move(tmp_path: Path, family: str) -> None:
    """Fused, interleaved and stacked tensors."""
    source = open_source(str(write_converted(tmp_path / "m.gguf", family, kind=Kind.Q8_0)))
    assert source.blocks() == ["Q8_0"]
    for name in source.names():
        selection, values = source.quantized(name), source.tensor(name)
        assert (selection is not None) == (values.ndim == 2 and values.shape[1] % 32 == 0)
        if selection is not None:
            np.testing.assert_array_equal(selection.floats(), values, name)


@pytest.mark.parametrize("family", ["Qwen 3.5", "LFM2.5", "Gemma 4 26B-A4B"])
def test_stored_blocks_compute_what_their_floats_do(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without rounding of the other factor; blocks are moved, or columns."""
    needs("opset24")
    monkeypatch.setitem(SESSION_CONFIG, "session.qdq_matmulnbits_accuracy_level", "0")
    path = write_converted(tmp_path / "m.gguf", family, kind=Kind.Q8_0)
    wanted = logits(path, tmp_path / "a", precision="fp32", dialect="opset24")
    result = logits(path, tmp_path / "b", precision="stored", dialect="opset24")
    np.testing.assert_allclose(result, wanted, atol=1e-3)


@pytest.mark.parametrize("family", ["Phi 4 mini", "Granite 3"])
def test_a_stored_export_computes_nearly_the_same(tmp_path: Path, family: str) -> None:
    needs("opset24")
    path = write_converted(tmp_path / "m.gguf", family, kind=Kind.Q8_0)
    wanted = logits(path, tmp_path / "a")
    result = logits(path, tmp_path / "b", precision="stored", dialect="opset24")
    assert float((result - wanted).std()) < 0.05 * float(wanted.std())


# --- keys ----------------------------------------------------------------------------------------


def read(file: GgufFile, metadata: dict[str, Any]) -> ModelConfig:
    """Read the file as if these were its architecture's keys."""
    architecture = file.metadata["general.architecture"]
    other = copy.copy(file)
    other.metadata = {"general.architecture": architecture} | {
        f"{architecture}.{key}": value for key, value in metadata.items()
    }
    model_type, ours = find_class(other)
    stored = {name: t.shape for name, t in file.tensors.items() if "rope_" not in name}
    mixture = ARCHITECTURES[model_type].mixture
    origins = find_weights(gguf_names(ours, experts=mixture is not None), stored)
    whole = {name: stored[origin.stored[0]] for name, origin in origins.items()}
    return GgufDescription(other, model_type, whole).config


def flipped(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, list):
        return [flipped(each) for each in value]
    if isinstance(value, str):
        return "longrope"
    if isinstance(value, float):
        return value / 64
    return not value if isinstance(value, bool) else 2 * value or 1


@pytest.mark.parametrize("family", CONVERTED)
def test_each_key_is_followed_or_refused(tmp_path: Path, family: str) -> None:
    path = write_converted(tmp_path / "m.gguf", family)
    file, stated = GgufFile(path), CONVERTED[family]["metadata"]
    architecture = CONVERTED[family]["architecture"]
    usual = read(file, stated)
    kind, extra = stated.get("rope.scaling.type"), CONVERTED[family]["extra"]
    unused = {"rope.scaling.factor"} if kind == "none" else set()
    unused |= {"attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"} - {
        epsilon(usual)
    }
    if kind != "yarn" and "rope_factors_long.weight" not in extra:
        unused.add("rope.scaling.original_context_length")
    if "attention.recurrent_layers" in stated:
        unused |= {"full_attention_interval", "rope.dimension_sections"}
    for key, value in stated.items():
        changed = stated | {key: flipped(value)}
        info = refusal(file, changed)
        if info is None:
            assert (read(file, changed) == usual) == (key in unused), key
        else:
            assert f"{architecture}." in info, key


def refusal(file: GgufFile, metadata: dict[str, Any]) -> str | None:
    """Return why the file is refused, without its path; None if it is not."""
    try:
        read(file, metadata)
    except ExportError as error:
        return str(error).removeprefix(str(file.path))
    return None


def epsilon(config: ModelConfig) -> str:
    rms = config.form.norm == "rms"
    return "attention.layer_norm_rms_epsilon" if rms else "attention.layer_norm_epsilon"


@pytest.mark.parametrize(
    ("family", "say", "named"),
    [
        ("Qwen 3", {"attention.sliding_window": 16}, r"qwen3\.attention\.sliding_window is 16"),
        ("Gemma 3", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping is 30\.0"),
        ("Granite 3", {"rope.scaling.finetuned": False}, r"granite\.rope\.scaling\.finetuned is"),
        ("GLM 4", {"rope.dimension_sections": [2, 1, 1, 0]}, r"keys: .*rope\.dimension_sections"),
        ("Gemma 2", {"rope.freq_base_swa": 5e5}, r"gemma2\.rope\.freq_base_swa is 500000\.0"),
        ("gpt-oss", {"expert_feed_forward_length": 32}, r"expert_feed_forward_length is 32"),
        ("Phi 4", {"attention.key_length": 16, "attention.value_length": 16},
         r"phi3\.attention\.key_length is 16"),
        ("Phi 4 mini", {"rope.dimension_count": 4}, "short_factor must be a list of 2"),
        ("Llama 3.2", {"attention.head_count_kv": 3},
         r"llama\.attention\.head_count 4 is not a multiple of llama\.attention\.head_count_kv 3"),
        ("Llama 3.2", {"rope.scaling.type": "longrope"}, "'longrope'"),
        (
            "Llama 3.2",
            {"rope.scaling.attn_factor": 2.0},
            r"keys: .*llama\.rope\.scaling\.attn_factor",
        ),
        ("Ministral 3", {"attention.temperature_scale": None, "rope.scaling.type": "none"},
         r"keys: .*yarn_log_multiplier"),
        ("OLMo 3", {"attention.sliding_window_pattern": [True] * 3}, "pattern names 3 layers"),
        ("Mixtral", {"expert_used_count": 9}, r"llama\.expert_used_count is 9"),
        ("Mixtral", {"expert_used_count": None}, r"llama\.expert_used_count is missing"),
        ("Pythia", {"use_parallel_residual": None}, r"use_parallel_residual is missing"),
        ("Gemma 3", {"block_count": None}, r"gemma3\.block_count is None"),
        ("StableLM 2", {"attention.layer_norm_epsilon": None}, r"layer_norm_epsilon is missing"),
        ("LFM2", {"attention.head_count_kv": [0, 1, 2, 0]}, r"model_type|lfm2"),
        ("LFM2", {"attention.head_count_kv": [0, 0, 2]}, r"lfm2\.attention\.head_count_kv must be"),
        ("LFM2", {"shortconv.l_cache": None}, r"lfm2\.shortconv\.l_cache is missing"),
        ("Qwen 3.5", {"rope.dimension_sections": [1, 0, 0, 0]}, r"qwen35\.rope\.dimension_sec"),
        ("Qwen 3.5", {"ssm.inner_size": 33}, r"qwen35\.ssm\.inner_size 33 is not a multiple"),
        ("Qwen 3.5", {"block_count": 3}, r"qwen35\.block_count 3"),
        ("Qwen 3.5", {"nextn_predict_layers": 4}, r"qwen35\.nextn_predict_layers 4"),
        ("Gemma 4 E4B", {"feed_forward_length": [64] * 7 + [128]}, r"blk\.4\.ffn_gate\.weight"),
        ("Gemma 4 E2B", {"rope.dimension_count_swa": 4}, r"dimension_count_swa differs"),
        ("Gemma 4 31B", {"attention.head_count_kv": [2] * 7 + [1]}, r"head_count_kv differs"),
        ("Gemma 4 31B", {"attention.head_count_kv": [2] * 7}, r"head_count_kv must be"),
    ],
)  # fmt: skip
def test_what_is_said_otherwise_is_refused_in_the_words_of_the_file(
    tmp_path: Path, family: str, say: dict[str, Any], named: str
) -> None:
    path = write_converted(tmp_path / "m.gguf", family, say=say)
    with pytest.raises(ExportError, match=named):
        open_source(str(path))


def test_a_pattern_may_be_a_number(tmp_path: Path) -> None:
    every_third = {"attention.sliding_window_pattern": 3}
    source = open_source(str(write_converted(tmp_path / "m.gguf", "Gemma 3", say=every_third)))
    windows = [source.config.layer(i).window for i in range(source.config.layers)]
    assert windows == [16, 16, None, 16, 16, None, 16, 16]
    without = {"attention.sliding_window": 0}
    source = open_source(str(write_converted(tmp_path / "n.gguf", "Gemma 3", say=without)))
    assert source.config.window is None


# --- tensors that are not read -------------------------------------------------------------------


def test_a_multi_token_prediction_head_is_left_aside(tmp_path: Path) -> None:
    usual = open_source(str(write_converted(tmp_path / "m.gguf", "Qwen 3.5")))
    say = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "attention.recurrent_layers": [True] * 3 + [False] * 2,
    }
    head = {
        f"blk.4.{name}.weight": np.ones(32, np.float32) for name in ("attn_norm", "nextn.enorm")
    }
    path = write_converted(tmp_path / "n.gguf", "Qwen 3.5", say=say, more=head)
    source = open_source(str(path))
    assert source.description.left_out == ["blk.4"]
    assert source.names() == usual.names()
    assert plain(usual.config) == plain_numbers(source.config) | {"name": "m"}
    trunk: dict[str, Any] = {name: None for name in GgufFile(path).tensors if "blk.4" not in name}
    rest = {name: trunk[name] for name in trunk if name.startswith("blk.")}
    path = write_converted(tmp_path / "o.gguf", "Qwen 3.5", say=say, more=head | rest)
    with pytest.raises(ExportError, match="only the multi-token-prediction head"):
        open_source(str(path))


def test_keys_and_values_that_no_layer_reads_are_left_aside(tmp_path: Path) -> None:
    """Published files have them in the layers that read another layer's."""
    usual = open_source(str(write_converted(tmp_path / "m.gguf", "Gemma 4 E2B")))
    parts = {"attn_k.weight": (32, 32), "attn_v.weight": (32, 32), "attn_k_norm.weight": (16,)}
    more = {f"blk.7.{name}": np.ones(shape, np.float32) for name, shape in parts.items()}
    file = open_source(str(write_converted(tmp_path / "n.gguf", "Gemma 4 E2B", more=more)))
    assert file.names() == usual.names()


def test_the_fused_projection_of_older_files_is_read(tmp_path: Path) -> None:
    usual = open_source(str(write_converted(tmp_path / "m.gguf", "Qwen3-Next")))
    made = CONVERTED["Qwen3-Next"]
    fused = made_weights(made["stored"], made["layers"])
    more: dict[str, Any] = {}
    for i in range(3):
        more[f"blk.{i}.ssm_in.weight"] = fused[f"model.layers.{i}.linear_attn.in_proj_qkvz.weight"]
        more |= dict.fromkeys((f"blk.{i}.attn_qkv.weight", f"blk.{i}.attn_gate.weight"))
    older = open_source(str(write_converted(tmp_path / "n.gguf", "Qwen3-Next", more=more)))
    assert set(older.names()) == set(usual.names())
    for name in usual.names():
        np.testing.assert_array_equal(older.tensor(name), usual.tensor(name), name)


def test_gemma_4_needs_its_rotary_divisors(tmp_path: Path) -> None:
    path = write_converted(tmp_path / "m.gguf", "Gemma 4 31B", more={"rope_freqs.weight": None})
    with pytest.raises(ExportError, match="has no rope_freqs"):
        open_source(str(path))


def test_rates_of_linear_attention_are_below_0(tmp_path: Path) -> None:
    more = {"blk.1.ssm_a": np.zeros(8, np.float32)}
    source = open_source(str(write_converted(tmp_path / "m.gguf", "Qwen 3.5", more=more)))
    with pytest.raises(ExportError, match=r"blk\.1\.ssm_a must be below 0"):
        source.tensor("model.layers.1.linear_attn.A_log")


def test_older_files_of_qwen35_state_only_an_interval(tmp_path: Path) -> None:
    say = {"attention.recurrent_layers": None, "full_attention_interval": 2}
    source = open_source(str(write_converted(tmp_path / "m.gguf", "Qwen 3.5")))
    kinds = [layer.kind for layer in source.config.pattern]
    assert kinds == ["delta", "delta", "delta", "attention"]
    path = write_converted(
        tmp_path / "n.gguf", "Qwen 3.5", say=say | {"full_attention_interval": None}
    )
    assert open_source(str(path)).config.pattern == source.config.pattern
    path = write_converted(tmp_path / "o.gguf", "Qwen 3.5", say=say)
    with pytest.raises(ExportError, match=r"blk\.1\."):
        open_source(str(path))
