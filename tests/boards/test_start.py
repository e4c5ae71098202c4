"""What a program says of a GPU that its model leaves idle, and of memory, by machine and form."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from pilotfish.boards import start
from pilotfish.boards.start import warn_before_load, warn_of_idle_gpu
from pilotfish.engines import gpus
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.gpus import IdleGpu
from tests.support.other_machine import NODES, ORIN_NANO, machine
from tests.support.tiny import tiny_artifact

IDLE = IdleGpu(
    Path("/dev/gpu"),
    ("tensorrt: no engine", "tensorrt-rtx: no engine", "cuda: built without this provider"),
)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    for dialect in ("contrib", "opset17", "opset24"):
        tiny_artifact(folder / dialect, dialect=dialect)
    tiny_artifact(folder / "states", dialect="contrib", architecture="mamba")
    return folder


@pytest.fixture
def orin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine is an Orin Nano."""
    machine(tmp_path / "orin", NODES["Orin"], tree=ORIN_NANO)
    monkeypatch.setattr(start, "_ROOT", tmp_path / "orin")
    monkeypatch.setattr(gpus, "_DEV", tmp_path / "orin/dev")
    return tmp_path / "orin"


def sentence(artifact: Artifact, idle: IdleGpu = IDLE) -> str:
    [misfit] = warn_of_idle_gpu(artifact, idle)
    assert not misfit.refuses
    assert "(/dev/gpu): " in misfit.message
    return misfit.message


def test_a_form_that_no_gpu_runs_is_exported_again(forms: Path, orin: Path) -> None:
    message = sentence(Artifact.open(forms / "contrib"))
    assert "tensorrt does not run the dialect contrib" in message
    assert "`pilotfish export model MODEL --board orin-nano --out DIR`" in message
    assert "no engine" not in message


def test_a_form_that_the_gpu_can_run_lacks_what_its_own_providers_say(
    forms: Path, orin: Path
) -> None:
    for form in ("opset17", "opset24"):  # opset 24: JetPack 7's TensorRT runs it
        message = sentence(Artifact.open(forms / form))
        assert "tensorrt: no engine; cuda: built without this provider" in message
        assert "tensorrt-rtx" not in message  # no Jetson runs it
        assert "pilotfish doctor" in message


def test_recurrent_states_need_another_model(forms: Path, orin: Path) -> None:
    message = sentence(Artifact.open(forms / "states"))
    assert "choose a model without recurrent states" in message
    assert "export model" not in message


def test_an_unknown_machine_leaves_the_board_to_the_user(
    forms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path / "carrier", NODES["Orin"], tree="maker,board\0nvidia,tegra999\0")
    monkeypatch.setattr(start, "_ROOT", tmp_path / "carrier")
    assert "--board BOARD --out DIR" in sentence(Artifact.open(forms / "contrib"))
    message = sentence(Artifact.open(forms / "opset17"))
    assert "tensorrt-rtx: no engine" in message


def test_a_container_without_the_device_tree_names_no_board(
    forms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path / "container", NODES["Orin"])
    monkeypatch.setattr(start, "_ROOT", tmp_path / "container")
    orin = IDLE._replace(node=Path("/dev/nvgpu/igpu0"))
    [misfit] = warn_of_idle_gpu(Artifact.open(forms / "contrib"), orin)
    assert "--board BOARD --out DIR" in misfit.message
    assert "tensorrt does not run the dialect contrib" in misfit.message
    [misfit] = warn_of_idle_gpu(Artifact.open(forms / "opset17"), orin)
    assert "tensorrt-rtx" not in misfit.message


def test_llama_cpp_is_built_for_the_gpu_or_not(forms: Path, orin: Path) -> None:
    graph = Artifact.open(forms / "opset17")
    manifest = replace(graph.manifest, dialect="llamacpp", precision="gguf", opset=None)
    message = sentence(
        Artifact(graph.path, manifest), IDLE._replace(reasons=("llama-cpp-python finds no GPU",))
    )
    assert "llama-cpp-python finds no GPU" in message


def test_memory_is_compared_with_the_boards(forms: Path, orin: Path) -> None:
    graph = Artifact.open(forms / "opset17")
    assert warn_before_load(graph) == ()
    sizes = replace(graph.manifest.dimensions, context=1 << 30)
    long = Artifact(graph.path, replace(graph.manifest, dimensions=sizes))
    [misfit] = warn_before_load(long)
    assert "does not fit into Jetson Orin Nano 8 GB" in misfit.message
    assert warn_before_load(long, 64) == ()


def test_memory_is_what_the_kernel_reports_not_what_was_published(forms: Path, orin: Path) -> None:
    (orin / "proc/meminfo").write_text("MemTotal:       64 kB\n")  # carveouts took the rest
    [misfit] = warn_before_load(Artifact.open(forms / "opset17"))
    assert "does not fit into Jetson Orin Nano 8 GB" in misfit.message
    assert "than the 0 MiB there" in misfit.message


def test_the_memory_of_a_card_is_not_known(
    forms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path / "card", NODES["a card"], memory_kib=8)
    monkeypatch.setattr(start, "_ROOT", tmp_path / "card")
    monkeypatch.setattr(gpus, "_DEV", tmp_path / "card/dev")
    assert warn_before_load(Artifact.open(forms / "opset17")) == ()
