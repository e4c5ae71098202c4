"""Sources of weights: Hugging Face directories and GGUF files, whole, odd and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.sources import open_source
from pilotfish.export.sources.huggingface import DirectorySource
from pilotfish.export.sources.source import WeightSource
from tests.support.configs import read_config
from tests.support.small_checkpoints import (
    DTYPES,
    LLAMA,
    TOKENS,
    VOCAB,
    tiny_weights,
    tokenizer_json,
    write_directory,
    write_gguf,
)

QWEN2 = LLAMA | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 16}
TIED = LLAMA | {"tie_word_embeddings": True}
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


def frequencies(config: ModelConfig) -> np.ndarray:
    """Those of the first layer."""
    rope = config.layer(0).rope
    assert rope is not None
    return np.array(rope.frequencies)


def assert_holds(source: WeightSource, weights: dict[str, Any], **tolerance: float) -> None:
    assert set(source.names()) == set(weights)
    for name, expected in weights.items():
        result = source.tensor(name)
        assert result.dtype == np.float32
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, err_msg=name, **(tolerance or {"rtol": 0}))


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
    assert source.vocabulary.vocab_size == len(TOKENS)
    assert (source.vocabulary.bos_id, source.vocabulary.eos_ids) == (0, [259])
    description = source.description
    assert (description.kind, description.location) == ("directory", "m")
    assert len(description.sha256) == 2 + shards  # config.json, tokenizer.json, weights


def with_image(path: Path, **files: str) -> Path:
    """As Gemma 3's text models: a special token more than the embedding has rows."""
    config = LLAMA | {"vocab_size": len(TOKENS)}
    payload = json.loads(tokenizer_json())
    payload["added_tokens"].append(
        payload["added_tokens"][0] | {"id": len(TOKENS), "content": "<image>"}
    )
    texts = {"tokenizer.json": json.dumps(payload), **files}
    return write_directory(path, config, files=texts)


def test_a_special_token_without_embedding_is_left_out(tmp_path: Path) -> None:
    source = open_source(str(with_image(tmp_path / "m")))
    plain = open_source(str(write_directory(tmp_path / "p")))
    assert source.vocabulary.vocab_size == len(TOKENS)
    assert source.description.left_out == ["<image>"]
    ours, theirs = (Tokenizer.from_json(item.vocabulary.tokenizer_json) for item in (source, plain))
    assert ours.fingerprint == theirs.fingerprint
    assert ours.encode("an <image>") == theirs.encode("an <image>")


def test_a_special_token_that_a_template_writes_is_missed(tmp_path: Path) -> None:
    path = with_image(tmp_path / "m", **{"chat_template.jinja": "<image>{{ messages }}"})
    with pytest.raises(ExportError, match="has 261 tokens, but the embedding has only 260"):
        open_source(str(path))


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3, TIED])
def test_gguf_equals_the_directory(tmp_path: Path, config: dict[str, Any]) -> None:
    directory = open_source(str(write_directory(tmp_path / "d", config)))
    file = open_source(str(write_gguf(tmp_path / "tiny-Q4_K_M.gguf", config)))
    assert_holds(file, tiny_weights(config))
    assert isinstance(file.config, ModelConfig)
    for field in file.config.__struct_fields__:
        expected, result = getattr(directory.config, field), getattr(file.config, field)
        assert result == (pytest.approx(expected) if field == "norm_eps" else expected) or (
            field == "name"
        ), field
    assert file.config.name == "tiny"
    assert file.vocabulary.vocab_size == directory.vocabulary.vocab_size
    both = (file.vocabulary, directory.vocabulary)
    assert both[0].bos_id == both[1].bos_id
    assert both[0].eos_ids == both[1].eos_ids
    assert both[0].fingerprint == both[1].fingerprint


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
    from pilotfish.export.sources.gguf_file import GgufFile

    result = GgufFile(tmp_path / "k.gguf").tensor("token_embd.weight")
    assert result.shape == (3, block)
    assert not result.any()


def test_rotary_divisors_of_gguf_equal_llama3_scaling(tmp_path: Path) -> None:
    stated = frequencies(config_of(LLAMA | {"rope_scaling": LLAMA3_ROPE}))
    plain = frequencies(config_of(LLAMA))
    path = write_gguf(
        tmp_path / "a.gguf", extra={"rope_freqs.weight": (plain / stated).astype(np.float32)}
    )
    source = open_source(str(path))
    np.testing.assert_allclose(frequencies(source.config), stated, rtol=1e-6)
    assert "rope_freqs.weight" not in source.names()


def test_checkpoint_without_prefix_and_with_leftovers(tmp_path: Path) -> None:
    weights = tiny_weights(TIED)
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    bare["lm_head.weight"] = weights["model.embed_tokens.weight"]  # stored although tied
    bare["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    source = DirectorySource(write_directory(tmp_path, TIED, weights=bare), silent)
    assert_holds(source, weights)


def test_end_tokens_and_chat_templates(tmp_path: Path) -> None:
    def source(name: str, **files: Any) -> DirectorySource:
        return DirectorySource(write_directory(tmp_path / name, files=files), silent)

    plain = source("a")
    assert (plain.vocabulary.eos_ids, plain.vocabulary.chat_template) == ([259], None)
    listed = source("b", **{"generation_config.json": {"eos_token_id": [5, 259, 5]}})
    assert listed.vocabulary.eos_ids == [5, 259]
    single = source("c", **{"tokenizer_config.json": {"chat_template": "one"}})
    assert single.vocabulary.chat_template == "one"
    several = [{"name": "tool", "template": "t"}, {"name": "default", "template": "two"}]
    named = source("d", **{"tokenizer_config.json": {"chat_template": several}})
    assert named.vocabulary.chat_template == "two"
    both = {"chat_template.jinja": "three", "tokenizer_config.json": {"chat_template": "one"}}
    assert source("e", **both).vocabulary.chat_template == "three"
    with pytest.raises(ExportError, match="eos_token_id 9999"):
        source("f", **{"generation_config.json": {"eos_token_id": 9999}})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"settings": {"{}.expert_count": 8}}, r"llama\.expert_used_count is missing"),
        (
            {"settings": {"{}.attention.sliding_window": 64}},
            r"llama\.attention\.sliding_window is 64",
        ),
        ({"settings": {"{}.rope.scaling.type": "yarn"}}, "'yarn' needs llama.rope.scaling.factor"),
        ({"settings": {"{}.rope.scaling.type": "dynamic"}}, "'dynamic'"),
        ({"settings": {"{}.rope.dimension_count": 4}}, "rotates all 8 channels"),
        ({"settings": {"{}.attention.value_length": 4}}, "different width"),
        ({"settings": {"split.count": 2}}, "one of several parts"),
        ({"extra": {"blk.0.ffn_gate_exps.weight": np.zeros((2, 32), np.float32)}}, "ffn_gate_exps"),
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
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "bloom")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ExportError, match=r"architecture 'bloom'.*--dialect llamacpp"):
        open_source(str(tmp_path / "a.gguf"))


def test_a_text_within_an_unknown_wrapper_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "strange_vl", "text_config": LLAMA}
    path = write_directory(tmp_path / "m", config, weights=tiny_weights(LLAMA))
    with pytest.raises(ExportError, match=r"'strange_vl' with a text_config.*alone"):
        open_source(str(path))


def test_progress_of_hashing(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    source = open_source(str(write_gguf(tmp_path / "a.gguf")), lambda *step: seen.append(step))
    assert source.description.sha256.keys() == {"a.gguf"}
    size = (tmp_path / "a.gguf").stat().st_size
    assert seen[-1] == ("hash", size, size)
