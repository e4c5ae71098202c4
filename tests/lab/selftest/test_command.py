"""``pilotfish selftest`` as a user runs it: real processes, real edges, this machine's CPU."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pilotfish.engines.backends import PROVIDERS
from pilotfish.engines.runtime import LINEAR_ATTENTION_SINCE, runtime_version
from pilotfish.lab.selftest.checks import CHECKS
from pilotfish.lab.selftest.models import BOTH_ENDS, KINDS, LINEAR, STATEFUL, TARGET, WITHOUT_STAGES
from pilotfish.lab.selftest.protocols import LOSSLESS
from pilotfish.lab.selftest.providers import FP32, QUANTISED, VARIANTS
from tests.support.commands import command
from tests.support.runnable import runnable

# A module for all processes of the command, and the kinds of models that it leaves.
FEW = ("tests.support.few_kinds", (TARGET, "lfm2"))
WHOLE = pytest.param("", tuple(KINDS), marks=pytest.mark.slow)


def selftest(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("selftest", "--quick", *arguments),
        env={**os.environ, "PILOTFISH_CACHE": str(folder), "PYTHONWARNINGS": "ignore"}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def statuses(options: dict[str, Any], **wanted: str) -> dict[str, str]:
    """Of the findings with these fields, by check."""
    return {
        each["check"]: each["status"]
        for each in options["findings"]
        if all(each[name] == value for name, value in wanted.items())
    }


def reasons(options: dict[str, Any], **wanted: str) -> set[str]:
    """The reasons of the findings with these fields."""
    return {
        each["reason"]
        for each in options["findings"]
        if all(each[name] == value for name, value in wanted.items())
    }


@pytest.mark.parametrize(("module", "kinds"), [FEW, WHOLE], ids=["few kinds", "all kinds"])
def test_the_cpu_passes_and_what_is_not_there_is_named(
    tmp_path: Path, module: str, kinds: tuple[str, ...]
) -> None:
    out = tmp_path / "figures.json"
    done = selftest(tmp_path, "--json", "--out", str(out), PILOTFISH_PROTOCOLS=module)
    assert done.returncode == 0, done.stderr
    payload = json.loads(done.stdout)
    assert json.loads(out.read_text()) == payload
    assert payload["passed"]
    assert payload["providers"].keys() == PROVIDERS.keys()
    for name, presence in payload["providers"].items():
        assert presence["there"] or presence["reason"], name
    assert {each["model"] for each in payload["findings"]} == {*kinds}
    for model in kinds:
        for variant in VARIANTS["cpu"]:
            if not variant.every and model != TARGET:
                continue
            of = {"provider": "cpu", "model": model, "dialect": variant.dialect}
            info = statuses(payload, **of)
            if model in LINEAR and variant.dialect == "opset17":
                assert not info
                continue
            if variant.dialect not in runnable():
                assert info == {"opening": "left out"}, of
                continue
            if model in LINEAR and runtime_version() < LINEAR_ATTENTION_SINCE:
                assert info == {"opening": "left out"}, of
                assert reasons(payload, **of) == {"linear attention needs ONNX Runtime 1.31"}
                continue
            assert info.keys() >= {"opening", *CHECKS}, of
            if model in STATEFUL:
                assert info.pop("tree") == "not there", of
            assert set(info.values()) == {"passed"}, of
            main = variant.dialect == ("opset24" if "opset24" in runnable() else "opset17")
            assert ("stages" in info) == (main and model not in WITHOUT_STAGES), of
            assert (info.keys() >= LOSSLESS.keys()) == (main and model in BOTH_ENDS), of
    ours = [each for each in payload["findings"] if each["provider"] == "cpu"]
    apart = {
        precision: [
            each["difference"]
            for each in ours
            if each["precision"] == precision and "difference" in each
        ]
        for precision in ("fp32", "int4")
    }
    # other kernels, other roundings: and tolerance to spare
    assert 0 < max(apart["fp32"]) < FP32 / 10
    assert bool(apart["int4"]) == ("tensorrt" in runnable())
    assert all(each < QUANTISED / 2 for each in apart["int4"])
    times = payload["times"][0]
    assert times["model"] == TARGET
    assert all(0 < times["least_ms"][size] <= ms for size, ms in times["median_ms"].items())
    assert any("default model" in each for each in payload["left_out"])
    assert payload["machine"]["packages"]["onnxruntime"]
    assert "cpu: llama" in done.stderr  # what takes long is told


@pytest.mark.parametrize(("module", "kinds"), [FEW, WHOLE], ids=["few kinds", "all kinds"])
def test_over_the_doubles_decoders_pass_and_an_edge_that_errs_is_found(
    tmp_path: Path, module: str, kinds: tuple[str, ...]
) -> None:
    """All of it through the processes of the command; the edge alone has a fault."""
    done = selftest(
        *(tmp_path, "--provider", "tensorrt", "--out", str(tmp_path / "figures.json")),
        PILOTFISH_PROTOCOLS=f"tests.support.doubled_gpu,{module}",
    )
    stateful = {*STATEFUL} & {*kinds}
    assert done.returncode == 1, done.stderr
    payload = json.loads((tmp_path / "figures.json").read_text())
    counter = Counter((each["check"], each["status"]) for each in payload["findings"])
    # 10.16 knows all three dialects, but the double runs its engines with this onnxruntime
    new = len({"opset24", "tensorrt"} & {*runnable()})
    for check in ("opening", *CHECKS):
        assert counter.pop((check, "passed")) == len(kinds) - len(stateful) + 1 + new
    assert counter.pop(("opening", "failed"), 0) == 2 - new
    assert counter.pop(("opening", "left out")) == len(stateful)
    assert counter.pop(("stages", "passed")) == 1
    ends = len({*BOTH_ENDS} & {*kinds} - stateful)
    assert counter == dict.fromkeys([(name, "differs") for name in LOSSLESS], ends)
    machine = payload["providers"]["tensorrt"]["machine"]
    assert machine["tensorrt"] == "10.16.2"
    assert machine["gpu"] == "Orin"
    assert machine["cuda"] == "12.6"
    assert "SOMETHING DIFFERS" in done.stdout
    assert "instead of" in done.stdout
    assert "lfm2 has recurrent states" in " ".join(done.stdout.split())
    assert "building its engine" in done.stderr


@pytest.mark.skipif(find_spec("tensorrt") is not None, reason="TensorRT is there")
def test_a_named_provider_that_is_not_there_is_an_exit_code(tmp_path: Path) -> None:
    done = selftest(tmp_path, "--provider", "tensorrt", "--json")
    assert done.returncode == 69, done.stderr
    payload = json.loads(done.stdout)
    assert payload["findings"] == []
    assert payload["doctor"]["format"] == "pilotfish-doctor"
    assert "TensorRT cannot be imported" in payload["providers"]["tensorrt"]["reason"]


def test_a_file_that_cannot_be_written_is_told_before_anything_is_tried(tmp_path: Path) -> None:
    done = selftest(tmp_path, "--out", str(tmp_path / "none" / "figures.json"))
    assert done.returncode == 74
    assert done.stderr.startswith("pilotfish: ")
    assert len(done.stderr.splitlines()) == 1
