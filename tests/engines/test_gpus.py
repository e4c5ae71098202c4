"""A GPU that a model does not use is told of: by its device nodes, whatever libraries there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish.engines import gpus
from pilotfish.engines.onnx_decoder import Decoder
from tests.support.other_machine import NODES, make_nodes
from tests.support.runnable import hide_gpus
from tests.support.tiny import tiny_artifact

NONE = {
    "no GPU": ["null", "dri/card0"],
    "the driver without a card": ["nvidiactl", "nvidia-uvm", "nvidia-modeset"],
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_artifact(tmp_path_factory.mktemp("tiny") / "a").path


@pytest.mark.parametrize("machine", NODES)
def test_a_gpu_that_is_not_used_is_told(
    tmp_path: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    hide_gpus(monkeypatch)
    monkeypatch.setattr(gpus, "_DEV", make_nodes(tmp_path, NODES[machine]))
    model = Decoder(artifact)
    idle = model.idle_gpu
    assert model.provider == "cpu"
    assert idle is not None
    assert idle.node.is_relative_to(tmp_path)
    assert any(reason.startswith("cuda: ") for reason in idle.reasons)
    assert model.execution.idle_gpu == idle


@pytest.mark.parametrize("machine", NONE)
def test_without_a_gpu_there_is_none(
    tmp_path: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    monkeypatch.setattr(gpus, "_DEV", make_nodes(tmp_path, NONE[machine]))
    assert Decoder(artifact).idle_gpu is None


def test_the_cpu_by_choice_leaves_no_gpu_idle(
    tmp_path: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_DEV", make_nodes(tmp_path, NODES["a card"]))
    assert Decoder(artifact, provider="cpu").idle_gpu is None
