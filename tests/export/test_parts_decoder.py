"""A graph that runs in parts computes what it computes as a whole, with less memory."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from pilotfish.engines.manifest import Precision
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.engines.runtime import LINEAR_ATTENTION_SINCE, OPSET24_SINCE, runtime_version
from pilotfish.export import parts_decoder
from pilotfish.export.dialects import DIALECTS
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.parts_decoder import GraphParts, PartsDecoder
from tests.support.tiny import STATEFUL, RandomSource, tiny_config

TEXT = (5 * np.arange(50)) % 128


# families whose layers hand on one value, several streams, keys and values, or per-layer inputs
BETWEEN = ("llama", "opt", "cohere", "mixtral", "gemma4-e2b", "gemma3n")
FORMS = [
    ("contrib", "int8"), ("contrib", "fp32"), ("opset17", "fp32"), ("opset24", "int4"),
    ("tensorrt", "int8"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "precision"), FORMS)
@pytest.mark.parametrize("family", BETWEEN)
def test_parts_are_the_whole(
    tmp_path: Path, family: str, dialect: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of the text reads the keys and values of the first."""
    if DIALECTS[dialect].opset == 24 and runtime_version() < OPSET24_SINCE:
        pytest.skip("this runtime has no opset 24")
    monkeypatch.setattr(parts_decoder, "PART_BYTES", 50_000)
    source = RandomSource(tiny_config(family), 3)
    try:
        made = export_model(source, tmp_path / "a", precision=precision, dialect=dialect)
    except ExportError as error:
        pytest.skip(str(error))
    whole = Decoder(made, provider="cpu", context=64)
    parts = PartsDecoder(made, provider="cpu", context=64)
    for text in (TEXT[:30], TEXT[30:]):
        wanted, result = (each.forward([Pass(0, text)])[0] for each in (whole, parts))
        most = np.abs(wanted.logits).max()
        np.testing.assert_allclose(result.logits, wanted.logits, atol=1e-3 * most, rtol=0)
        np.testing.assert_allclose(result.hidden, wanted.hidden, atol=1e-3, rtol=0)
    assert {file.name for file in made.path.iterdir()} == {*made.manifest.files, "manifest.json"}


@pytest.mark.parametrize("family", STATEFUL)
def test_parts_keep_states(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if runtime_version() < LINEAR_ATTENTION_SINCE:
        pytest.skip("this runtime has no LinearAttention")
    monkeypatch.setattr(parts_decoder, "PART_BYTES", 50_000)
    made = export_model(RandomSource(tiny_config(family), 3), tmp_path / "a", precision="int8")
    whole = Decoder(made, provider="cpu", context=64)
    parts = PartsDecoder(made, provider="cpu", context=64)
    for text in (TEXT[:30], TEXT[30:]):
        wanted, result = (each.forward([Pass(0, text)])[0].logits for each in (whole, parts))
        np.testing.assert_allclose(result, wanted, atol=1e-3 * np.abs(wanted).max(), rtol=0)


def test_each_part_has_few_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = RandomSource(tiny_config("llama"), 3)
    made = export_model(source, tmp_path / "a", precision="int8")
    monkeypatch.setattr(parts_decoder, "PART_BYTES", 20_000)
    whole = onnx.load(made.graph_path, load_external_data=False)
    parts = GraphParts(whole, made.path, 1).parts
    sizes = {
        each.name: sum(int(e.value) for e in each.external_data if e.key == "length")
        for each in whole.graph.initializer
    }
    assert sum(sizes.values()) > 4 * 20_000
    assert len(parts) > 3
    tables = {name for name in sizes if name.startswith("rotary")}  # every part reads these
    largest = max(sizes.values())
    for part in parts:
        assert sum(sizes[name] for name in part.graph.weights - tables) <= 20_000 + largest
