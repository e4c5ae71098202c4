"""Weights with which no runtime can compute are refused, and a good artifact stays in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from pilotfish.cli import main
from pilotfish.engines.artifact import Artifact
from pilotfish.export.checked_weights import CheckedWeights, check_tensors
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.sources.gguf_blocks import FLOAT_BYTES, HALF_EXPONENT
from pilotfish.export.sources.gguf_file import GgufFile
from tests.export.test_packed import SIZES, checkpoint
from tests.support import packers
from tests.support.genai_folders import genai_folder
from tests.support.packers import write_packed
from tests.support.small_checkpoints import LLAMA, tiny_weights, write_directory, write_gguf
from tests.support.tiny import tiny_artifact

UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
HEAD = "lm_head.weight"


def spoilt(name: str, value: float, place: tuple[int, ...], config: Any = SIZES) -> dict[str, Any]:
    weights = tiny_weights(config)
    weights[name][place] = value
    return weights


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize(
    ("name", "place", "value"),
    [(UP, (70, 3), np.nan), (NORM, (5,), np.inf), ("model.embed_tokens.weight", (263, 0), -np.inf),
     (HEAD, (0, 9), np.nan)],
)  # fmt: skip
def test_numbers_that_are_none_are_refused_with_their_place(
    tmp_path: Path, name: str, place: tuple[int, ...], value: float, precision: Any
) -> None:
    path = write_directory(tmp_path / "m", SIZES, weights=spoilt(name, value, place))
    with pytest.raises(ExportError, match="no finite number") as refused:
        export_model(str(path), tmp_path / "out", precision=precision)
    assert f"{name}{list(place)} is {value}" in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "precision", "reason"),
    [
        (65504.0, "fp16", None),
        (65519.0, "fp16", None),  # rounds to 65504
        (65520.0, "fp16", "too large for float16: choose --precision fp32"),
        (-70000.0, "fp16", "too large for float16: choose --precision fp32"),
        (1e38, "fp16", "too large to compute with"),
        (1e18, "fp32", None),
        (1e18, "int4", None),
        (-3e38, "fp32", "too large to compute with"),
        (3e38, "int4", "too large to compute with"),
    ],
)
def test_numbers_beyond_a_precision_are_refused(
    tmp_path: Path, value: float, precision: Any, reason: str | None
) -> None:
    path = write_directory(tmp_path / "m", SIZES, weights=spoilt(UP, value, (1, 2)))
    if reason is None:
        artifact = export_model(str(path), tmp_path / "out", precision=precision)
        for item in onnx.load(artifact.graph_path).graph.initializer:
            assert np.isfinite(onnx.numpy_helper.to_array(item)).all(), item.name
        return
    with pytest.raises(ExportError, match=reason) as refused:
        export_model(str(path), tmp_path / "out", precision=precision)
    assert f"{UP}[1, 2] is {value:g}" in str(refused.value)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4", "stored"])
@pytest.mark.parametrize("way", ["gptq", "awq", "compressed-tensors"])
def test_scales_of_packed_matrices_are_checked(tmp_path: Path, way: str, precision: Any) -> None:
    path, _ = checkpoint(tmp_path / "m", way)
    with safe_open(path / "model.safetensors", "numpy") as file:
        names = file.keys()  # the file itself cannot be iterated
        tensors = {name: file.get_tensor(name) for name in names}
    scales = "model.layers.1.mlp.up_proj."
    scales += "weight_scale" if way == "compressed-tensors" else "scales"
    tensors[scales][1, 0] = np.inf
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ExportError, match="no finite number") as refused:
        export_model(str(path), tmp_path / "out", precision=precision)
    assert f"{scales}[1, 0] is inf" in str(refused.value)


def test_codes_and_scales_of_fp8_are_checked(tmp_path: Path) -> None:
    weights = tiny_weights(SIZES)
    packed, _ = packers.float8(weights[UP], None)
    module = UP.removesuffix(".weight")
    parts = {f"{module}.{part}": np.copy(each) for part, each in packed.items()}
    fields = {"quant_method": "fp8"}
    parts[UP].view(np.uint8)[4, 5] = 0x7F
    path = write_packed(tmp_path / "m", SIZES, fields, weights | parts)
    with pytest.raises(ExportError) as refused:
        export_model(str(path), tmp_path / "out")
    assert f"{UP}[4, 5] is nan" in str(refused.value)
    parts[f"{module}.weight_scale"][2] = np.nan
    write_packed(path, SIZES, fields, weights | parts)
    with pytest.raises(ExportError) as refused:
        export_model(str(path), tmp_path / "out")
    assert f"{module}.weight_scale[2, 0] is nan" in str(refused.value)


def bad_scale(kind: gguf.GGMLQuantizationType) -> Callable[..., Any]:
    """Return gguf's quantisation with an infinite scale in block 2 of each matrix."""
    real = gguf.quantize

    def quantize(data: Any, form: Any) -> Any:
        stored = real(data, form)
        if form == kind and data.ndim == 2:
            size = gguf.GGML_QUANT_SIZES[kind][1]
            stored.view(np.uint8).reshape(-1, size)[2, :2] = (
                np.float16(np.inf).reshape(1).view(np.uint8)
            )
        return stored

    return quantize


