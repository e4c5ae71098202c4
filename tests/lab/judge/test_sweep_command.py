"""`pilotfish judge sweep` as a command: it resumes, reports, and updates the curve of a head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pilotfish.cli import main
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.engines.artifact import Artifact
from pilotfish.lab.judge.sweep_file import SweepFile
from tests.bridge.test_drafter import OWN, THEIRS
from tests.lab.judge.test_trajectories import random_head
from tests.support.tiny import tiny_artifact


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With drafter, target, a head for them, and two questions."""
    result = tmp_path_factory.mktemp("sweep")
    ends = [
        tiny_artifact(result / "draft", tokens=OWN, eos="<x>", seed=5),
        tiny_artifact(result / "target", tokens=THEIRS, eos="<y>", seed=6),
    ]
    random_head(*ends).save(result)
    lines = [{"question": name, "answer": "b"} for name in ("ab cd", "bcd ab")]
    (result / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return result


@pytest.fixture
def swept(folder: Path, tmp_path: Path) -> Callable[..., int]:
    """Runs the command on that folder."""

    def run(**changes: str) -> int:
        values = {
            "--draft": str(folder / "draft"),
            "--target": str(folder / "target"),
            "--head": str(folder / "random"),
            "--questions": str(folder / "questions.jsonl"),
            "--task": "exact",
            "--thresholds": "0,0.5,1",
            "--windows": "2,4",
            "--links": "500:5,20:50",
            "--max-tokens": "12",
            "--whole": "1",
            "--threads": "1",
            "--out": str(tmp_path / "s.jsonl"),
            "--json": str(tmp_path / "s.json"),
        }
        values |= {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        words = [word for item in values.items() for word in item]
        return main(["judge", "sweep", *[word for word in words if word]])

    return run


def test_the_command_goes_on_and_shows_the_same(
    swept: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept(count="1") == 0
    first = (tmp_path / "s.jsonl").read_text()
    assert swept(plot=str(tmp_path / "s.png")) == 0
    whole = (tmp_path / "s.jsonl").read_text()
    assert whole.startswith(first)
    assert len(whole.splitlines()) == 4  # plan, pace and two questions
    out = capsys.readouterr().out
    assert "Seconds are modelled" in out
    assert "20 Mbit/s, 50 ms, window 4, 2 questions" in out
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    report = ["judge", "sweep", "--report", str(tmp_path / "s.jsonl"), "--json", "-"]
    assert main(report) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "s.json").read_text())
    assert swept(out=str(tmp_path / "other.jsonl")) == 0
    other = SweepFile(tmp_path / "other.jsonl").tallies
    assert other == SweepFile(tmp_path / "s.jsonl").tallies
    capsys.readouterr()
    assert swept(max_tokens="11") != 0
    assert "made with other options" in capsys.readouterr().err


def test_the_commands_figures_hold_together(swept: Callable[..., int], tmp_path: Path) -> None:
    assert swept(draft_ms="10", verify_ms="1:100,5:140") == 0
    payload = json.loads((tmp_path / "s.json").read_text())
    assert payload["pace"] == {"draft_s": 0.01, "verify_s": {"1": 0.1, "5": 0.14}}
    by_setting: dict[Any, Any] = {
        (item["head"], item["threshold"], item["window"], *item["profile"].values()): item
        for item in payload["figures"]
    }
    assert len(by_setting) == 2 * 2 + 3 * 2 * 2
    for window in (2, 4):
        plain = by_setting[None, None, window, 20.0, 50.0]
        strict = by_setting["random", 0.0, window, 20.0, 50.0]
        assert set(plain["modelled"]) == {"greedy", "dsd"}
        assert set(strict["modelled"]) == {"wisv-full", "wisv-selective"}
        for name in ("right", "aal", "rounds", "tokens"):
            assert plain[name] == strict[name]
        assert strict["forgiven"] == 0.0
        free = by_setting["random", 1.0, window, 20.0, 50.0]
        assert free["forgiven"] == 1.0
        assert free["aal"] > strict["aal"]
        seconds = free["modelled"]["wisv-full"]["seconds"]
        assert free["modelled"]["wisv-full"]["tokens_per_s"] == free["tokens"] / seconds


def test_a_sweep_goes_into_a_heads_curve(swept: Callable[..., int], tmp_path: Path) -> None:
    ends = [tmp_path / "draft", tmp_path / "target"]
    results = [
        tiny_artifact(ends[0], tokens=OWN, eos="<x>", seed=5),
        tiny_artifact(ends[1], tokens=THEIRS, eos="<y>", seed=6),
    ]
    head = random_head(*results)
    stored = {"width": 8, "swept": 99, "coin": 0.5, "coin_low": 0.4, "coin_high": 0.6}
    card = replace(head.card, threshold=0.5, training=replace(head.card.training, options=stored))
    path = DecisionHead(card, head.tensors).save(tmp_path)
    assert swept(head=str(path), update_head="") == 0
    updated = DecisionHead.load(str(path)).card
    # rules of an earlier sweep are not compared with the head of this one
    record = updated.training.options
    assert (record["width"], record["swept"]) == (8, 2)
    assert not {"coin", "coin_low", "coin_high"} & record.keys()
    points = updated.curve
    assert [point.threshold for point in points] == [0.0, 0.5, 1.0]
    assert [point.logit for point in points] == [None, 0.0, None]
    assert [points[0].forgiven, points[2].forgiven] == [0.0, 1.0]
    assert points[2].accepted_length == pytest.approx(3.0, abs=0.5)
    assert all(point.accuracy is not None for point in points)


def test_a_head_of_another_pair_is_refused(
    swept: Callable[..., int],
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stranger = tiny_artifact(tmp_path / "stranger", tokens=OWN, eos="<x>", seed=9)
    head = random_head(stranger, Artifact.open(folder / "target")).save(tmp_path)
    assert swept(head=str(head)) != 0
    assert "was made for the drafter" in capsys.readouterr().err
    assert swept(thresholds="quantiles") != 0  # this one has no curve
    assert "name them by --thresholds" in capsys.readouterr().err


def test_a_sweep_needs_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "sweep", "--out", str(tmp_path / "s.jsonl")]) != 0
    assert "needs --draft" in capsys.readouterr().err
    assert main(["judge", "sweep"]) != 0
    assert "needs --out" in capsys.readouterr().err
    assert main(["judge", "sweep", "--report", str(tmp_path / "none.jsonl")]) != 0
    assert "no answered question" in capsys.readouterr().err
    shipped = ["--head", "default", "--update-head", "--out", str(tmp_path / "s.jsonl")]
    assert main(["judge", "sweep", *shipped]) != 0
    assert "name the path of a copy" in capsys.readouterr().err


def test_a_wider_window_is_timed_when_a_later_run_adds_it(
    swept: Callable[..., int], tmp_path: Path
) -> None:
    assert swept(windows="2", count="1") == 0
    assert swept(windows="4", count="1") == 0
    pace = json.loads((tmp_path / "s.json").read_text())["pace"]
    assert {"1", "3", "5"} <= pace["verify_s"].keys()
