"""`pilotfish bundle --board`: what it expects, warns of and refuses; and the record it keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pilotfish.boards.board import board_named
from pilotfish.boards.misfit import MisfitError
from pilotfish.cli import main
from pilotfish.deploy import manifest, models
from pilotfish.deploy.board_check import check_board
from pilotfish.deploy.errors import BundleError
from tests.support.bundles import write_wheel
from tests.support.tiny import tiny_artifact

JETSONS = ("orin-nano", "orin-nx", "agx-orin")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one model in several forms."""
    folder = tmp_path_factory.mktemp("forms")
    for dialect in ("contrib", "opset17", "opset24", "tensorrt"):
        precision = "int4" if dialect in {"contrib", "tensorrt"} else "fp16"
        tiny_artifact(folder / dialect, dialect=dialect, precision=precision)
    long = shutil.copytree(folder / "opset17", folder / "long")
    fields = json.loads((long / "manifest.json").read_text())
    fields["dimensions"]["context"] = 1 << 30
    (long / "manifest.json").write_text(json.dumps(fields))
    return folder


def run(artifact: Path, out: Path, *words: str) -> int:
    """Make a bundle; what is refused is refused before wheels are looked for."""
    fixed = ["bundle", "--artifact", str(artifact), "--edge", "tcp://edge.example:7077"]
    return main([*fixed, "--out", str(out), *words])


@pytest.mark.parametrize("board", JETSONS)
def test_an_artifact_that_leaves_the_gpu_idle_is_refused_with_the_export_that_does_not(
    artifacts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], board: str
) -> None:
    words = ("--board", board, "--jetpack", "6.2")
    assert run(artifacts / "contrib", tmp_path / "out", *words) == 65
    [line] = capsys.readouterr().err.splitlines()
    assert "idle, because tensorrt does not run the dialect contrib: " in line
    assert line.endswith(
        f"The export: pilotfish export model MODEL --board {board} --jetpack 6.2 --out DIR"
    )
    assert "--cpu" in line
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_too_large_is_refused_even_for_the_cpu(
    artifacts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ((), ("--cpu",)):
        words = ("--board", "orin-nano", "--jetpack", "6.2", *more)
        assert run(artifacts / "long", tmp_path / "out", *words) == 65
        [line] = capsys.readouterr().err.splitlines()
        assert "does not fit into Jetson Orin Nano 8 GB" in line
        assert "choose " in line


def test_a_board_with_several_jetpacks_needs_one(
    artifacts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(artifacts / "opset17", tmp_path / "out", "--board", "orin-nano")
    assert code != 0
    message = capsys.readouterr().err
    assert "6.2 (L4T 36.4) or 7.2 (L4T 39" in message
    assert "/etc/nv_tegra_release" in message


@pytest.mark.parametrize(
    "words",
    [
        ("--board", "orin-nano", "--jetpack", "5.1"),
        ("--board", "rtx", "--jetpack", "6.2"),
        ("--board", "thor", "--jetpack", "6.2"),
        ("--board", "orin-nano", "--jetpack", "6.2", "--machine", "x86_64"),
        ("--board", "toaster"),
        ("--board", "cpu", "--cpu"),
        ("--cpu",),
    ],
)
def test_contradictions_are_refused(artifacts: Path, tmp_path: Path, words: tuple[str]) -> None:
    try:
        code = run(artifacts / "opset17", tmp_path / "out", *words)
    except SystemExit as usage:
        code = int(usage.code or 0)
    assert code in {2, 64}
    assert not (tmp_path / "out").exists()


def test_what_to_expect_is_said_and_recorded(artifacts: Path) -> None:
    board = check_board(board_named("orin-nano"), "6.2", [artifacts / "opset17"])
    assert board is not None
    assert board.lines[0] == "for Jetson Orin Nano 8 GB:"
    assert any("memory: weights" in line for line in board.lines)
    assert any("tokens/s" in line for line in board.lines)
    assert not [line for line in board.lines if "WARNING" in line]
    assert (board.board, board.l4t, board.jetpack) == ("orin-nano", "36.4", "6.2")
    assert board.need_bytes > 0


@pytest.mark.slow
def test_the_cpu_by_consent_is_said_loudly_and_configured(
    artifacts: Path, tmp_path: Path, index: Path, own_keys: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = ("--board", "orin-nano", "--jetpack", "6.2", "--cpu", "--keys", str(own_keys))
    assert run(artifacts / "contrib", tmp_path / "out", *words) == 0
    loud = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert loud == ["WARNING: tiny will run on the CPU, and the GPU will idle, as --cpu says"]
    recorded = json.loads((tmp_path / "out/config/board.json").read_text())
    assert loud[0] in recorded["lines"]
    assert '\nprovider = "cpu"' in (tmp_path / "out/config/device.toml").read_text()
    assert manifest.read(tmp_path / "out").python == "3.10"


def test_the_cpu_is_said_loudly_also_of_what_the_gpu_could_run(artifacts: Path) -> None:
    orin = board_named("orin-nano")
    board = check_board(orin, "6.2", [artifacts / "opset17"], cpu=True)
    assert board is not None
    assert len([line for line in board.lines if "will run on the CPU" in line]) == 1


def test_a_jetpack_without_a_board_is_a_warning(artifacts: Path) -> None:
    for form, warned in (("contrib", True), ("opset17", False), ("opset24", True)):
        board = check_board(None, "6.2", [artifacts / form])
        assert board is not None
        assert bool([line for line in board.lines if "WARNING" in line]) == warned
        assert "no --board is named" in board.lines[0]
    assert check_board(None, None, [artifacts / "contrib"]) is None


def test_quantised_weights_are_for_jetpack_7(artifacts: Path) -> None:
    orin = board_named("orin-nano")
    board = check_board(orin, "7.2", [artifacts / "tensorrt"])
    assert board is not None
    assert not [line for line in board.lines if "WARNING" in line]
    with pytest.raises(MisfitError, match=r"TensorRT 10\.3"):
        check_board(orin, "6.2", [artifacts / "tensorrt"])


def test_a_vendors_runtime_runs_what_tensorrt_does_not(artifacts: Path, tmp_path: Path) -> None:
    gpu = write_wheel(
        tmp_path,
        "onnxruntime_gpu",
        {"onnxruntime/__init__.py": b""},
        version="1.23.0",
        tag="cp310-cp310-linux_aarch64",
    )
    orin = board_named("orin-nano")
    board = check_board(orin, "6.2", [artifacts / "opset24"], wheels=[gpu])
    assert board is not None
    assert not [line for line in board.lines if "WARNING" in line]


def test_states_that_the_runtime_of_python_3_10_cannot_compute_are_refused(tmp_path: Path) -> None:
    """ONNX Runtime 1.23, the last for Python 3.10, lacks an operator of theirs."""
    mamba, lfm2 = (
        tiny_artifact(tmp_path / name, dialect="contrib", architecture=name).path
        for name in ("mamba", "lfm2")
    )
    with pytest.raises(BundleError, match="recurrent states"):
        models.open_artifact(mamba, "3.10")
    models.open_artifact(mamba, "3.12")
    models.open_artifact(lfm2, "3.10")  # its states are inputs of a convolution alone
