"""Damaged, truncated and hostile files end in an ExportError; reading costs little memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.sources import open_source
from pilotfish.export.sources.gguf import GgufSource
from pilotfish.export.sources.safetensors_file import SafetensorsFile
from tests.support.examples import examples
from tests.support.small_checkpoints import (
    LLAMA,
    tiny_weights,
    write_directory,
    write_gguf,
)


def silent(label: str, done: int, total: int | None) -> None:
    """No progress."""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda path: (path / "config.json").unlink(), r"no config\.json"),
        (lambda path: (path / "config.json").write_text("{"), r"config\.json cannot be read"),
        (lambda path: (path / "tokenizer.json").unlink(), r"neither a tokenizer\.json"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), r"content of a tokenizer\.json"),
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
            lambda path: (
                (path / "model.safetensors").rename(path / "other.safetensors")
                and (path / "model.safetensors.index.json").write_text(
                    '{"weight_map": {"a": "gone.safetensors"}}'
                )
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
            lambda path: (
                write_directory(path / "other", shards=2)
                and [file.rename(path / file.name) for file in (path / "other").glob("model*")]
            ),
            r"both model\.safetensors and model\.safetensors\.index\.json",
        ),
        (
            lambda path: (path / "adapter_config.json").write_text("{}"),
            r"contains the adapter adapter_config\.json",
        ),
        (
            lambda path: (path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 9})),
            "has 260 tokens",
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
@examples(150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize(
    ("heads", "named"),
    [(0, "head_count is 0"), (3, "multiple of the 3 heads"), (2**31, "head_count is")],
)
def test_heads_that_cannot_be_are_refused(tmp_path: Path, heads: int, named: str) -> None:
    """As a damaged byte may have it."""
    path = write_gguf(tmp_path / "m.gguf")
    data, key = bytearray(path.read_bytes()), b"llama.attention.head_count"
    at = data.index(len(key).to_bytes(8, "little") + key) + 8 + len(key) + 4
    data[at : at + 4] = heads.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ExportError, match=named):
        GgufSource(path, silent).tensor("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize(
    ("name", "other"),
    [("blk.0.ffn_up.weight", "blk.1.ffn_up.weight"), ("eos_token_id", "bos_token_id")],
)
def test_what_is_there_twice_is_refused(tmp_path: Path, name: str, other: str) -> None:
    """Readers differ in which of the two they take."""
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(other.encode(), name.encode()))
    with pytest.raises(ExportError, match=f"{name} occurs twice"):
        GgufSource(path, silent)


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

    item = np.ones((1024, 4096), np.float32)  # 16 MiB
    save_file({f"w{i}": item for i in range(12)}, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    before = resident()
    for name in file.names():
        view = file.tensor(name)
        assert view.sum() == item.size
        assert resident() - before < 2 * item.nbytes
    assert not view.flags.owndata  # a view of the file, not a copy


DEEP = {"list": "[" * 50_000 + "]" * 50_000, "object": '{"a":' * 50_000 + "1" + "}" * 50_000}


@pytest.mark.parametrize("deep", DEEP)
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
     "tokenizer_config.json", "chat_template.json"],
)  # fmt: skip
def test_json_of_great_depth_is_refused(tmp_path: Path, name: str, deep: str) -> None:
    path = write_directory(tmp_path / "m", files={name: f'{{"chat_template": {DEEP[deep]}}}'})
    with pytest.raises(ExportError):
        open_source(str(path))


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 10**400},
        {"rms_norm_eps": 10**400},
        {"model_type": "mistral", "sliding_window": 4, "layer_types": [{}, []]},
        {"model_type": "lfm2", "layer_types": [[], {}]},
        {"quantization_config": {"quant_method": []}},
        {"hidden_act": "x" * 10**6},
        {"head_dim": {"x" * 10**6: 1}},
        {"x" * 10**6: 1},
        {"with\nlines\x1b[31m": 1},
        {f"key{i}": 1 for i in range(10**5)},
    ],
)
def test_settings_of_any_kind_are_refused_in_one_short_line(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = write_directory(tmp_path / "m", LLAMA)
    (path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(ExportError) as refused:
        open_source(str(path))
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 2_000


YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"rope_type": "longrope", "long_factor": [1.0] * 4}


@pytest.mark.parametrize(
    "table",
    [
        YARN | {"factor": 0.0},
        YARN | {"beta_fast": -1.0},
        YARN | {"beta_fast": 1e308},
        YARN | {"rope_theta": 1.0},
        YARN | {"factor": np.e, "mscale": 1.0, "mscale_all_dim": -10.0},
        {"rope_type": "linear", "factor": 1e-310},
        {"rope_type": "llama3", "factor": 1e-320, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "dynamic", "alpha": -3.0},
        {"rope_type": "dynamic", "alpha": 1e308, "rope_theta": 1e308},
        LONG | {"short_factor": [0.0] * 4},
        LONG | {"short_factor": ["a"] * 4},
        LONG | {"short_factor": [[1.0]] * 4},
        LONG | {"short_factor": [True, None, 1, 1]},
        LONG | {"short_factor": [1.0] * 4, "original_max_position_embeddings": 1},
    ],
)
def test_rotations_without_finite_angles_are_refused(tmp_path: Path, table: dict[str, Any]) -> None:
    path = write_directory(tmp_path / "m", LLAMA | {"rope_scaling": table})
    with pytest.raises(ExportError, match="rope_scaling"):
        open_source(str(path))


def test_a_context_beyond_all_tables_is_refused_before_they_are_made(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "m", LLAMA | {"max_position_embeddings": 2**31 - 1})
    with pytest.raises(ExportError, match="--context"):
        export_model(str(path), tmp_path / "out")
    artifact = export_model(str(path), tmp_path / "out", context=64)
    assert artifact.manifest.dimensions.context == 64
