"""Stages that were mixed up or damaged are refused, and whole models' commands refuse any."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotfish import Device
from pilotfish.cli import main
from pilotfish.deploy.bundle import BundleContents, make
from pilotfish.engines.artifact import Artifact, open_stages
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.manifest import MANIFEST_NAME
from pilotfish.engines.stage_range import StageRange, check_chain
from pilotfish.export.catalog import list_artifacts
from pilotfish.export.split import split_artifact
from tests.support.tiny import tiny_artifact


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Four layers."""
    return tiny_artifact(tmp_path_factory.mktemp("whole") / "model", layers=4, dialect="opset17")


# Mixed and damaged stages


def test_stages_of_one_cut_are_opened_in_their_order(tmp_path: Path, whole: Artifact) -> None:
    split_artifact(whole.path, tmp_path / "cut", stages=4)
    (tmp_path / "cut" / "stage-1").rename(tmp_path / "cut" / "stage-z")
    cuts = [stage.manifest.stage for stage in open_stages(tmp_path / "cut")]
    assert [cut and cut.index for cut in cuts] == [1, 2, 3, 4]


CHAIN = [
    StageRange(index=i + 1, count=4, first_layer=2 * i, layers=2, whole="0123456789abcdef")
    for i in range(4)
]


def changed(cut: StageRange, **changes: Any) -> StageRange:
    return msgspec.structs.replace(cut, **changes)


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ([], "needs each of .*got none"),
        (CHAIN[:3], "in 4 stages needs each of .*got 1, 2, 3"),
        (CHAIN[1:], "got 2, 3, 4"),
        ([*CHAIN[:2], *CHAIN[:1:-1]], "got 1, 2, 4, 3"),
        ([*CHAIN, CHAIN[3]], "got 1, 2, 3, 4, 4"),
        ([CHAIN[0], changed(CHAIN[1], whole="f" * 16), *CHAIN[2:]], "was cut from artifact ffff"),
        ([CHAIN[0], changed(CHAIN[1], count=5), *CHAIN[2:]], "was cut from artifact"),
        ([CHAIN[0], changed(CHAIN[1], first_layer=3), *CHAIN[2:]], "does not begin where"),
        ([changed(CHAIN[0], layers=1), *CHAIN[1:]], "does not begin where"),
    ],
)
def test_stages_that_make_no_whole_are_refused(cuts: Sequence[StageRange], words: str) -> None:
    check_chain(CHAIN)
    with pytest.raises(ArtifactError, match=words):
        check_chain(cuts)


def test_folders_that_hold_no_whole_are_refused(tmp_path: Path, whole: Artifact) -> None:
    for path in (tmp_path / "none", whole.path):
        with pytest.raises(ArtifactError, match=r"has no stages.*export split"):
            open_stages(path)
    split_artifact(whole.path, tmp_path / "cut", stages=2)
    split_artifact(tiny_artifact(tmp_path / "b", layers=4, seed=1).path, tmp_path / "d", stages=2)
    second, other = (tmp_path / name / "stage-2" for name in ("cut", "d"))
    second.rename(tmp_path / "kept")
    with pytest.raises(ArtifactError, match="got 1"):
        open_stages(tmp_path / "cut")
    other.rename(second)
    with pytest.raises(ArtifactError, match="was cut from artifact"):
        open_stages(tmp_path / "cut")
    second.rename(other)
    (tmp_path / "kept").rename(second)
    (tmp_path / "cut" / "stage-3").symlink_to(second)
    with pytest.raises(ArtifactError, match="has no stages"):
        open_stages(tmp_path / "cut")
    (tmp_path / "cut" / "stage-3").unlink()
    (second / "model.onnx.data").unlink()
    with pytest.raises(ArtifactError, match=r"lacks model\.onnx\.data"):
        open_stages(tmp_path / "cut")


@pytest.mark.parametrize(
    ("index", "changes"),
    [
        (1, {"index": 0}),
        (1, {"index": 3}),
        (1, {"index": 2}),
        (1, {"first_layer": -1}),
        (1, {"first_layer": 1}),
        (1, {"layers": 0}),
        (1, {"layers": 4}),
        (1, {"whole": "x"}),
        (1, {"shape": "new"}),
        (2, {"layers": 3}),
        (2, {"layers": 1}),
        (2, {"first_layer": 0}),
        (2, {"first_layer": 1}),
        (2, {"index": 1}),
        (2, {"count": 3}),
        (2, {"count": 1}),
        (1, {"count": 4, "layers": 3}),  # no layers left for the others
        (2, {"index": 3, "count": 4, "first_layer": 1, "layers": 1}),  # nor for those before
        (2, {"index": 3, "layers": 1}),
    ],
)
def test_manifests_of_stages_that_contradict_themselves(
    tmp_path: Path, whole: Artifact, index: int, changes: dict[str, Any]
) -> None:
    path = split_artifact(whole.path, tmp_path / "cut", stages=2)[index - 1].path
    values = json.loads((path / MANIFEST_NAME).read_bytes())
    Artifact.open(path, stage=True)
    values["stage"] |= changes
    (path / MANIFEST_NAME).write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match=r"manifest\.json is not valid"):
        Artifact.open(path, stage=True)


@pytest.mark.parametrize("name", ["head.onnx", "tokenizer.json", "model.onnx"])
def test_a_stage_names_the_files_that_it_cannot_be_without(
    tmp_path: Path, whole: Artifact, name: str
) -> None:
    path = split_artifact(whole.path, tmp_path / "cut", stages=2)[0].path
    values = json.loads((path / MANIFEST_NAME).read_bytes())
    del values["files"][name]
    (path / MANIFEST_NAME).write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match=f"does not name {name}"):
        Artifact.open(path, stage=True)


# Commands for whole models


def test_stages_are_refused_as_whole_models(
    tmp_path: Path, whole: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    item, two = (str(each.path) for each in split_artifact(whole.path, tmp_path / "c", stages=2))
    model, out = str(whole.path), str(tmp_path / "out")
    for stage in (item, two):
        info = f"{stage} is stage .* cut from"
        with pytest.raises(ArtifactError, match=info):
            Artifact.open(stage)
        with pytest.raises(ArtifactError, match=info):
            Device(stage, "tcp://127.0.0.1:1")
        with pytest.raises(ArtifactError, match=info):
            make(
                BundleContents(
                    role="edge",
                    artifacts=[Path(stage)],
                    address="tcp://*:7000",
                    keys=None,
                    python="3.11",
                    machine="x86_64",
                ),
                tmp_path / "bundle",
                lambda label, done, total: None,
            )
        for command in (
            ["export", "bridge", stage, model],
            ["export", "bridge", model, stage],
            ["export", "split", stage, "--stages", "2", "--out", out],
            ["edge", "serve", "--target", stage],
        ):
            assert main(command) == 66
            assert "cut from" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "bundle").exists()


def test_lists_tell_stages_from_models(
    tmp_path: Path, whole: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_artifact(tmp_path / "model", layers=2)
    split_artifact(model.path, tmp_path / "model-2-stages", stages=2)
    entries = list_artifacts(tmp_path)
    assert [(Path(entry.path).name, entry.stage) for entry in entries] == [
        ("model", None),
        ("stage-1", "stage 1 of 2 (layer 0)"),
        ("stage-2", "stage 2 of 2 (layer 1)"),
    ]
    assert main(["export", "list", str(tmp_path), "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert [entry["stage"] for entry in payload] == [entry.stage for entry in entries]
