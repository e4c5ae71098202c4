"""GPTQ, AWQ, compressed-tensors and fp8: read as they were written, and kept."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.quantize import quantize
from pilotfish.export.sources import open_source
from tests.export.test_kept_blocks import exact, logits
from tests.support import packers
from tests.support.packers import Rounded, Tensors, random_matrix, write_packed
from tests.support.runnable import needs
from tests.support.small_checkpoints import LLAMA, tiny_weights

SIZES = LLAMA | {"hidden_size": 64, "intermediate_size": 128}
# Each way to write a matrix: quantization_config, packer, bits, symmetric, columns shuffled.
Way = tuple[Mapping[str, Any], Callable[[Rounded], Tensors], int, bool, bool]


def gptq(bits: int, version: str) -> tuple[Mapping[str, Any], Callable[[Rounded], Tensors]]:
    fields = {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}
    return fields, lambda it: packers.gptq(it, bits, one_less=version == "gptq")


def compressed(
    bits: int, symmetric: bool
) -> tuple[Mapping[str, Any], Callable[[Rounded], Tensors]]:
    fields = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return fields, lambda it: packers.compressed(it, bits, symmetric=symmetric)


def auto_round(bits: int, style: str) -> tuple[Mapping[str, Any], Callable[[Rounded], Tensors]]:
    """As AutoRound writes it: GPTQ's first format without g_idx, or AWQ."""
    fields = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "data_type": "int",
              "packing_format": f"auto_round:auto_{style}", "sym": False}  # fmt: skip
    if style == "awq":
        return fields, packers.awq

    def pack(matrix: Rounded) -> Tensors:
        tensors = packers.gptq(matrix, bits, one_less=True)
        return {part: each for part, each in tensors.items() if part != "g_idx"}

    return fields, pack


AWQ = ({"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}, packers.awq)
WAYS: dict[str, Way] = {
    "gptq": (*gptq(4, "gptq"), 4, True, False),
    "gptq, asymmetric": (*gptq(4, "gptq"), 4, False, False),
    "gptq, act-order": (*gptq(4, "gptq"), 4, False, True),
    "gptq v2, 8 bits": (*gptq(8, "gptq_v2"), 8, False, False),
    "awq": (*AWQ, 4, False, False),
    "AutoRound": (*auto_round(4, "gptq"), 4, False, False),
    "AutoRound, 8 bits": (*auto_round(8, "gptq"), 8, True, False),
    "AutoRound, as AWQ": (*auto_round(4, "awq"), 4, False, False),
    "compressed-tensors": (*compressed(4, True), 4, True, False),
    "compressed-tensors, asymmetric": (*compressed(8, False), 8, False, True),
}


def checkpoint(
    path: Path, way: str, group: int = 32, seed: int = 0, config: dict[str, Any] = SIZES
) -> tuple[Path, dict[str, Rounded]]:
    """Write a model whose projections are packed; q, k and v share the order of their columns."""
    reply, packer, bits, symmetric, shuffled = WAYS[way]
    tensors: dict[str, Any] = {}
    matrices: dict[str, Rounded] = {}
    for name, value in tiny_weights(config).items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            scaled = value / 8 if value.ndim == 2 else 1 + value / 10
            tensors[name] = scaled.astype(np.float16)
            continue
        rows, width = value.shape
        # the same seed for matrices of the same input
        random = np.random.default_rng([seed, width])
        groups = random_matrix(
            random, 8, width, bits=bits, group=min(group, width), symmetric=True, shuffled=shuffled
        ).groups
        ours = random_matrix(
            np.random.default_rng([seed, len(matrices)]),
            rows,
            width,
            bits=bits,
            group=min(group, width),
            symmetric=symmetric,
        )._replace(groups=groups)
        matrices[name] = ours
        tensors |= {f"{module}.{part}": each for part, each in packer(ours).items()}
    return write_packed(path, config, reply, tensors), matrices


def projections(matrices: dict[str, Any], packer: Any) -> dict[str, Any]:
    """Return the tensors of a checkpoint with these matrices, in a packer's parts."""
    tensors: dict[str, Any] = {n: v for n, v in tiny_weights(SIZES).items() if "_proj" not in n}
    for name, ours in matrices.items():
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": array for part, array in packer(ours).items()}
    return tensors


@given(way=st.sampled_from(sorted(WAYS)), group=st.sampled_from([32, 64, 128]), seed=st.integers(0))
@settings(max_examples=20)
def test_packed_weights_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, way: str, group: int, seed: int
) -> None:
    path, matrices = checkpoint(tmp_path_factory.mktemp("m"), way, group, seed % 2**32)
    source = open_source(str(path))
    for name, matrix in matrices.items():
        np.testing.assert_array_equal(source.tensor(name), matrix.floats())
        selection = source.quantized(name)
        assert selection is not None
        np.testing.assert_array_equal(selection.floats(), matrix.floats())
    assert source.quantized("model.embed_tokens.weight") is None


@pytest.mark.parametrize("dialect", ["opset24", "contrib", "tensorrt"])
@pytest.mark.parametrize("way", WAYS)
def test_packed_weights_are_kept_and_computed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, dialect: str
) -> None:
    needs(dialect)
    path, _ = checkpoint(tmp_path / "m", way)
    plain = export_model(str(path), tmp_path / "fp32")
    model = export_model(str(path), tmp_path / "kept", precision="stored", dialect=dialect)
    wanted = logits(Decoder(plain, provider="cpu"))
    rounded = logits(Decoder(model, provider="cpu"))
    assert float((rounded - wanted).std()) < 0.05 * float(wanted.std())
    result = logits(exact(model, monkeypatch))
    np.testing.assert_allclose(result, wanted, atol=1e-4 * float(np.abs(wanted).max()))


