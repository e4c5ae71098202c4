"""`--first-layers`: the model that ends after them, and another one by its origin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.sources import open_source
from pilotfish.export.sources.layer_selection import keep_first_layers
from tests.support.prefill import prefill
from tests.support.small_checkpoints import LLAMA, write_directory, write_gguf
from tests.support.tiny import FAMILIES, SHARING, RandomSource, tiny_config

FOUR = {**LLAMA, "num_hidden_layers": 4}


@pytest.mark.parametrize("family", FAMILIES | SHARING)
def test_it_is_the_model_that_ends_there(tmp_path: Path, family: str) -> None:
    # weights depend on their names alone, so a model of two layers is the first two of three
    whole = RandomSource(tiny_config(family, layers=3), 1)
    short = RandomSource(tiny_config(family, layers=2), 1)
    cut = export_model(whole, tmp_path / "cut", first_layers=2)
    wanted = export_model(short, tmp_path / "wanted")
    tokens = np.arange(9)
    answers = [prefill(Decoder(artifact), 0, tokens, rows=9) for artifact in (cut, wanted)]
    assert answers[0].logits.tobytes() == answers[1].logits.tobytes()
    assert answers[0].hidden.tobytes() == answers[1].hidden.tobytes()
    assert cut.manifest.dimensions == wanted.manifest.dimensions
    longer = prefill(Decoder(export_model(whole, tmp_path / "whole")), 0, tokens, rows=9)
    assert not np.allclose(longer.logits, answers[0].logits, atol=0.1)


def test_only_weights_that_are_left_are_named_and_read(tmp_path: Path) -> None:
    whole = open_source(str(write_directory(tmp_path / "m", {**LLAMA, "num_hidden_layers": 12})))
    source = keep_first_layers(whole, 2)
    layers = {name.split(".")[2] for name in source.names() if ".layers." in name}
    assert layers == {"0", "1"}
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= {*source.names()}
    assert source.tensor("model.norm.weight").shape == (32,)
    with pytest.raises(ExportError, match=r"no weight model\.layers\.10"):
        source.tensor("model.layers.10.input_layernorm.weight")
    seen: list[tuple[int, int | None]] = []
    export_model(
        whole,
        tmp_path / "out",
        first_layers=2,
        progress=lambda label, done, total: seen.append((done, total)) if label == "weights" else 0,
    )
    assert seen[-1] == (len(source.names()), len(source.names()))


def test_the_manifest_says_so_and_the_origin_is_another(tmp_path: Path) -> None:
    made = {
        layers: export_model(
            str(write_gguf(tmp_path / f"tiny-{layers}.gguf", FOUR)),
            tmp_path / str(layers),
            first_layers=layers,
            precision="int8" if layers == 1 else "fp32",
        )
        for layers in (None, 1, 2)
    }
    manifests = {layers: Artifact.open(artifact.path).manifest for layers, artifact in made.items()}
    assert len({manifest.origin for manifest in manifests.values()}) == 3
    assert len({*manifests[2].source.sha256.values()} & {*manifests[1].source.sha256.values()}) == 1
    assert manifests[2].model == "tiny-2-2-of-4-layers"
    assert (manifests[2].source.first_layers, manifests[2].dimensions.layers) == (2, 2)
    again = export_model(
        str(tmp_path / "tiny-2.gguf"), tmp_path / "again", first_layers=2, precision="int8"
    )
    assert again.manifest.origin == manifests[2].origin
    fingerprints = {manifest.tokenizer_fingerprint for manifest in manifests.values()}
    assert len(fingerprints) == 1
    # a whole model's manifest is one that older versions read
    assert "first_layers" not in (tmp_path / "None" / "manifest.json").read_text()


@pytest.mark.parametrize("layers", [0, 4, 30])
def test_there_must_be_layers_to_leave_out(tmp_path: Path, layers: int) -> None:
    source = open_source(str(write_directory(tmp_path / "m", FOUR)))
    with pytest.raises(ExportError, match=rf"has 4 layers: 1 to 3 .* not {layers}"):
        export_model(source, tmp_path / "out", first_layers=layers)
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path) -> None:
    write_directory(tmp_path / "m", FOUR)

    def export(layers: str) -> subprocess.CompletedProcess[str]:
        words = ["export", "model", str(tmp_path / "m"), "--out", str(tmp_path / "out")]
        return subprocess.run(
            [sys.executable, "-m", "pilotfish", *words, "--first-layers", layers],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    refused = export("4")
    assert refused.returncode != 0
    assert "has 4 layers" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert export("0").returncode == 2
    assert export("3").returncode == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["model"] == "m-3-of-4-layers"
    assert manifest["dimensions"]["layers"] == manifest["source"]["first_layers"] == 3
