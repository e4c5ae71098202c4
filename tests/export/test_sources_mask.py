"""The mask token of a drafter of many tokens per pass: what is read, kept, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.cli import main
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.passes import Pass
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.sources import open_source
from tests.support.configs import read_config
from tests.support.small_checkpoints import LLAMA, TOKENS, VOCAB, write_directory

PADDING = len(TOKENS) + 2  # as in Qwen2.5: a row of the embedding without a token
PARD2 = {"spd_type": "pard2", "pard2": True, "pard2_scale": 0.02, "pard2_proj_bias": False,
         "pard2_target_dim": 16384, "pard2_target_layers": [-1, -8]}  # fmt: skip
CAUSAL = {"mask_token_id": 7, "causal": True}


def mask_token(**keys: Any) -> int | None:
    return read_config(LLAMA | keys, "tiny", "config.json").mask_token


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"pard_token": None}, None),
        ({"pard_token": 7, "spd_type": "pard"}, 7),
        ({"pard_token": VOCAB - 1}, VOCAB - 1),
        ({"ptd_token_id": 0}, 0),
        ({"dflash_config": CAUSAL}, 7),
        ({"dflash_config": CAUSAL, "pard_token": 7, "draft_vocab_size": None}, 7),
        ({"pard_token": 7, **PARD2}, 7),
    ],
)
def test_the_mask_token_is_read_under_all_its_names(
    keys: dict[str, Any], expected: int | None
) -> None:
    assert mask_token(**keys) == expected


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"pard_token": -1}, "pard_token is -1.*row of the embedding"),
        ({"ptd_token_id": VOCAB}, f"ptd_token_id is {VOCAB}"),
        ({"pard_token": "7"}, "pard_token is '7'.*int"),
        ({"pard_token": 7, "ptd_token_id": 8}, "pard_token and ptd_token_id name different"),
        ({"ptd_token_id": 7, "draft_vocab_size": 32}, "hidden states.*draft_vocab_size 32"),
        ({"dflash_config": CAUSAL, "target_layer_ids": [1]}, r"hidden states \(target_layer_ids"),
        ({"dflash_config": CAUSAL | {"target_layer_ids": [1, 9]}}, r"dflash_config\.target_layer"),
        ({"dflash_config": {"mask_token_id": 7}}, "both directions.*causal"),
        ({"dflash_config": CAUSAL | {"selector_rank": 8}}, "keys: .*selector_rank"),
        ({"spd_type": "pard"}, "keys: .*spd_type"),  # without a mask token it means nothing
    ],
)
def test_other_drafters_are_refused_by_name(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ExportError, match=named):
        mask_token(**keys)


def test_an_artifact_keeps_the_mask_token_and_its_model_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_directory(tmp_path / "m", LLAMA | {"pard_token": PADDING, "spd_type": "pard"})
    path = export_model(str(source), tmp_path / "out" / "masked").path
    manifest = Artifact.open(path).manifest
    assert manifest.mask_token == PADDING
    assert manifest.vocab_size <= PADDING < manifest.readable_tokens
    decoder = Decoder(path, threads=1)
    output = decoder.forward([Pass(0, np.array([1, PADDING, PADDING]), 3)])[0]
    assert output.logits.shape == (3, manifest.vocab_size)  # the mask has no logit
    with pytest.raises(ValueError, match="token ids"):
        decoder.check([Pass(0, np.array([PADDING + 1]), 1)])
    assert main(["export", "list", str(tmp_path / "out")]) == 0
    assert "several drafts per pass" in " ".join(capsys.readouterr().out.split())


def test_models_without_a_mask_token_have_the_manifest_of_before(tmp_path: Path) -> None:
    path = export_model(open_source(str(write_directory(tmp_path / "m"))), tmp_path / "out").path
    assert "mask_token" not in json.loads((path / "manifest.json").read_bytes())
