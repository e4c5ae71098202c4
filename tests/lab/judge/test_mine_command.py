"""``pilotfish judge mine``: goes on where it stopped, and says what it leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pilotfish.base.errors import UnsupportedError
from pilotfish.cli import main
from pilotfish.lab.judge.episodes import MiningRecord, episodes
from tests.conftest import CONTEXT, PADDED_VOCAB, VOCAB, Pair
from tests.support.genai_folders import genai_artifact
from tests.support.tiny import tiny_artifact

ASKED = ("one", "two three", "four five six", "seven")


def mined(pair: Pair, folder: Path, *options: object) -> int:
    lines = [json.dumps({"question": wanted, "answer": wanted}) for wanted in ASKED]
    folder.mkdir(exist_ok=True)
    questions = folder / "few.jsonl"
    questions.write_text("\n".join(lines))
    models = ["--draft", pair.draft, "--target", pair.target, "--questions", questions]
    task = ["--task", "exact", "--max-tokens", 6, "--out", folder / "mined"]
    return main(["judge", "mine", *map(str, [*models, *task, "--threads", 1, *options])])


def test_it_goes_on_where_it_stopped(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mined"
    assert mined(pair, tmp_path, "--count", 2, "--slots", 2) == 0
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert sorted(path.name for path in before) == [
        ".lock",
        "few-1.safetensors",
        "few-2.safetensors",
        "mined.json",
    ]
    capsys.readouterr()
    assert mined(pair, tmp_path, "--json", "-") == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    items = list(episodes(folder))
    assert [item.key for item in items] == ["few-1", "few-2", "few-3", "few-4"]
    payload = json.loads(capsys.readouterr().out)
    assert payload["questions"] == 4
    assert payload["mismatches"] == sum(len(item) for item in items) > 0
    assert payload["critical"] == sum(int(item.critical.sum()) for item in items)
    assert payload["stalling"] == sum(int(item.stalling.sum()) for item in items)


def test_it_tells_whose_states_these_are(pair: Pair, tmp_path: Path) -> None:
    from pilotfish.engines.artifact import Artifact

    assert mined(pair, tmp_path, "--count", 1) == 0
    settings = MiningRecord.read(tmp_path / "mined")
    for info, path in ((settings.drafter, pair.draft), (settings.target, pair.target)):
        manifest = Artifact.open(path).manifest
        assert info == {
            "model": manifest.model,
            "origin": manifest.origin,
            "precision": manifest.precision,
            "hidden": manifest.dimensions.hidden,
        }


def test_questions_that_are_too_long_are_left_out(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mined(pair, tmp_path, "--context", 14) == 0
    err = capsys.readouterr().err
    left = len(list(episodes(tmp_path / "mined")))
    assert 0 < left < 4
    assert f"{4 - left} of 4 questions are left out" in err
    assert mined(pair, tmp_path, "--context", 7) == UnsupportedError.exit_code
    assert "larger --context" in capsys.readouterr().err


def test_one_folder_is_mined_in_one_way(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mined(pair, tmp_path, "--count", 1) == 0
    for other in (["--max-tokens", 7], ["--slack", 3], ["--outcome-only"], ["--right-only"]):
        assert mined(pair, tmp_path, *other) == UnsupportedError.exit_code
        assert "mined with other settings" in capsys.readouterr().err


def test_it_labels_as_it_is_told(pair: Pair, tmp_path: Path) -> None:
    """To the checker all answers are alike, so nothing is critical; and they do not end."""
    stranger = tmp_path / "stranger"
    tiny_artifact(stranger, vocab=VOCAB, padded_vocab=PADDED_VOCAB, context=CONTEXT, seed=9)
    ends = Pair(stranger, pair.target)
    alike = ["--task", "command", "--checker", "echo 1"]
    results = {}
    for name in ("slack", "outcome-only", "right-only"):
        value = [4] if name == "slack" else []
        assert mined(ends, tmp_path / name, *alike, f"--{name}", *value) == 0
        results[name] = list(episodes(tmp_path / name / "mined"))
    assert not any(result.critical.any() for some in results.values() for result in some)
    assert any(result.stalling.any() for result in results["slack"])
    assert not any(result.stalling.any() for result in results["outcome-only"])
    assert any(len(result) for result in results["outcome-only"])
    assert not any(len(result) for result in results["right-only"])


def test_a_model_without_hidden_states_is_refused(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blind = genai_artifact(tmp_path / "blind").path
    assert mined(pair, tmp_path, "--target", blind) == UnsupportedError.exit_code
    assert "blind-folder outputs no hidden states" in capsys.readouterr().err
    assert not (tmp_path / "mined").exists()