def test_int4_finds_the_groups_of_a_symmetric_checkpoint_again(tmp_path: Path) -> None:
    path, matrices = checkpoint(tmp_path / "m", "gptq", group=128)
    source = open_source(str(path))
    for name, matrix in matrices.items():
        result = quantize(name, source.tensor(name), 4).floats()
        np.testing.assert_allclose(result, matrix.floats(), atol=1e-6 * np.abs(result).max())


@pytest.mark.parametrize("dialect", ["opset24", "contrib", "tensorrt"])
@pytest.mark.parametrize(
    ("way", "group"),
    [
        *((way, group) for way in ("gptq, asymmetric", "awq") for group in (32, 64, 128)),
        ("gptq", 128),
        ("gptq, act-order", 32),
        ("compressed-tensors", 64),
    ],
)
def test_int4_keeps_the_codes_of_a_checkpoint_in_4_bits(
    tmp_path: Path, way: str, group: int, dialect: str
) -> None:
    needs(dialect)
    path, _ = checkpoint(tmp_path / "m", way, group)
    made, exact_blocks = (
        export_model(str(path), tmp_path / name, precision=name, dialect=dialect, check=False)
        for name in ("int4", "stored")
    )
    wanted = {name: array for name, array in initializers(exact_blocks).items() if "_proj" in name}
    result = initializers(made)
    assert {name for name in result if "_proj" in name} == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(result[name], array)


def initializers(artifact: Artifact) -> dict[str, Any]:
    graph = onnx.load(artifact.graph_path).graph
    return {item.name: numpy_helper.to_array(item) for item in graph.initializer}