@pytest.mark.parametrize(
    ("kind", "precision"),
    [*product(("Q4_0", "Q4_1", "Q8_0"), ("fp32", "int8", "int4", "stored", "gguf")),
     ("F16", "fp32"), ("F16", "gguf")],
)  # fmt: skip
def test_scales_of_gguf_blocks_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, precision: str
) -> None:
    form = gguf.GGMLQuantizationType[kind]
    monkeypatch.setattr(gguf, "quantize", bad_scale(form))
    path = write_gguf(tmp_path / "m.gguf", SIZES, kind=form)
    options: dict[str, Any] = {"precision": precision}
    if precision == "gguf":
        options = {"dialect": "llamacpp"}
    with pytest.raises(ExportError, match=r"finite number|NaN or infinite") as refused:
        export_model(str(path), tmp_path / "out", **options)
    assert "token_embd.weight" in str(refused.value)


def test_every_type_of_a_gguf_file_that_has_floats_is_checked_in_a_copy(tmp_path: Path) -> None:
    for name, starts in FLOAT_BYTES.items():
        kind = gguf.GGMLQuantizationType[name]
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        if weights == 1:
            continue
        for at in starts:  # the package dequantises a block with this scale to no number
            block = np.zeros((1, size), np.uint8)
            assert np.isfinite(gguf.quants.dequantize(block, kind)).all()
            block[0, at : at + 2] = np.array([HALF_EXPONENT], "<u2").view(np.uint8)
            with np.errstate(invalid="ignore"):
                assert not np.isfinite(gguf.quants.dequantize(block, kind)).all(), name
            writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
            writer.add_tensor("t.weight", np.repeat(block, 2, axis=0), raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            with pytest.raises(ExportError, match=r"t\.weight .* in block 0"):
                GgufFile(tmp_path / "m.gguf").check_numbers()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_floats_of_a_gguf_file_are_checked_in_a_copy(tmp_path: Path, value: float) -> None:
    path = write_gguf(tmp_path / "m.gguf", weights=spoilt(NORM, value, (5,), LLAMA))
    with pytest.raises(ExportError, match=r"blk\.1\.attn_norm\.weight .* in block 5"):
        export_model(str(path), tmp_path / "out", dialect="llamacpp")
    assert not (tmp_path / "out").exists()


def test_weights_of_a_genai_folder_and_of_an_artifact_are_checked(tmp_path: Path) -> None:
    for folder in (genai_folder(tmp_path / "g"), tiny_artifact(tmp_path / "a", layers=2).path):
        graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
        item = next(each for each in graph.initializer if each.name.endswith("norm.weight"))
        entries = {each.key: each.value for each in item.external_data}
        data = np.memmap(folder / entries["location"], np.uint8, "r+")
        data[int(entries["offset"]) :][:4] = np.float32(np.nan).reshape(1).view(np.uint8)
        data.flush()
        with pytest.raises(ExportError, match=r"norm\.weight .* NaN"):
            check_tensors(graph.initializer, folder)
    with pytest.raises(ExportError, match=r"norm\.weight .* NaN"):
        export_model(str(tmp_path / "g"), tmp_path / "out", dialect="genai")


def test_decays_whose_power_is_infinite_are_refused(tmp_path: Path) -> None:
    class Source:
        config = type("Config", (), {"name": "it"})

        def names(self) -> list[str]:
            return []

        def tensor(self, name: str) -> Any:
            return np.array([1.0, 89.0], np.float32)

        def stored(self, name: str) -> Mapping[str, Any]:
            return {}

    source: Any = Source()  # a source has more methods, which the check does not call
    with pytest.raises(ExportError, match=r"A_log\[1\] is 89, which is too large"):
        CheckedWeights(source, "fp32").tensor("model.layers.0.mamba.A_log")


def test_a_good_artifact_is_not_replaced_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write_directory(tmp_path / "good", SIZES), tmp_path / "bad"
    write_directory(bad, SIZES, weights=spoilt(UP, np.nan, (70, 3)))
    file = write_gguf(tmp_path / "bad.gguf", weights=spoilt(NORM, np.nan, (5,), LLAMA))
    out = tmp_path / "out"
    before = export_model(str(good), out).manifest.digest
    for source, options, words in (
        (bad, [], f"{UP}[70, 3] is nan, which is no finite number"),
        (bad, ["--precision", "int8"], f"{UP}[70, 3] is nan, which is no finite number"),
        (file, ["--precision", "fp16"], "blk.1.attn_norm.weight[5] is nan"),
        (file, ["--dialect", "llamacpp"], "blk.1.attn_norm.weight (F32) has a number in block 5"),
    ):
        assert main(["export", "model", str(source), "--out", str(out), *options]) == 65
        assert words in capsys.readouterr().err
        artifact = Artifact.open(out)
        artifact.verify()
        assert artifact.manifest.digest == before
    assert [each.name for each in tmp_path.glob(".out*")] == []
