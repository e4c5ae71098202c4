"""Stages and heads on TensorRT, over its double (`tests.support.tensorrt_double`), not on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

from pilotfish.cli import main
from pilotfish.engines.artifact import Artifact, open_stages
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.engines.stage import Head, Stage
from pilotfish.engines.tensorrt.fixing import input_width
from pilotfish.engines.tensorrt.profiles import CHUNK
from pilotfish.export.split import split_artifact
from tests.support import tensorrt_double
from tests.support.runnable import needs
from tests.support.staged import Both, Staged
from tests.support.tiny import tiny_artifact

TOKENS = np.random.default_rng(3).integers(0, 100, 160)
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def double(tmp_path: Path, monkeypatch: Patch) -> Any:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    module, _ = tensorrt_double.install(monkeypatch, "10.16.2")
    return module.double


def cut_in(folder: Path, **tiny: Any) -> Both:
    whole = tiny_artifact(folder / "whole", layers=3, **tiny)
    split_artifact(whole.path, folder / "stages", stages=2)
    return Both(whole, folder / "stages")


@pytest.mark.parametrize(
    ("family", "dialect", "precision"),
    [
        ("llama", "tensorrt", "int4"),
        ("gemma2", "opset24", "fp16"),  # windows: a stage may lack the cells' positions
        ("opt", "opset17", "fp32"),  # only the first stage reads positions; a narrow head
        ("gpt_oss", "opset17", "fp16"),
    ],
)
def test_stages_say_what_the_whole_model_says(
    tmp_path: Path, family: str, dialect: str, precision: Any
) -> None:
    needs(dialect)
    cut = cut_in(tmp_path, architecture=family, dialect=dialect, precision=precision)
    staged = Staged(cut.folder, cut.whole, slots=2, provider="tensorrt")
    whole = Decoder(cut.whole, slots=2, provider="tensorrt")
    tree = np.array([-1, -1, 0, 1, 1])
    most = 1e-2 if precision == "fp16" else 1e-5
    for passes in (
        [Pass(0, TOKENS[:20], 0), Pass(1, TOKENS[5:8])],
        [Pass(1, TOKENS[8:13], parents=tree), Pass(0, TOKENS[20:21])],
    ):
        for got, wanted in zip(staged.forward(passes), whole.forward(passes), strict=True):
            for ours, theirs in ((got.logits, wanted.logits), (got.hidden, wanted.hidden)):
                assert ours.shape == theirs.shape
                assert np.linalg.norm(ours - theirs) <= most * np.linalg.norm(theirs)


def test_a_head_computes_many_rows_in_pieces(tmp_path: Path) -> None:
    cut = cut_in(tmp_path, dialect="opset17")
    first = open_stages(cut.folder)[0]
    hidden = np.random.default_rng(0).standard_normal((2 * CHUNK + 3, 64), np.float32)
    ours, theirs = (Head(first, provider=name) for name in ("tensorrt", "cpu"))
    for rows in (1, CHUNK, CHUNK + 1, len(hidden), 5):
        logits = ours.logits(hidden[:rows])
        np.testing.assert_allclose(logits, theirs.logits(hidden[:rows]), rtol=1e-5, atol=1e-5)
    assert ours.logits(hidden[:0]).shape == (0, ours.vocab_size)


def test_auto_takes_engines_that_the_command_has_built(
    tmp_path: Path, double: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = cut_in(tmp_path, dialect="opset17")
    first, second = open_stages(cut.folder)
    for opened in (Stage(first), Stage(second), Head(first)):
        assert opened.provider == "cpu"
    command = ["export", "engine", str(first.path), str(second.path), "--slots", "2"]
    assert main([*command, "--json", "-"]) == 0
    listed = msgspec.json.decode(capsys.readouterr().out)
    names = [first.manifest.digest, f"{first.manifest.digest}-head", second.manifest.digest]
    assert [each["artifact"] for each in listed] == names
    assert all(each["built"] and Path(each["engine"]).is_file() for each in listed)
    for opened in (Stage(first, slots=2), Stage(second), Head(first)):
        assert opened.provider == "tensorrt"
    assert main(command) == 0
    assert double.builds == 3


def test_stages_with_weights_in_another_form_are_refused_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for stage in open_stages(cut_in(tmp_path, dialect="opset24", precision="int4").folder):
        assert main(["export", "engine", str(stage.path)]) == 65
        assert "--dialect tensorrt --precision int4" in capsys.readouterr().err


def test_a_damaged_head_is_named(tmp_path: Path) -> None:
    first = open_stages(cut_in(tmp_path, dialect="opset17").folder)[0]
    first.head_path.write_bytes(b"\x0a\x01")
    with pytest.raises(ProviderError, match=r"head\.onnx"):
        Head(first, provider="tensorrt")
    assert main(["export", "engine", str(first.path)]) == 65


def test_the_width_of_a_head_is_read(tmp_path: Path) -> None:
    heads = []
    for family in ("llama", "opt"):
        first = open_stages(cut_in(tmp_path / family, architecture=family).folder)[0]
        heads.append(first.head_path.read_bytes())
        (hidden,) = onnx.load_model_from_string(heads[-1]).graph.input
        assert input_width(heads[-1]) == hidden.type.tensor_type.shape.dim[1].dim_value
    for wrong in (b"", b"\xff\xff", heads[0][: len(heads[0]) // 2]):
        with pytest.raises(ValueError, match="ONNX file"):
            input_width(wrong)
    symbolic = onnx.load_model_from_string(heads[0])
    symbolic.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "W"
    with pytest.raises(ValueError, match="not fixed"):
        input_width(symbolic.SerializeToString())


def test_a_whole_model_has_no_head_of_its_own(tmp_path: Path) -> None:
    whole = tiny_artifact(tmp_path / "a", dialect="opset17")
    assert main(["export", "engine", str(whole.path)]) == 0
    assert not list((tmp_path / "cache" / "engines").glob("*-head"))
    assert Artifact.open(whole.path).manifest.stage is None