def test_fused_matrices_are_kept_in_their_parts(tmp_path: Path) -> None:
    reply, packer, *_ = WAYS["gptq, asymmetric"]
    config = {**SIZES, "model_type": "phi3", "pad_token_id": 0}
    random = np.random.default_rng(0)
    rows = {"self_attn.qkv_proj": 64 + 2 * 32, "mlp.gate_up_proj": 256}
    rows |= {"self_attn.o_proj": 64, "mlp.down_proj": 64}
    tensors = {n: v for n, v in tiny_weights(config).items() if "_proj" not in n}
    floats = {}
    for layer in range(2):
        for module, count in rows.items():
            width = 128 if "down" in module else 64
            ours = random_matrix(random, count, width, bits=4, group=32, symmetric=False)
            prefix = f"model.layers.{layer}.{module}"
            floats[prefix] = ours.floats()
            tensors |= {f"{prefix}.{part}": each for part, each in packer(ours).items()}
    source = open_source(str(write_packed(tmp_path / "m", config, reply, tensors)))
    parts = [source.quantized(f"model.layers.1.self_attn.{part}_proj.weight") for part in "qkv"]
    result = np.concatenate([part.floats() for part in parts if part is not None])
    np.testing.assert_array_equal(result, floats["model.layers.1.self_attn.qkv_proj"])


# 8 of 64 columns: as many scales as rows
@pytest.mark.parametrize("block", [None, 48, 8])
def test_fp8_is_dequantised_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, block: int | None
) -> None:
    tensors: dict[str, Any] = {}
    wanted = {}
    for name, value in tiny_weights(SIZES).items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            packed, wanted[name] = packers.float8(value, block)
            tensors |= {f"{module}.{part}": each for part, each in packed.items()}
            tensors[f"{module}.input_scale"] = np.ones(1, np.float32)
        else:
            tensors[name] = value
    fields = {"quant_method": "fp8", "weight_block_size": block and [block, block]}
    path = write_packed(tmp_path / "m", SIZES, fields, tensors)
    source = open_source(str(path))
    assert "fp8" in caplog.text
    assert "dequantised" in caplog.text
    for name, floats in wanted.items():
        np.testing.assert_array_equal(source.tensor(name), floats)
    with pytest.raises(ExportError, match="stores its weights as floats"):
        export_model(source, tmp_path / "a", precision="stored")
    assert export_model(source, tmp_path / "a", precision="int8").manifest.precision == "int8"


def test_biases_of_zeros_that_quantisers_write_are_dropped_and_others_refused(
    tmp_path: Path,
) -> None:
    reply, packer, *_ = WAYS["gptq"]
    path, matrices = checkpoint(tmp_path / "m", "gptq")
    tensors = projections(matrices, packer)
    for name, ours in matrices.items():
        tensors[f"{name.removesuffix('.weight')}.bias"] = np.zeros(len(ours.codes), np.float16)
    write_packed(path, SIZES, reply, tensors)
    assert not any(name.endswith("bias") for name in open_source(str(path)).names())
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    write_packed(path, SIZES, reply, tensors)
    with pytest.raises(ExportError, match=r"up_proj\.bias"):
        open_source(str(path))


@pytest.mark.parametrize(
    ("part", "broken", "named"),
    [
        ("scales", lambda it: it[:, :-8], "contradict each other"),
        ("qzeros", lambda it: it[:-1], "contradict each other"),
        ("qzeros", lambda it: it * 0 - 1, "as 0, others as 16"),
        ("g_idx", lambda it: it * 0, "contradict each other"),
        ("g_idx", lambda it: it + 7, "contradict each other"),
        ("qweight", lambda it: it.astype(np.float32), "of type F32"),
        ("qweight", lambda it: it.astype(np.int64), "of type I64"),
        ("qzeros", lambda it: it.view(np.int8), "of type I8"),
        ("qweight", lambda it: it[:, :-8], "has shape"),
    ],
)
def test_damaged_matrices_are_refused(
    tmp_path: Path, part: str, broken: Callable[[Any], Any], named: str
) -> None:
    reply, packer, *_ = WAYS["gptq, asymmetric"]
    path, matrices = checkpoint(tmp_path / "m", "gptq, asymmetric")
    tensors = projections(matrices, packer)
    spoilt = f"model.layers.1.mlp.up_proj.{part}"
    tensors[spoilt] = broken(tensors[spoilt])
    write_packed(path, SIZES, reply, tensors)
    with pytest.raises(ExportError, match=named):
        export_model(str(path), tmp_path / "a", precision="stored")
    assert not (tmp_path / "a").exists()


