"""Offsets of blocks in zero points and further columns: the same product, without a second one."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.blocks import Quantized
from pilotfish.export.dialects.folded_offsets import fold_offsets
from pilotfish.export.model import export_model
from pilotfish.export.sources.gguf_blocks import FORMATS, keep_blocks
from tests.support.small_checkpoints import LLAMA, random_blocks, tiny_weights, write_gguf

SHIFTED = ("Q2_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K")


def continued(x: np.ndarray, weight: Quantized, width: int) -> np.ndarray:
    """What `append_sums` does to x [K]; [K′]."""
    sums = x.reshape(-1, weight.block).sum(axis=1)
    copies, rest = divmod(width - len(x), len(sums))
    assert rest == 0
    return np.concatenate([x, *[sums] * copies])


def values(weight: Quantized) -> np.ndarray:
    """The weights of a folded weight, with a last block that may be partial; f64 [N, K′]."""
    width = weight.codes.shape[1]
    zeros, scales = (
        np.repeat(part.astype(float), weight.block, axis=1)[:, :width]
        for part in (weight.zeros, weight.scales)
    )
    return (weight.codes - zeros) * scales


def check(weight: Quantized, seed: int) -> None:
    folded = fold_offsets(weight)
    assert folded.offsets is None
    assert folded.codes.max() < 2**weight.bits > folded.zeros.max()
    x = np.random.default_rng(seed).standard_normal(weight.codes.shape[1])
    wanted, terms = weight.floats().astype(float) @ x, np.abs(weight.floats()) @ np.abs(x)
    result = values(folded) @ continued(x, weight, folded.codes.shape[1])
    assert (np.abs(result - wanted) <= 1e-4 * terms).all()


@given(
    name=st.sampled_from(SHIFTED),
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    supers=st.integers(1, 3),
)
def test_the_product_is_the_same(name: str, seed: int, rows: int, supers: int) -> None:
    stored = random_blocks(np.random.default_rng(seed), Kind[name], rows, 256 * supers)
    weight = keep_blocks(stored, FORMATS[name])
    if weight.offsets is not None:
        check(weight, seed)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_equal_weights_and_offsets_beyond_all_codes_are_kept(bits: int) -> None:
    random = np.random.default_rng(2)
    codes = random.integers(0, 2**bits, (6, 128), np.uint8)
    scales = random.uniform(-0.1, 0.1, (6, 4)).astype(np.float32)
    offsets = random.uniform(-3, 3, (6, 4)).astype(np.float32)
    scales[0], scales[1, 2], offsets[2] = 0, 0, 0
    scales[3, 1] = offsets[3, 1] = 0
    zeros = random.integers(0, 2**bits, (6, 4), np.uint8)
    check(Quantized(bits, codes, scales, offsets), 3)
    check(Quantized(bits, codes, scales, offsets, zeros), 3)


@pytest.mark.parametrize("precision", ["int4", "stored"])
def test_contrib_has_one_product_for_weights_with_offsets(tmp_path: Path, precision) -> None:
    """The head in 8 bits apart, which has no offsets; an embedding of Q4_1 shares its codes."""
    config = LLAMA | {"hidden_size": 64, "intermediate_size": 96}
    weights = {
        name: value / 8 if value.ndim == 2 else 1 + value / 10
        for name, value in tiny_weights(config).items()
    }
    path = write_gguf(tmp_path / "m.gguf", config, kind=Kind.Q4_1, weights=weights)
    made = export_model(str(path), tmp_path / "made", precision=precision, dialect="contrib")
    operators = [node.op_type for node in onnx.load(made.graph_path).graph.node]
    assert "Gemm" not in operators
    exact = export_model(str(path), tmp_path / "exact", precision="fp32")
    tokens = np.arange(40)
    logits = [Decoder(each).forward([Pass(0, tokens)])[0].logits.copy() for each in (made, exact)]
    assert np.abs(logits[0] - logits[1]).std() < 0.03 * logits[1].std()  # activations of 8 bits
