"""Scales of blocks in fewer bytes: the same values, bit for bit."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pilotfish.export.data_file import PAGE
from pilotfish.export.dialects.compact_scales import FEWEST, find_products, write_scales
from pilotfish.export.dialects.folded_offsets import fold_offsets
from pilotfish.export.graph import GraphWriter
from pilotfish.export.sources.gguf_blocks import FORMATS, keep_blocks
from tests.support.small_checkpoints import random_blocks

Floats = NDArray[np.float32]
SUPER = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def computed(path: Path, scales: Floats) -> tuple[Floats, int]:
    """Write scales and read them as a runtime does; also returns the bytes of the constants."""
    with (path / "data").open("wb") as data:
        graph = GraphWriter(data, "data")
        name = write_scales(graph, "w.scales", scales)
        assert write_scales(graph, "w.scales", scales) == name  # as for a tied head
        graph.op("Identity", name, name="out")
        graph.output("out", "float32", list(scales.shape))
        graph.save(path / "m.onnx", opset=17)
    session = onnxruntime.InferenceSession(path / "m.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {})[0], (path / "data").stat().st_size


def blocks(kind: str, rows: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return random_blocks(np.random.default_rng(seed), Kind[kind], rows, width)


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_scales_are_written_in_fewer_bytes(tmp_path: Path, kind: str) -> None:
    weight = keep_blocks(blocks(kind, 3000, 768), FORMATS[kind])
    check(tmp_path, kind, weight.scales)


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K"])
def test_scales_of_folded_offsets_are_written_in_fewer_bytes(tmp_path: Path, kind: str) -> None:
    weight = keep_blocks(blocks(kind, 9000, 768), FORMATS[kind])
    # a block of the scale 0 gets its offset as scale, which is not of the super-block's form
    rows = np.flatnonzero((weight.scales != 0).all(axis=1))
    check(tmp_path, kind, fold_offsets(weight.take(rows)).scales)


def check(path: Path, kind: str, scales: Floats) -> None:
    again, size = computed(path, scales)
    np.testing.assert_array_equal(again, scales)
    assert size < (0.42 if kind in SUPER else 0.66) * scales.nbytes + 3 * PAGE


@given(kind=st.sampled_from(SUPER), seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5))
def test_super_blocks_are_found_in_any_file(kind: str, seed: int, rows: int) -> None:
    scales = keep_blocks(blocks(kind, rows, 512, seed), FORMATS[kind]).scales
    products = find_products(scales)
    assert products is not None
    assert products.columns == scales.shape[1]
    values = products.units.astype(np.float32)
    if products.factors is not None:
        values = (values[..., None] * products.factors).reshape(scales.shape)
    np.testing.assert_array_equal(values, scales)


@pytest.mark.parametrize(
    "scales",
    [
        pytest.param(np.random.default_rng(0).random((512, 64), np.float32), id="any"),
        pytest.param(np.random.default_rng(0).random((6000, 5), np.float32), id="less than a run"),
        pytest.param(np.full((512, 64), 1e9, np.float32), id="too large for half precision"),
        pytest.param(np.full((512, 64), 3e-39, np.float32), id="too small"),
        pytest.param(np.zeros((512, 64), np.float32), id="zeros"),
        pytest.param(np.ones((FEWEST - 1, 1), np.float32), id="few"),
    ],
)
def test_other_scales_stay(tmp_path: Path, scales: Floats) -> None:
    np.testing.assert_array_equal(computed(tmp_path, scales)[0], scales)