def test_matrices_of_autoround_may_have_other_bits_each(tmp_path: Path) -> None:
    """Without g_idx, nothing but the tensors says so."""
    path, matrices = checkpoint(tmp_path / "m", "AutoRound")
    tensors = projections(matrices, WAYS["AutoRound"][1])
    rows, width = matrices["model.layers.0.mlp.up_proj.weight"].codes.shape
    wide = random_matrix(np.random.default_rng(1), rows, width, bits=8, group=32, symmetric=False)
    for part, each in WAYS["AutoRound, 8 bits"][1](wide).items():
        tensors[f"model.layers.0.mlp.up_proj.{part}"] = each
    write_packed(path, SIZES, WAYS["AutoRound"][0], tensors)
    source = open_source(str(path))
    for name, matrix in {**matrices, "model.layers.0.mlp.up_proj.weight": wide}.items():
        np.testing.assert_array_equal(source.tensor(name), matrix.floats())


def test_zero_points_of_a_byte_each_are_refused(tmp_path: Path) -> None:
    """As compressed-tensors wrote them before it packed them: not what lies in words."""
    reply, packer, *_ = WAYS["compressed-tensors, asymmetric"]
    path, matrices = checkpoint(tmp_path / "m", "compressed-tensors, asymmetric")
    tensors = projections(matrices, packer)
    for name, ours in matrices.items():
        tensors[f"{name.removesuffix('.weight')}.weight_zero_point"] = (ours.zeros - 128).astype(
            np.int8
        )
    write_packed(path, SIZES, reply, tensors)
    with pytest.raises(ExportError, match="weight_zero_point is of type I8"):
        export_model(str(path), tmp_path / "a")


def weights_of(strategy: str, **more: Any) -> dict[str, Any]:
    """What compressed-tensors says of one group of matrices."""
    return {"group_0": {"targets": ["Linear"], "weights": {"strategy": strategy, **more}}}


def test_blocks_of_compressed_tensors_have_the_size_that_is_stated(tmp_path: Path) -> None:
    config = LLAMA | {"hidden_size": 96, "intermediate_size": 96}
    tensors: dict[str, Any] = {}
    wanted = {}
    for name, value in tiny_weights(config).items():
        module = name.removesuffix(".weight")
        tensors[name] = value
        if module.endswith("_proj"):
            packed, wanted[name] = packers.float8(value, 24)
            codes, scales = packed.values()
            tensors |= {name: codes, f"{module}.weight_scale": scales}
    fields = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": weights_of("block", block_structure=[24, 24]),
    }
    source = open_source(str(write_packed(tmp_path / "m", config, fields, tensors)))
    for name, floats in wanted.items():
        np.testing.assert_array_equal(source.tensor(name), floats)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": ["gptq"]}, "quantised by"),
        ({"quant_method": {}}, "quantised by"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": ["gptq"]}, "checkpoint_format"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized",
          "config_groups": {"a": weights_of("block", block_structure=[8, 8])["group_0"],
                            "b": weights_of("block", block_structure=[4, 4])["group_0"]}},
         "block_structure"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized",
          "config_groups": weights_of("block", block_structure="8by8")}, "block_structure"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized",
          "transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}},
         "transform_config"),
        ({"quant_method": "gptq", "bits": 4}, "no matrix is"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"},
         "packing_format"),
        ({"quant_method": "auto-round", "bits": 4, "act_bits": 8}, "act_bits"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type"),
        ({"quant_method": "auto-round", "bits": 2}, "bits"),
    ],
)  # fmt: skip
def test_settings_that_say_another_model_are_refused(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    path = write_packed(tmp_path / "m", LLAMA, settings, tiny_weights(LLAMA))
    with pytest.raises(ExportError, match=named):
        open_source(str(path))
