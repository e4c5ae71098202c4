"""What people asked and were answered is written for its owner alone, whatever the umask."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotfish.base.files import private_folder
from pilotfish.engines.cache import replace_file
from pilotfish.lab.distill.answers import TrainingExampleFile
from pilotfish.lab.distill.run_folder import RunFolder
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.target_answers import AnswerFile, AnswerHeader
from pilotfish.lab.judge.episodes import MiningRecord
from tests.conftest import Pair
from tests.support.made_answers import facts


@pytest.fixture(autouse=True)
def generous() -> Iterator[None]:
    before = os.umask(0o000)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    results = [folder, *folder.rglob("*")]
    return {
        str(result.relative_to(folder)): stat.S_IMODE(result.stat().st_mode) for result in results
    }


def test_a_run_file_and_what_lies_beside_it_while_it_is_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with Recorder.create(tmp_path / "run", facts()) as recorder:
        recorder.change_facts(starts=())
        during = modes(tmp_path)
    assert during == {".": 0o755, "run": 0o600, "run-wal": 0o600, "run-shm": 0o600}
    with Recorder.resume(tmp_path / "run"):
        pass
    assert modes(tmp_path) == {".": 0o755, "run": 0o600}


def test_answers_that_drafters_are_compared_by(tmp_path: Path) -> None:
    asking = AnswerHeader(
        target="t", digest="d", prompts=["a"], max_tokens=1, temperature=0.0, seed=None
    )
    with AnswerFile(tmp_path / "answers", asking, 10, resume=False):
        pass
    assert modes(tmp_path)["answers"] == 0o600


def test_a_folder_of_distillation(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "above" / "run") as folder:
        folder.expect({"a": 1}, "settings")
        folder.write_shared_ids(None)
        TrainingExampleFile(folder.answers)
    result = modes(tmp_path / "above")
    assert result.pop(".") == result.pop("run") == 0o700
    assert set(result.values()) == {0o600}


def test_episodes_of_a_judge(tmp_path: Path) -> None:
    with MiningRecord("t", "i", 1, None, False, {}, {}).writing(tmp_path / "mined"):
        pass
    assert modes(tmp_path / "mined") == {".": 0o700, ".lock": 0o600, "mined.json": 0o600}


def test_what_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o750)
    private_folder(tmp_path / "run" / "deep" / "er")
    assert modes(tmp_path / "run") == {".": 0o750, "deep": 0o700, "deep/er": 0o700}
    replace_file(tmp_path / "run" / "shared", b"")
    assert modes(tmp_path / "run")["shared"] == 0o666


def test_files_of_field_measure(pair: Pair, tmp_path: Path) -> None:
    out, report = tmp_path / "run", tmp_path / "made" / "report"
    (tmp_path / "prompts").write_text("a secret\n")
    words = ("--draft", pair.draft, "--prompts", tmp_path / "prompts", "--protocols", "greedy")
    words += ("--windows", 2, "--repeat", 1, "--max-tokens", 2, "--threads", 1, "--out", out)
    script = (
        "import sys\nfrom pilotfish import EdgeServer\nfrom pilotfish.cli import main\n"
        "with EdgeServer(sys.argv[1], threads=1) as edge:\n"
        "    code = main([*sys.argv[2:], '--edge', edge.endpoint])\nsys.exit(code)"
    )
    command = [sys.executable, "-c", script, pair.target, "field", "measure", *words]
    subprocess.run([*map(str, command)], check=True, capture_output=True, timeout=120)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    done = [sys.executable, "-m", "pilotfish", "field", "report", out, "--out", report]
    subprocess.run([*map(str, done)], check=True, capture_output=True, timeout=120)
    assert modes(report)["."] == 0o700
    assert modes(report)["report.html"] == 0o600
    assert modes(tmp_path / "made")["."] == 0o700
