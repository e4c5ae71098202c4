"""Weights in 4 and 8 bits: what was rounded before stays as it is, and a head has its own bits."""

from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from onnx import numpy_helper

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.manifest import Precision
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.blocks import BLOCK, LARGEST
from pilotfish.export.model import export_model
from pilotfish.export.quantize import quantize
from pilotfish.export.sources import open_source
from pilotfish.export.split import split_artifact
from tests.support.runnable import needs
from tests.support.small_checkpoints import LLAMA, tiny_weights, write_gguf
from tests.support.staged import Staged
from tests.support.tiny import tiny_artifact

Floats = NDArray[np.float32]
WIDTH = 8 * BLOCK


def weights(seed: int = 0, rows: int = 64) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, WIDTH), np.float32) / 8


def rounded(kind: Kind) -> Floats:
    """As a GGUF file has them."""
    result: Floats = gguf.dequantize(gguf.quantize(weights(), kind), kind)
    return result


def searched(kind: Kind) -> Floats:
    """As llama.cpp rounds by importance or in K-quants: any scale, not every code is there."""
    random = np.random.default_rng(1)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    raw = random.integers(0, 256, (64, WIDTH // gguf.GGML_QUANT_SIZES[kind][0], size), np.uint8)
    floats = {Kind.Q4_0: 2, Kind.Q4_K: 4}[kind]  # bytes of half-precision scales, in front
    raw[..., :floats] = np.full(floats // 2, 0.01, np.float16).view(np.uint8)
    if kind == Kind.Q4_0:
        raw[..., floats:] = raw[..., floats:] & 0x33 | 0x44  # codes 4 … 7: all below 0
    result: Floats = gguf.dequantize(raw.reshape(64, -1), kind)
    return result


def asymmetric(group: int) -> Floats:
    """As AWQ and GPTQ round with zero points; few groups have the codes 0 and 15."""
    random = np.random.default_rng(2)
    low = random.integers(0, 8, (64, WIDTH // group, 1))
    codes = random.integers(low, low + 8, (64, WIDTH // group, group))
    zeros = random.integers(3, 12, low.shape)
    scales = random.uniform(0.01, 0.02, low.shape).astype(np.float16)
    result: Floats = (codes - zeros).astype(np.float32) * scales
    return result.reshape(64, WIDTH)


def error(weight: Floats, bits: int) -> float:
    """Of the largest weight."""
    result = quantize("w", weight, bits)
    blocks = result.codes.reshape(len(weight), -1, BLOCK).astype(np.float32) - result.zero_point
    again = blocks * result.scales[..., None]
    if result.offsets is not None:
        again = again + result.offsets[..., None]
    largest = max(float(np.abs(weight).max()), 1e-9)
    return float(np.abs(again.reshape(weight.shape) - weight).max()) / largest


@pytest.mark.parametrize(
    ("weight", "bits", "most"),
    [
        pytest.param(rounded(Kind.Q4_0), 4, 0.0, id="Q4_0 in 4 bits"),
        pytest.param(rounded(Kind.Q4_0), 8, 0.0, id="Q4_0 in 8 bits"),
        pytest.param(rounded(Kind.Q5_0), 8, 0.0, id="Q5_0 in 8 bits"),
        pytest.param(rounded(Kind.Q8_0), 8, 0.0, id="Q8_0 in 8 bits"),
        pytest.param(searched(Kind.Q4_0), 4, 0.0, id="Q4_0 without its lowest code"),
        pytest.param(rounded(Kind.Q4_1), 4, 1e-6, id="Q4_1 in 4 bits"),
        pytest.param(searched(Kind.Q4_K), 4, 1e-6, id="Q4_K in 4 bits"),
        pytest.param(asymmetric(32), 4, 1e-6, id="zero points for 32 columns"),
        pytest.param(asymmetric(64), 4, 1e-6, id="zero points for 64 columns"),
        pytest.param(asymmetric(128), 4, 1e-6, id="zero points for 128 columns"),
        pytest.param(np.full((64, WIDTH), 0.3, np.float32), 4, 0.0, id="all alike"),
        pytest.param(np.zeros((64, WIDTH), np.float32), 4, 0.0, id="zeros"),
    ],
)
def test_what_was_rounded_before_is_kept(weight: Floats, bits: int, most: float) -> None:
    assert error(weight, bits) <= most


@pytest.mark.parametrize(("bits", "most"), [(4, 1 / 8), (8, 1 / 128)])
def test_other_weights_are_rounded_to_the_nearest(bits: int, most: float) -> None:
    assert 0 < error(weights(), bits) < most
    assert quantize("w", weights(), bits).offsets is None


@pytest.mark.parametrize(
    ("weight", "bits", "block"),
    [
        pytest.param(weights(), 8, 128, id="never rounded"),
        pytest.param(rounded(Kind.Q4_1), 8, 128, id="Q4_1, which 8 bits do not hold"),
        pytest.param(weights()[:, : 6 * BLOCK], 8, 64, id="a width that 128 does not divide"),
        pytest.param(weights()[:, : 3 * BLOCK], 8, BLOCK, id="a width that 64 does not divide"),
        pytest.param(rounded(Kind.Q8_0), 8, BLOCK, id="Q8_0, which is kept"),
        pytest.param(weights(), 4, BLOCK, id="4 bits"),
    ],
)
def test_8_bits_that_are_rounded_anew_have_wide_blocks(
    weight: Floats, bits: int, block: int
) -> None:
    result = quantize("w", weight, bits, widest=LARGEST)
    assert result.block == block
    assert result.scales.shape == (64, weight.shape[1] // block)
    steps = np.repeat(np.abs(result.scales), block, axis=1)
    assert (np.abs(result.floats() - weight) <= 1.001 * steps).all()
    assert quantize("w", weight, bits).block == BLOCK


@pytest.mark.parametrize("dialect", ["opset24", "contrib"])
def test_wide_blocks_compute_what_narrow_ones_do(tmp_path: Path, dialect: str) -> None:
    needs(dialect)
    wide = tiny_artifact(tmp_path / "wide", precision="int8", dialect=dialect)
    graph = onnx.load(wide.graph_path, load_external_data=False).graph
    blocks = {
        attribute.i
        for node in graph.node
        for attribute in node.attribute
        if attribute.name == "block_size"
    }
    assert max(blocks) > BLOCK
    tokens = np.arange(30)
    [out] = Decoder(wide).forward([Pass(0, tokens)])
    [wanted] = Decoder(tiny_artifact(tmp_path / "exact")).forward([Pass(0, tokens)])
    assert np.abs(out.logits - wanted.logits).std() < 0.03 * wanted.logits.std()


def test_blocks_that_lie_on_no_grid_do_not_spoil_those_that_do() -> None:
    mixed = np.concatenate([rounded(Kind.Q4_1), weights(seed=3, rows=20)])
    result = quantize("w", mixed, 4)
    assert error(mixed[:64], 4) <= 1e-6
    assert error(mixed, 4) < 1 / 15
    assert result.offsets is not None


def stored(artifact: Artifact) -> dict[str, NDArray[Any]]:
    graph = onnx.load(artifact.graph_path).graph
    return {item.name: numpy_helper.to_array(item) for item in graph.initializer}


def tiny_gguf(path: Path, kind: Kind) -> Path:
    config = LLAMA | {"hidden_size": 64}
    calm = {
        name: value / 8 if value.ndim == 2 else 1 + value / 10
        for name, value in tiny_weights(config).items()
    }
    return write_gguf(path, config, kind=kind, weights=calm)


@pytest.mark.parametrize("dialect", ["opset24", "contrib", "tensorrt"])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1])
def test_an_int4_export_of_4_bit_blocks_computes_what_the_file_does(
    tmp_path: Path, kind: Kind, dialect: str
) -> None:
    needs(dialect)
    path = tiny_gguf(tmp_path / "tiny.gguf", kind)
    tokens = np.arange(40) % open_source(str(path)).vocabulary.vocab_size
    logits = {}
    precisions: tuple[Precision, ...] = ("fp32", "int4", "int8")
    for precision in precisions:
        made = export_model(
            str(path),
            tmp_path / precision,
            precision=precision,
            dialect=dialect if precision != "fp32" else "auto",
        )
        [out] = Decoder(made).forward([Pass(0, tokens)])
        logits[precision] = out.logits.copy()
    exact = logits["fp32"]
    # what is left is activations in 8 bits, which int8 has too
    off = {name: float((result - exact).std() / exact.std()) for name, result in logits.items()}
    assert off["int4"] < 1.5 * off["int8"] + 1e-6 < 0.05


def test_what_is_kept_is_kept_in_stages_and_passes_the_strict_checker(tmp_path: Path) -> None:
    needs("opset24")
    path = tiny_gguf(tmp_path / "tiny.gguf", Kind.Q4_1)
    whole = export_model(str(path), tmp_path / "whole", precision="int4", dialect="opset24")
    onnx.checker.check_model(str(whole.graph_path), full_check=True)
    assert any(name.endswith(".offsets") for name in stored(whole))
    stages = split_artifact(whole.path, tmp_path / "cut", stages=2)
    assert {stage.manifest.head for stage in stages} == {"int8"}
    passes = [Pass(0, np.arange(20))]
    [wanted] = Decoder(whole).forward(passes)
    [result] = Staged(tmp_path / "cut", whole).forward(passes)
    np.testing.assert_array_equal(result.logits, wanted.logits)


@pytest.mark.parametrize("dialect", ["opset24", "contrib", "tensorrt"])
@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        ("llama", "model.embed_tokens.weight"),
        ("llama3", "lm_head.weight"),
        ("opt", "model.embed_tokens.weight"),
    ],
)
def test_int4_has_its_head_in_8_bits(
    tmp_path: Path, architecture: str, head: str, dialect: str
) -> None:
    needs(dialect)
    made = tiny_artifact(
        tmp_path / "a", architecture=architecture, precision="int4", dialect=dialect
    )
    assert (made.manifest.precision, made.manifest.head) == ("int4", "int8")
    decoder = Decoder(made)
    [out] = decoder.forward([Pass(0, np.arange(30))])
    exact = tiny_artifact(tmp_path / "b", architecture=architecture)
    wanted = out.hidden @ stored(exact)[head].T
    assert np.abs(out.logits - wanted).std() < 0.02 * wanted.std()  # of 4 bits: 0.1


def test_artifacts_from_before_say_nothing_of_their_head(tmp_path: Path) -> None:
    made = tiny_artifact(tmp_path / "a", precision="int4")
    old = msgspec.structs.replace(made.manifest, head=None)
    (tmp_path / "a" / "manifest.json").write_bytes(old.encode())
    assert b'"head"' not in old.encode()
    assert Artifact.open(tmp_path / "a").manifest == old
    assert tiny_artifact(tmp_path / "b", precision="int8").manifest.head is None
