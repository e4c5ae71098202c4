"""Forms of folders and files that cannot be exported are refused with what the user can do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.sources import open_source
from pilotfish.export.sources.gguf_file import GgufFile
from tests.export.test_packed import SIZES, compressed
from tests.support import packers
from tests.support.packers import write_packed
from tests.support.small_checkpoints import LLAMA, add_setting, tiny_weights, write_directory

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"adapter_config.json": b"{}"},
         r"is an adapter.* python -c \".*merge_and_unload\(\)\.save_pretrained\('MERGED'\)"),
        ({"params.json": b"{}", "consolidated.safetensors": b""}, r"params\.json is in the form"),
        ({"m-Q4_0.gguf": b"", "n.gguf": b""}, r"give one of them .* such as m-Q4_0\.gguf"),
        ({"notes.txt": b""}, "this folder is not a Hugging Face model"),
    ],
)  # fmt: skip
def test_folders_without_a_configuration(
    tmp_path: Path, files: Mapping[str, bytes], named: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ExportError, match=rf"has no config\.json: .*{named}"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["pytorch_model.bin"], r"only pickled weights.* python -c .*save_pretrained\('CONVERTED"),
        (["openvino_model.xml", "openvino_model.bin"], "a model of OpenVINO"),
        (["onnx/model_q4.onnx"], r"a graph of another exporter \(model_q4\.onnx\)"),
        (["tf_model.h5"], r"TensorFlow or Flax only \(tf_model\.h5\)"),
        (["flax_model.msgpack"], r"TensorFlow or Flax only \(flax_model\.msgpack\)"),
        (["consolidated.safetensors"], "form of the model's authors"),
        (["it.gguf"], r"give one of them instead of the folder, such as it\.gguf"),
        (["model-00001-of-00002.safetensors"], "no model.safetensors.index.json: the download"),
        ([], "no safetensors file"),
    ],
)
def test_folders_without_weights_in_this_form(tmp_path: Path, files: list[str], named: str) -> None:
    path = write_directory(tmp_path / "m")
    (path / "model.safetensors").unlink()
    for name in files:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"x")
    with pytest.raises(ExportError, match=named):
        open_source(str(path))


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "m", shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ExportError, match=r"model-00002-of-00003\.safetensors cannot be read: .*"
                       "download is incomplete"):  # fmt: skip
        open_source(str(path))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "m.gguf"])
def test_pointers_of_git_lfs_are_named(tmp_path: Path, name: str) -> None:
    path = write_directory(tmp_path / "m")
    (path / name).write_bytes(POINTER)
    with pytest.raises(ExportError, match=rf"{name} is a pointer of Git LFS.*git lfs pull"):
        open_source(str(path / name if name.endswith("gguf") else path))


def other_file(path: Path, architecture: str, settings: Mapping[str, Any]) -> str:
    writer = gguf.GGUFWriter(path, architecture or "it")
    for key, value in settings.items():
        add_setting(writer, key, value)
    writer.add_tensor("blk.0.x.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not architecture:  # files of other kinds have no such key
        path.write_bytes(
            path.read_bytes().replace(b"general.architecture", b"general.a_chitecture")
        )
    return str(path)


@pytest.mark.parametrize("dialect", ["auto", "llamacpp"])
@pytest.mark.parametrize(
    ("architecture", "settings", "named"),
    [
        ("clip", {"general.type": "mmproj"}, "mmproj.*: give the GGUF file of its text model"),
        ("clip", {}, "mmproj"),
        ("", {"general.type": "imatrix"}, "an importance matrix"),
        ("llama", {"general.type": "adapter"}, "an adapter.*llama-export-lora"),
        ("controlvector", {}, "a control vector"),
        ("llama", {"split.count": 3}, "several parts .*llama-gguf-split --merge"),
        ("", {"split.count": 3}, "several parts .*llama-gguf-split --merge"),
        ("", {}, r"does not state general\.architecture"),
    ],
)
def test_gguf_files_that_are_no_model(
    tmp_path: Path, architecture: str, settings: Mapping[str, Any], named: str, dialect: str
) -> None:
    file = other_file(tmp_path / "m.gguf", architecture, settings)
    with pytest.raises(ExportError, match=named):
        export_model(file, tmp_path / "out", dialect=dialect)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("mamba", {"mamba.ssm.conv_kernel": 4}),
        ("rwkv7", {"rwkv7.wkv.head_size": 64}),
        ("bert", {"bert.attention.causal": False}),
        ("t5", {"t5.decoder_start_token_id": 0}),
    ],
)
def test_llama_cpp_is_recommended_only_if_it_runs_the_file(
    tmp_path: Path, architecture: str, settings: Mapping[str, Any]
) -> None:
    file = other_file(tmp_path / "m.gguf", architecture, settings)
    with pytest.raises(ExportError, match="cannot be exported as a graph") as refused:
        open_source(file)
    assert "llamacpp" not in str(refused.value)
    with pytest.raises(ExportError, match=r"roll back|token by token"):
        export_model(file, tmp_path / "out", dialect="llamacpp")
    with pytest.raises(ExportError, match="or use --dialect llamacpp"):
        open_source(other_file(tmp_path / "n.gguf", "plamo", {}))


@pytest.mark.parametrize("bits", [2, 3, 5, 6, "4"])
def test_widths_of_compressed_tensors_are_refused_by_name(tmp_path: Path, bits: Any) -> None:
    fields, _ = compressed(4, True)
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int"}}}
    config = LLAMA | {"quantization_config": {**fields, "config_groups": groups}}
    path = write_directory(tmp_path / "m", config)
    with pytest.raises(ExportError, match=f"num_bits .* is {bits!r}, but only 4 or 8.*original"):
        open_source(str(path))


@pytest.mark.parametrize("keys", [("quantization",), ("quantization", "quantization_config")])
def test_folders_of_mlx_are_refused_by_name(tmp_path: Path, keys: tuple[str, ...]) -> None:
    config = LLAMA | {key: {"group_size": 64, "bits": 4} for key in keys}
    path = write_directory(tmp_path / "m", config)
    with pytest.raises(ExportError, match=r"quantised by MLX.*give the original weights"):
        open_source(str(path))


def test_weights_of_other_types_are_not_called_unquantised(tmp_path: Path) -> None:
    weights: dict[str, Any] = tiny_weights(SIZES)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].astype(ml_dtypes.float8_e5m2)
    path = write_packed(tmp_path / "m", SIZES, {"quant_method": "fp8"}, weights)
    with pytest.raises(ExportError, match=r"F8_E5M2, which is not supported.*the original ones"):
        open_source(str(path))


def test_scales_of_a_quantised_cache_are_left_aside(tmp_path: Path) -> None:
    weights: dict[str, Any] = tiny_weights(SIZES)
    name = "model.layers.1.self_attn.k_proj.weight"
    packed, floats = packers.float8(weights[name], None)
    weights |= {f"{name.removesuffix('.weight')}.{part}": each for part, each in packed.items()}
    weights |= {f"model.layers.1.self_attn.{part}_scale": np.ones(1, np.float32) for part in "kv"}
    weights["model.layers.1.self_attn.k_proj.output_scale"] = np.ones(1, np.float32)
    fields = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    source = open_source(str(write_packed(tmp_path / "m", SIZES, fields, weights)))
    np.testing.assert_array_equal(source.tensor(name), floats)
    assert not [each for each in source.names() if "scale" in each]


def test_the_settings_of_one_expert_are_a_mixture(tmp_path: Path) -> None:
    """All tokens use the only expert, with weight 1."""
    config = LLAMA | {"model_type": "mixtral", "num_local_experts": 1, "num_experts_per_tok": 1}
    weights: dict[str, Any] = {}
    for name, value in tiny_weights(LLAMA).items():
        turned = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
        part = next((part for part in turned if f".mlp.{part}." in name), "")
        prefix = name.partition("mlp.")[0] + "block_sparse_moe."
        weights[f"{prefix}experts.0.{turned[part]}.weight" if part else name] = value
        if part == "up_proj":
            weights[f"{prefix}gate.weight"] = np.zeros((1, 32), np.float32)
    path = write_directory(tmp_path / "m", config, weights=weights)
    assert export_model(str(path), tmp_path / "out").manifest.architecture == "mixtral"


def test_a_gguf_file_without_the_axis_of_its_only_expert_has_it(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((4, 32), np.float32))
    writer.add_tensor("blk.0.ffn_up_exps.bias", np.zeros((1, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "m.gguf")
    assert [info.shape for info in file.tensors.values()] == [(1, 4, 32), (1, 4)]
    assert file.tensor("blk.0.ffn_up_exps.weight", 0).shape == (4, 32)


@pytest.mark.parametrize("stated", [{}, {"quant_method": "modelopt"}])
def test_fp8_of_modelopt_is_read_like_other_fp8(tmp_path: Path, stated: dict[str, str]) -> None:
    weights: dict[str, Any] = tiny_weights(SIZES)
    name = "model.layers.1.self_attn.k_proj.weight"
    packed, floats = packers.float8(weights[name], None)
    weights |= {f"{name.removesuffix('.weight')}.{part}": each for part, each in packed.items()}
    weights[name.replace("weight", "input_scale")] = np.ones((), np.float32)
    fields = {"producer": {"name": "modelopt"}, "quant_algo": "FP8", **stated}
    source = open_source(str(write_packed(tmp_path / "m", SIZES, fields, weights)))
    np.testing.assert_array_equal(source.tensor(name), floats)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"'modelopt' \(NVFP4\), but only"),
        ({"quant_algo": "NVFP4", "producer": {}}, r"'modelopt' \(NVFP4\).*give the original"),
        ({"weights": "int4"}, r"does not state quant_method \(it has weights\), but only"),
        ({"quant_method": "bitnet", "quantization_mode": "online"}, "rounded to .* in each pass"),
        ({"quant_method": "bitnet"}, "packed into 2 bits.*give rounded, unpacked weights"),
    ],
)
def test_other_quantisations_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    path = write_directory(tmp_path / "m", LLAMA | {"quantization_config": fields})
    with pytest.raises(ExportError, match=words):
        open_source(str(path))
