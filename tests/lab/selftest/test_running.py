"""What becomes of a provider whose process dies or hangs: real processes that do so."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from pilotfish.lab.selftest import running
from pilotfish.lab.selftest.check_artifacts import CheckArtifacts
from pilotfish.lab.selftest.check_result import CheckResult
from pilotfish.lab.selftest.models import KINDS
from pilotfish.lab.selftest.running import Runner
from pilotfish.lab.selftest.worker import ProviderJob

# Does of each job what its model is called, as the process of a provider would.
SCRIPT = """
import json, os, socket, sys, time
order, end = json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
def tell(said): end.sendall(json.dumps(said).encode() + b"\\n")
for index, job in enumerate(order["jobs"]):
    tell({"doing": {"job": index, "check": "tree"}})
    if job["model"] == "dies":
        os.abort()
    if job["model"] == "hangs":
        time.sleep(60)
    named = {name: job[name] for name in ("model", "precision", "dialect")}
    tell({"finding": {**named, "provider": "cuda", "check": "tree", "status": "passed"}})
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    path = tmp_path / "provider.py"
    path.write_text(SCRIPT)
    return [sys.executable, str(path)]


def tried(script: list[str], *models: str, minutes: float = 10.0) -> list[CheckResult]:
    runner = Runner(lambda *_: None, minutes=minutes, quick=True, command=script)
    jobs = [
        ProviderJob(model=each, dialect="opset24", precision="fp32", artifact="-")
        for each in models
    ]
    runner.attempt("cuda", jobs)
    return runner.report.findings


def test_without_a_network_the_default_model_is_left_out_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # where nothing listens
    monkeypatch.setenv("PIP_RETRIES", "0")
    shelf = CheckArtifacts(tmp_path, lambda *_: None)
    jobs = shelf.jobs("cpu", quick=False)
    assert {each.model for each in jobs} == set(KINDS)
    assert shelf.missing is not None
    assert "could not be fetched" in shelf.missing


def test_after_a_crash_the_next_model_is_tried(script: list[str]) -> None:
    first, dead, last = tried(script, "works", "dies", "works")
    assert first.status == last.status == "passed"
    assert (dead.status, dead.check) == ("failed", "tree")
    assert "SIGABRT" in dead.reason


def test_a_provider_that_hangs_is_ended_and_the_next_model_is_tried(
    script: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MOST_SILENCE_S", 1.5)
    hung, last = tried(script, "hangs", "works")
    assert (hung.status, hung.check) == ("failed", "tree")
    assert "no message" in hung.reason
    assert last.status == "passed"


def test_when_the_time_is_over_the_rest_is_left_out(script: list[str]) -> None:
    begin = time.monotonic()
    first, *rest = tried(script, "works", "hangs", "works", minutes=0.02)
    assert time.monotonic() - begin < 20
    assert first.status == "passed"
    assert [each.status for each in rest] == ["left out", "left out"]
    assert all("--minutes" in each.reason for each in rest)
