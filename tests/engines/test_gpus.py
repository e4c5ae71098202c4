"""A GPU that a model does not use is told of: by its device nodes, whatever libraries there are."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pilotfish.engines import gpus
from pilotfish.engines.onnx_decoder import Decoder
from tests.support.runnable import hide_gpus
from tests.support.tiny import tiny_artifact

NODES = {
    "a card": ["nvidia0", "nvidiactl", "nvidia-uvm"],
    "Orin": ["nvgpu/igpu0/as", "nvmap", "nvhost-ctrl"],
    "Xavier": ["nvhost-gpu", "nvhost-ctrl-gpu", "nvmap"],
    "Thor": ["nvidia0", "nvidiactl", "nvmap"],
}
NONE = {
    "no GPU": ["null", "dri/card0"],
    "the driver without a card": ["nvidiactl", "nvidia-uvm", "nvidia-modeset"],
}


def dev(folder: Path, nodes: list[str]) -> Path:
    for node in nodes:
        path = folder / "dev" / node
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder / "dev"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_artifact(tmp_path_factory.mktemp("tiny") / "a").path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("machine", NODES)
def test_a_gpu_that_is_not_used_is_a_warning(
    tmp_path: Path,
    artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    machine: str,
) -> None:
    hide_gpus(monkeypatch)
    monkeypatch.setattr(gpus, "_DEV", dev(tmp_path, NODES[machine]))
    assert Decoder(artifact).provider == "cpu"
    [warning] = warnings(caplog)
    assert str(tmp_path) in warning  # which GPU
    assert "cuda: " in warning  # why
    assert "docs/engines.md" in warning  # what to do


@pytest.mark.parametrize("machine", NONE)
def test_without_a_gpu_there_is_none(
    tmp_path: Path,
    artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    machine: str,
) -> None:
    monkeypatch.setattr(gpus, "_DEV", dev(tmp_path, NONE[machine]))
    Decoder(artifact)
    assert warnings(caplog) == []


def test_the_cpu_by_choice_is_no_warning(
    tmp_path: Path,
    artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(gpus, "_DEV", dev(tmp_path, NODES["a card"]))
    Decoder(artifact, provider="cpu")
    assert warnings(caplog) == []
