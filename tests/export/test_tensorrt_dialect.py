"""The dialect `tensorrt`: the weights of opset24, in the form that NVIDIA's builder accepts.

`tests/engines/test_nvidia_builder.py` shows what that builder accepts, where it is installed.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper

from pilotfish.engines import runtime
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.blocks import Quantized
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from tests.support.runnable import needs
from tests.support.tiny import FAMILIES, SHARING, RandomSource, tiny_artifact, tiny_config

CODES = {TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4}
TOKENS = (7 * np.arange(40)) % 120


@given(
    bits=st.sampled_from([4, 8]),
    block=st.sampled_from([16, 32]),
    seed=st.integers(0, 2**32 - 1),
    lowest=st.integers(0, 1),
    has_offsets=st.booleans(),
    has_zeros=st.booleans(),
)
def test_positive_scales_do_not_change_a_weight(
    bits: int, block: int, seed: int, lowest: int, has_offsets: bool, has_zeros: bool
) -> None:
    random = np.random.default_rng(seed)
    rows, blocks = 5, 3
    scales = random.standard_normal((rows, blocks)).astype(np.float32)
    scales[0, :2], scales[1, 0] = (0.0, -0.0), -1.0
    codes = random.integers(lowest, 2**bits, (rows, blocks * block), np.uint8)
    codes[1, 0] = lowest
    weight = Quantized(
        bits=bits,
        codes=codes,
        scales=scales,
        offsets=random.standard_normal((rows, blocks)).astype(np.float32) if has_offsets else None,
        zeros=random.integers(0, 2**bits, (rows, blocks), np.uint8) if has_zeros else None,
        block=block,
    )
    result = weight.with_positive_scales()
    assert (result.scales > 0).all()
    assert result.zeros is None
    assert result.codes.dtype == np.uint8
    assert (result.codes < 2**bits).all()
    assert (result.offsets is None) == (not has_offsets and not has_zeros and lowest == 1)
    most = 2.0 ** (bits - 22) * float(np.abs(scales).max())  # float32's rounding
    np.testing.assert_allclose(result.floats(), weight.floats(), rtol=1e-6, atol=most)


def test_a_weight_with_positive_scales_stays_as_it_is() -> None:
    weight = Quantized(4, np.ones((2, 32), np.uint8), np.ones((2, 1), np.float32))
    assert weight.with_positive_scales() is weight


@pytest.mark.parametrize(
    ("family", "precision"),
    [(family, "int4") for family in FAMILIES | SHARING]
    + [("llama", "int8"), ("llama", "stored"), ("gemma3n", "stored")],
)
def test_it_has_the_weights_and_the_logits_of_opset24(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, precision: Any
) -> None:
    needs("tensorrt")
    made = [
        tiny_artifact(tmp_path / name, architecture=family, dialect=name, precision=precision)
        for name in ("opset24", "tensorrt")
    ]
    check_logits(made, monkeypatch)
    check_form(made[1].graph_path)


class OffsetSource(RandomSource):
    """A source whose blocks have scales of both signs, and offsets or, if `zeros`, zero points."""

    zeros = False

    def quantized(self, name: str) -> Quantized | None:
        """Give the blocks of a matrix offsets or zero points."""
        weight = super().quantized(name)
        if weight is None:
            return None
        if self.zeros:
            return replace(weight, zeros=np.full(weight.scales.shape, 120, np.uint8))
        return replace(weight, offsets=np.float32(0.1) + np.abs(weight.scales))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("zeros", [True, False])
def test_a_head_and_its_embedding_do_not_mix_their_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, zeros: bool
) -> None:
    needs("tensorrt")
    source = OffsetSource(tiny_config(tied=tied), 0)
    source.zeros = zeros
    made = [
        export_model(source, tmp_path / name, precision="stored", dialect=name)
        for name in ("opset24", "tensorrt")
    ]
    check_logits(made, monkeypatch)


def check_logits(made: Sequence[Artifact], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with activations in float32: in 8 bits they would be rounded in another order."""
    monkeypatch.setitem(runtime.SESSION_CONFIG, "session.qdq_matmulnbits_accuracy_level", "1")
    logits = []
    for artifact in made:
        [out] = Decoder(artifact, provider="cpu", threads=1).forward([Pass(0, TOKENS)])
        logits.append(out.logits.copy())
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4 * float(logits[0].std()))


def check_form(path: Path) -> None:
    """Check what NVIDIA's builder demands of constants."""
    graph = onnx.load(path).graph
    constants = {item.name: item for item in graph.initializer}
    codes = {name for name, item in constants.items() if item.data_type in CODES}
    assert codes
    for node in graph.node:
        if node.op_type == "DequantizeLinear":
            assert len(node.input) == 2  # no zero points
            assert (numpy_helper.to_array(constants[node.input[1]]) > 0).all()
        else:
            assert not codes & set(node.input)


def test_states_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"recurrent states, .* --dialect opset24 or contrib"):
        tiny_artifact(tmp_path / "a", architecture="mamba2", dialect="tensorrt", precision="int4")
