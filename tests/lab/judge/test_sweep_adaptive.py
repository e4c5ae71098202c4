"""A sweep with `adaptive`: further settings in the same file, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pilotfish.cli import main
from pilotfish.lab.judge.figures import figures
from pilotfish.lab.judge.sweep_file import SweepFile, SweepSetting
from pilotfish.lab.judge.trajectories import CourseRound
from tests.lab.judge.test_sweep import FAST, SLOW, metrics, plan
from tests.lab.judge.test_sweep_command import folder, swept

__all__ = ["folder", "swept"]  # fixtures


def test_a_sweep_takes_further_settings(tmp_path: Path) -> None:
    path, early = tmp_path / "s.jsonl", plan(SweepSetting(4), links=[FAST])
    counts = [metrics(True, CourseRound(4, at, 0, 1, None)) for at in range(4)]
    sweep_file = SweepFile(path)
    with sweep_file.writing(early):
        sweep_file.add("q-1", counts[:1])
        sweep_file.add("q-2", counts[:1])
    more = SweepSetting(4, tau=0.2), SweepSetting(4, "h", 0.5, SLOW)
    with sweep_file.writing(plan(more[0], more[1], early.settings[0], links=[SLOW])):
        assert sweep_file.plan is not None
        assert sweep_file.plan.settings == [SweepSetting(4), *more]
        assert sweep_file.plan.profiles == [FAST, SLOW]
        sweep_file.add("q-1", counts[1:3])
    again = SweepFile(path)
    assert again.plan == sweep_file.plan
    assert again.tallies == {"q-1": counts[:3], "q-2": counts[:1]}
    before = path.stat().st_size
    with again.writing(early):  # fewer settings change nothing
        pass
    assert path.stat().st_size == before
    result = figures(again.plan, list(again.tallies.values()))
    assert [figure.n for figure in result] == [2, 1, 1]


def test_a_sweep_answers_with_adaptive_too(
    swept: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept(tau="0,0.9", lambdas="1e6,1,0") == 0
    assert swept(tau="0,0.5,0.9", lambdas="1e6,1,0", windows="2") == 0  # adds τ 0.5
    capsys.readouterr()
    sweep_file = SweepFile(tmp_path / "s.jsonl")
    assert sweep_file.plan is not None
    assert sweep_file.plan.settings[-1] == SweepSetting(2, tau=0.5)
    payload = json.loads((tmp_path / "s.json").read_text())
    relaxed = {item["tau"]: item for item in payload["figures"] if item["tau"] is not None}
    assert [*relaxed] == [0.0, 0.9, 0.5]
    for tau, item in relaxed.items():
        assert item["n"] == 2
        assert item["key"] == 0.0
        assert (item["deviation"] > 0.0) == (tau > 0.0)
        spent = item["modelled"]["adaptive"]
        assert spent["exchanges"] == item["rounds"]
        assert spent["up"] > 45 * item["rounds"]  # headers, ids and distributions
    assert (relaxed[0.0]["gained"], relaxed[0.0]["aal_gained"]) == (0.0, 0.0)
    assert swept(tau="0.9", lambdas="1e6,1,0", seed="1") != 0
    assert "other options (sampling)" in capsys.readouterr().err
    names = ["--questions", "x", "--draft", "x", "--target", "x"]
    assert main(["judge", "sweep", "--out", str(tmp_path / "t.jsonl"), *names]) != 0
    assert "needs --head" in capsys.readouterr().err


def test_each_tau_is_answered_at_its_own_window(swept: Callable[..., int], tmp_path: Path) -> None:
    """Also by a run that answers a question at the windows of two commands."""
    setting, options = SweepSetting(4, tau=0.9), {"tau": "0.9", "lambdas": "1e6,1,0"}
    assert swept(**options, windows="2", count="1") == 0
    assert swept(**options, windows="4") == 0
    assert swept(**options, windows="4", out=str(tmp_path / "fresh.jsonl")) == 0
    both, fresh = (SweepFile(tmp_path / name) for name in ("s.jsonl", "fresh.jsonl"))
    assert both.plan is not None
    assert fresh.plan is not None
    at, expected_at = both.plan.settings.index(setting), fresh.plan.settings.index(setting)
    for question, counts in fresh.tallies.items():
        assert both.tallies[question][at] == counts[expected_at]
