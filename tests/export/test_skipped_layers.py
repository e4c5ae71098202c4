"""`--skip-layers`: the model without some of its layers, and another one by its origin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.sources import open_source
from pilotfish.export.sources.layer_selection import leave_out_layers
from tests.support.prefill import prefill
from tests.support.small_checkpoints import LLAMA, write_directory, write_gguf
from tests.support.tiny import RandomSource, tiny_config

FOUR = {**LLAMA, "num_hidden_layers": 4}


def test_without_its_last_layer_it_is_the_model_of_the_first_layers(tmp_path: Path) -> None:
    whole = RandomSource(tiny_config("llama", layers=3), 1)
    tokens = np.arange(9)
    made = [
        export_model(whole, tmp_path / "skipped", skipped_layers=[2]),
        export_model(whole, tmp_path / "first", first_layers=2),
        export_model(whole, tmp_path / "other", skipped_layers=[0]),
    ]
    skipped, first, other = (prefill(Decoder(each), 0, tokens, rows=9).logits for each in made)
    assert skipped.tobytes() == first.tobytes()
    assert not np.allclose(skipped, other, atol=0.1)
    assert made[0].manifest.dimensions == made[1].manifest.dimensions


def test_the_other_layers_keep_their_order_and_are_counted_anew(tmp_path: Path) -> None:
    whole = open_source(str(write_directory(tmp_path / "m", FOUR)))
    source = leave_out_layers(whole, [2, 1])
    layers = {name.split(".")[2] for name in source.names() if ".layers." in name}
    assert layers == {"0", "1"}
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= {*source.names()}
    for place, original in ((0, 0), (1, 3)):
        name = "model.layers.{}.mlp.down_proj.weight"
        assert np.array_equal(
            source.tensor(name.format(place)), whole.tensor(name.format(original))
        )
    with pytest.raises(ExportError, match=r"no weight model\.layers\.2"):
        source.tensor("model.layers.2.mlp.down_proj.weight")


def test_the_manifest_names_the_layers_and_the_origin_is_another(tmp_path: Path) -> None:
    file = str(write_gguf(tmp_path / "tiny.gguf", FOUR))
    manifests = [
        export_model(file, tmp_path / str(number), **options).manifest
        for number, options in enumerate(
            ({}, {"skipped_layers": [1, 2]}, {"skipped_layers": [1]}, {"first_layers": 2})
        )
    ]
    assert len({manifest.origin for manifest in manifests}) == 4
    assert manifests[1].model == "tiny-without-1-2"
    assert manifests[1].source.skipped_layers == [1, 2]
    assert len({manifest.tokenizer_fingerprint for manifest in manifests}) == 1
    # a whole model's manifest is one that older versions read
    assert "skipped_layers" not in (tmp_path / "0" / "manifest.json").read_text()


@pytest.mark.parametrize("layers", [[4], [0, 1, 2, 3]])
def test_there_must_be_such_layers_and_others(tmp_path: Path, layers: list[int]) -> None:
    source = open_source(str(write_directory(tmp_path / "m", FOUR)))
    with pytest.raises(ExportError, match="has the layers 0 to 3"):
        export_model(source, tmp_path / "out", skipped_layers=layers)
    assert not (tmp_path / "out").exists()


def test_two_ways_to_shorten_a_model_are_refused(tmp_path: Path) -> None:
    whole = RandomSource(tiny_config("llama", layers=3), 1)
    with pytest.raises(ExportError, match="cannot be combined"):
        export_model(whole, tmp_path / "out", first_layers=1, skipped_layers=[2])
    assert not (tmp_path / "out").exists()


def test_layers_that_differ_are_not_left_out() -> None:
    with pytest.raises(ExportError, match=r"layers of .* differ"):
        leave_out_layers(RandomSource(tiny_config("gemma2", layers=4), 1), [1])


def test_the_command(tmp_path: Path) -> None:
    write_directory(tmp_path / "m", FOUR)
    words = ["export", "model", str(tmp_path / "m"), "--out", str(tmp_path / "out")]
    subprocess.run(
        [sys.executable, "-m", "pilotfish", *words, "--skip-layers", "1,2"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["model"] == "m-without-1-2"
    assert manifest["source"]["skipped_layers"] == [1, 2]
