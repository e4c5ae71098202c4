"""What ``pilotfish distill`` refuses before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Pair
from tests.support.commands import refusal


@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        (
            ["--out", "{target}"],
            64,
            "--out names the same folder as --target: name another folder.",
        ),
        (
            ["--out", "run", "--run-folder", "./run"],
            64,
            "--out names the same folder as --run-folder",
        ),
        (["--out", "thesis"], 65, "thesis contains something other than an export"),
        (["--out", "out", "--top", "0", "--hard", "0"], 64, "there is nothing to learn from"),
        (["--out", "out", "--edge", "tcp://127.0.0.1:1"], 64, "Name the target"),
    ],
)
def test_what_would_end_a_run_late_is_refused_at_once(
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("thesis").mkdir()
    Path("thesis/chapter").write_text("1")
    info = [item.format(target=pair.target) for item in more]
    line = refusal(capsys, code, "distill", "--draft", "d", "--target", pair.target, *info)
    assert text in line
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def test_without_torch_nobody_is_asked(
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pilotfish.lab.distill.trainable_drafter.find_spec", lambda _: None)
    messages = ["--draft", "d", "--target", pair.target, "--out", "out"]
    assert "Training needs torch" in refusal(capsys, 70, "distill", *messages)
    assert not list(tmp_path.iterdir())
