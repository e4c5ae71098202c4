"""4 bits for weights that were never rounded: errors are compensated on a text."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.blocks import BLOCK
from pilotfish.export.error_compensation import round_compensated
from pilotfish.export.model import export_model
from pilotfish.export.quantize import quantize
from pilotfish.export.reference import Reference
from tests.support.runnable import needs
from tests.support.small_checkpoints import LLAMA, tiny_weights, write_directory

Floats = NDArray[np.float32]
WIDTH = 4 * BLOCK
CONFIG = LLAMA | {"hidden_size": 64, "intermediate_size": 128}


def inputs(seed: int, tokens: int = 600) -> Floats:
    """Columns that depend on each other, as channels of a model do; the same law by any seed."""
    random = np.random.default_rng(7)
    mix = random.standard_normal((WIDTH, WIDTH), np.float32) / 8 + np.eye(WIDTH, dtype=np.float32)
    drawn = np.random.default_rng(seed).standard_normal((tokens, WIDTH), np.float32)
    return np.asarray(drawn @ mix, np.float32)


def weights(rows: int = 48) -> Floats:
    return np.random.default_rng(1).standard_normal((rows, WIDTH), np.float32)


def output_error(weight: Floats, rounded: Floats, x: Floats) -> float:
    """Of the outputs' squares."""
    return float((((weight - rounded) @ x.T) ** 2).sum() / ((weight @ x.T) ** 2).sum())


def test_outputs_change_less_on_other_inputs_of_the_same_law() -> None:
    weight, text, other = weights(), inputs(2), inputs(3)
    compensated = round_compensated(weight, text.T @ text).floats()
    searched, nearest = round_compensated(weight).floats(), quantize("w", weight, 4).floats()
    errors = [output_error(weight, each, other) for each in (compensated, searched, nearest)]
    assert errors[0] < 0.75 * errors[1] < 0.75 * errors[2]
    assert errors[0] < 0.6 * errors[2]


def test_no_column_can_be_rounded_better_alone() -> None:
    """With independent inputs nothing is to compensate: every code is the nearest one."""
    weight = weights()
    moments = np.diag(np.linspace(1, 9, WIDTH).astype(np.float32))
    result = round_compensated(weight, moments)
    assert result.zeros is not None
    scales, zeros = (np.repeat(each, BLOCK, axis=1) for each in (result.scales, result.zeros))
    nearest = np.clip(np.rint(weight / scales.astype(np.float32) + zeros), 0, 15)
    assert np.array_equal(result.codes, nearest)


@pytest.mark.parametrize("moments", [None, np.zeros((WIDTH, WIDTH), np.float32)])
def test_blocks_of_zeros_and_inputs_of_zeros(moments: Floats | None) -> None:
    weight = weights(4)
    weight[:2] = 0
    weight[2, :BLOCK] = 1e-30
    result = round_compensated(weight, moments)
    assert (result.scales > 0).all()
    assert not result.floats()[:2].any()
    assert np.abs(result.floats() - weight).max() < 0.3


@pytest.mark.parametrize("dialect", ["contrib", "opset24", "tensorrt"])
def test_an_export_in_4_bits_is_nearer_than_one_that_rounds_to_nearest(
    tmp_path: Path, dialect: str
) -> None:
    needs(dialect)
    weight = calm_weights()
    source = str(write_directory(tmp_path / "source", CONFIG, weights=weight))
    exact = logits(export_model(source, tmp_path / "fp32", dialect="opset17"))
    nearest = rounded_to_nearest(weight)
    rounded = str(write_directory(tmp_path / "rounded", CONFIG, weights=nearest))
    error = np.abs(logits(export_model(rounded, tmp_path / "nearest")) - exact).mean()

    artifact = export_model(source, tmp_path / "int4", precision="int4", dialect=dialect)
    layers = artifact.manifest.dimensions.layers
    assert artifact.manifest.calibrated_matrices == 6 * layers  # all but v, which has 8 bits
    assert np.abs(logits(artifact) - exact).mean() < 0.92 * error
    again = export_model(source, tmp_path / "again", precision="int4", dialect=dialect)
    assert again.manifest.files == artifact.manifest.files


def test_weights_that_were_rounded_before_are_not_calibrated(tmp_path: Path) -> None:
    weight = rounded_to_nearest(calm_weights())
    source = str(write_directory(tmp_path / "source", CONFIG, weights=weight))
    artifact = export_model(source, tmp_path / "int4", precision="int4", dialect="contrib")
    assert artifact.manifest.calibrated_matrices is None
    exact = logits(export_model(source, tmp_path / "fp32", dialect="opset17"))
    assert np.abs(logits(artifact) - exact).mean() < 0.06 * np.abs(exact).mean()


def test_without_a_readable_text_scales_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A source that fails in the middle of the text, as a full disk would."""
    source = write_directory(tmp_path / "source")

    def fail(*arguments: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Reference, "inputs", fail)
    artifact = export_model(str(source), tmp_path / "int4", precision="int4")
    assert artifact.manifest.calibrated_matrices is None
    assert caplog.text.count("rounded without a text") == 1
    assert "no space left" in caplog.text


def test_inputs_whose_squares_exceed_float32_calibrate_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = calm_weights()
    weight["model.layers.0.mlp.up_proj.weight"] *= np.float32(1e18)
    weight["model.layers.0.mlp.down_proj.weight"] /= np.float32(1e18)
    source = str(write_directory(tmp_path / "source", CONFIG, weights=weight))
    exact = logits(export_model(source, tmp_path / "fp32", dialect="opset17"))
    artifact = export_model(source, tmp_path / "int4", precision="int4")
    assert np.abs(logits(artifact) - exact).mean() < 0.5 * np.abs(exact).mean()
    assert caplog.text.count("rounded without a text") == 1
    assert "the inputs of model.layers.0.mlp.down_proj are NaN or too large" in caplog.text


def calm_weights() -> dict[str, Floats]:
    """Make matrices small enough that a rounding error does not turn all later layers."""
    return {
        name: np.asarray(value / 8 if value.ndim == 2 else 1 + value / 10, np.float32)
        for name, value in tiny_weights(CONFIG).items()
    }


def rounded_to_nearest(weight: dict[str, Floats]) -> dict[str, Floats]:
    """Round the layers' matrices to 4 bits, in float32."""
    return {
        name: quantize(name, value, 4).floats() if ".layers." in name and value.ndim == 2 else value
        for name, value in weight.items()
    }


def logits(artifact: Artifact) -> Floats:
    decoder = Decoder(artifact, provider="cpu")
    [out] = decoder.forward([Pass(0, np.arange(3, 40), 37)])
    return out.logits
