"""``pilotfish export split``: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pilotfish.cli import main
from pilotfish.engines.artifact import Artifact, open_stages
from pilotfish.engines.manifest import MANIFEST_NAME
from tests.support.tiny import tiny_artifact


def run(*arguments: object) -> int:
    """Its exit code."""
    try:
        return main(["export", "split", *map(str, arguments)])
    except SystemExit as ended:  # as argparse ends help and wrong usage
        return int(ended.code or 0)


def test_the_command_prints_the_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_artifact(tmp_path / "model", layers=3)
    assert run(model.path, "--stages", 2) == 0
    stages = open_stages(tmp_path / "model-2-stages")
    assert capsys.readouterr().out.split() == [str(stage.path) for stage in stages]
    assert run(model.path, "--layers", "1,2", "--out", tmp_path / "out", "--json", "-") == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["stage"], each["first_layer"], each["layers"]) for each in told] == [
        (1, 0, 1),
        (2, 1, 2),
    ]
    for each in told:
        stage = Artifact.open(each["folder"], stage=True)
        assert each["digest"] == stage.manifest.digest
        files = [path for path in stage.path.iterdir() if path.name != MANIFEST_NAME]
        assert each["bytes"] == sum(path.stat().st_size for path in files)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "--stages"),
        (["--stages", 0], 2, "--stages"),
        (["--layers", "1,x"], 2, "8,8,7,7"),
        (["--layers", ""], 2, "8,8,7,7"),
        (["--stages", 5], 65, "1 to 4 stages"),
        (["--layers", "1,2"], 65, "do not add up to the model's 4"),
        (["--stages", 3, "--layers", "2,2"], 65, "for 2 stages"),
        (["--stages", 2, "--out", "/proc/none"], 74, "/proc"),
    ],
)
def test_wrong_usage_is_refused_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[object],
    code: int,
    words: str,
) -> None:
    model = tiny_artifact(tmp_path / "model", layers=4)
    assert run(model.path, *arguments) == code
    told = capsys.readouterr()
    assert words in told.err.splitlines()[-1]
    assert told.out == ""


def test_no_artifact(tmp_path: Path) -> None:
    assert run(tmp_path / "none", "--stages", 2) == 66


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    told = capsys.readouterr().out
    for part in ("head", "opset24", "pilotfish export split target --stages 4", "65"):
        assert part in told
