"""The doctor over machines that people showed in public threads."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from pilotfish.base.errors import ConfigError
from pilotfish.lab.doctor.doctor_page import show
from pilotfish.lab.doctor.examination import Examination, examine
from pilotfish.lab.doctor.machine import recorded_machine
from pilotfish.lab.doctor.outlook import Subject
from tests.support.machines import RECORDINGS, examined, mends, subjects

# Recording → what is wrong (subjects of faults, and of warnings), and some of its facts.
WRONG: dict[str, tuple[set[str], set[str], dict[str, object]]] = {
    "a100-mig": (set(), {"GPU"}, {"mig": True, "compute": "8.0", "driver_cuda": "12.1"}),
    "agx-orin-balena": (set(), set(), {"l4t": "36.3.0", "power_mode": "MAXN"}),
    "agx-orin-jetpack-6": (set(), set(), {"board_name": "agx-orin", "jetpack": "6.2.1"}),
    "agx-orin-jetpack-7": (set(), set(), {"board_name": "agx-orin", "jetpack": "7.2"}),
    "agx-orin-without-cuda": (set(), {"JetPack"}, {"board_name": "agx-orin", "jetpack": "6.0"}),
    "dgx-spark": (set(), set(), {"compute": "12.1", "gpu_memory_bytes": None}),
    "driver-mismatch": ({"GPU"}, set(), {"driver": "580.173.02"}),
    "nano": (set(), set(), {"memory_bytes": 3956 << 20, "tegra": True}),
    "nano-jetpack-4": ({"board"}, set(), {"jetpack": "4.4", "soc": "tegra210"}),
    "orin-nano-15w": (
        {"ONNX Runtime"},
        set(),
        {"board_name": "orin-nano", "tensorrt_libraries": "10.3.0.30", "power_mode": "15W"},
    ),
    "orin-nano-jetpack-5": ({"JetPack"}, set(), {"board_name": "orin-nano", "l4t": "35.5.0"}),
    "orin-nx-15w": (set(), {"power mode"}, {"board_name": "orin-nx-8gb", "jetpack": "6.2"}),
    "orin-nx-clocks": (set(), set(), {"board_name": "orin-nx", "governor": "schedutil"}),
    "orin-nx-jetpack-5": ({"JetPack"}, set(), {"jetpack": "5.1.4", "cuda": "11.8"}),
    "orin-nx-without-model": (set(), set(), {"board_name": "orin-nx", "l4t": "36.3.0"}),
    "orin-wrong-clock": (set(), {"clock"}, {"time": "2025-03-29T09:37:23+00:00"}),
    "raspberry-pi-4": ({"ONNX Runtime"}, set(), {"machine": "aarch64", "python": "3.11.2"}),
    "rtx-laptop": ({"GPU"}, set(), {"driver": "595.71.05", "compute": "8.6"}),
    "rtx-two-wheels": ({"ONNX Runtime"}, set(), {"driver_cuda": "12.2", "board_name": "rtx"}),
    "thor-jetpack-7": (set(), set(), {"board_name": "thor", "jetpack": "7.0", "soc": "tegra264"}),
    "wsl-rtx-3060": ({"GPU"}, set(), {"compute": "8.6"}),
    "xavier-nx": ({"board"}, set(), {"soc": "tegra194", "jetpack": "5.1.1"}),
}


def examination_of(name: str) -> Examination:
    return examined(recorded_machine(RECORDINGS / f"{name}.toml"))


def test_every_recording_is_expected() -> None:
    assert {path.stem for path in RECORDINGS.glob("*.toml")} == WRONG.keys()


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_and_nothing_else_is_found(name: str) -> None:
    faults, warnings, facts = WRONG[name]
    examination = examination_of(name)
    assert subjects(examination, "fault") == faults
    assert subjects(examination, "warning") == warnings
    for fact, value in facts.items():
        assert getattr(examination.machine, fact) == value, fact


@pytest.mark.parametrize("name", WRONG)
def test_nothing_of_this_machine_gets_into_a_recording(name: str) -> None:
    machine = examination_of(name).machine
    assert machine.pilotfish is None
    assert machine.disks == ()
    assert machine.open_files is None
    assert machine.absent is None
    assert machine.board_name != "cpu"


def test_an_empty_recording_knows_nothing_and_finds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("")
    examination = examined(recorded_machine(path))
    assert msgspec.to_builtins(examination.machine) == {}
    assert examination.findings == ()
    assert {each.works for each in examination.expects.providers} <= {None, False}


def test_the_form_for_an_older_jetpack_is_one_that_its_tensorrt_takes() -> None:
    expects = examination_of("thor-jetpack-7").expects
    assert expects.advice is not None
    assert "--board thor --dialect opset17 --precision fp16 " in expects.advice
    assert (expects.dialect, expects.precision) == ("opset17", "fp16")
    newer = examination_of("agx-orin-jetpack-7").expects.advice or ""
    assert newer.endswith("--board agx-orin --jetpack 7.2 --out FOLDER")


def test_of_two_wheels_on_a_board_its_own_one_is_kept() -> None:
    (mend,) = mends(examination_of("orin-nano-15w"), "ONNX Runtime")
    assert mend is not None
    assert mend.startswith("pip uninstall -y onnxruntime && ")
    (mend,) = mends(examination_of("rtx-two-wheels"), "ONNX Runtime")
    assert mend is not None
    assert mend.endswith("pip install 'pilotfish[gpu]'")


def test_a_board_of_unknown_memory_has_no_memory() -> None:
    """An AGX Orin has 32 or 64 GB; of a Nano with one module number the memory is known."""
    assert examination_of("agx-orin-jetpack-6").expects.board_bytes is None
    expects = examination_of("orin-nx-15w").expects
    assert expects.board_bytes is not None
    assert expects.tokens_per_s_bound is not None


def test_on_a_jetson_without_python_3_10_nothing_runs() -> None:
    for name in ("xavier-nx", "orin-nano-jetpack-5", "orin-nx-jetpack-5"):
        examination = examination_of(name)
        assert {each.works for each in examination.expects.providers} == {False}
        assert examination.exit_code == 3


@pytest.mark.parametrize(
    "text",
    [
        "[commands",
        "files = 3",
        '[commands."x"]\nstatus = "?"',
        "[files]\na = 1",
        '[files]\n"/a\\u0000b" = "x"',
        f'[files]\n"/{"a" * 300}" = "x"',
        '[files]\n"/a" = "x"\n"/a/b" = "y"',
        '[files]\n"/" = "x"',
        '[commands]\n"cat /a/.." = "y"',
    ],
)
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no recorded machine"):
        recorded_machine(path)


def test_a_recording_writes_only_below_its_root(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text('[files]\n"/../../../../tmp/h-pilotfish-doctor-escaped" = "x"\n')
    machine = recorded_machine(path)
    assert not Path("/tmp/h-pilotfish-doctor-escaped").exists()
    assert (machine.root / "tmp/h-pilotfish-doctor-escaped").read_text() == "x"


@pytest.mark.parametrize(
    "text",
    [
        f'[files]\n"/proc/meminfo" = "MemTotal: {"9" * 5000} kB"',
        f'[files]\n"/sys/class/thermal/thermal_zone0/temp" = "{"9" * 400}"',
        f'[files]\n"/etc/nv_tegra_release" = "# R{"9" * 5000} (release), REVISION: 1.2, x"',
        f'[commands]\n"systemctl --version" = "systemd {"9" * 5000}"',
        f'[commands]\n"nvidia-smi" = "Driver Version: 1 CUDA Version: {"9" * 5000}\\nGPU 0: X"',
        '[commands]\n"timedatectl" = "Universal time: Thu 0000-00-00 99:99:99"',
        '[commands]\n"timedatectl" = "Local time: Thu 2026-13-45 99:99:99 UTC"',
    ],
)
def test_absurd_numbers_are_unknown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "absurd.toml"
    path.write_text(text)
    examination = examined(recorded_machine(path))
    assert msgspec.json.encode(examination)
    assert examination.machine.memory_bytes is None
    assert examination.machine.time is None
    assert "9" * 40 not in str(examination)


def test_a_recording_cannot_move_the_terminals_cursor(tmp_path: Path) -> None:
    path = tmp_path / "escapes.toml"
    escape = r"\u001b[2J\u001b]0;title\u0007"
    path.write_text(
        f'[files]\n"/proc/device-tree/model" = "Jetson {escape} Orin\\r\\nNano"\n'
        f'[commands]\n"nvidia-smi" = "{escape} NVIDIA-SMI has failed because of \\u009b2J"\n'
    )
    page = StringIO()
    show(examine(recorded_machine(path), Subject()), Console(file=page))
    text = page.getvalue()
    assert "has failed because" in text
    assert [letter for letter in text if not letter.isprintable() and letter != "\n"] == []
