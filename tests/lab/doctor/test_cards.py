"""Machines with a card of NVIDIA: its driver, its libraries, and what to expect of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pilotfish.engines.artifact import Artifact
from pilotfish.lab.doctor.commands import Output
from pilotfish.lab.doctor.machine import PROBE, Machine
from pilotfish.lab.doctor.outlook import Subject
from tests.conftest import Pair
from tests.support.machines import ORIN_NANO, examined, machine_of, mends, plant, subjects

RTX = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14\n",
    "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA GeForce RTX 4090\n",
    "proc/meminfo": "MemTotal: 64000000 kB\n",
}
ABLE = (
    '{"packages": {"onnxruntime-gpu": "1.31.1"}, "tensorrt": "10.16.2", "absent": '
    '{"tensorrt": "", "tensorrt-rtx": "none", "tensorrt-ep": "", "cuda": "", "cpu": ""}}'
)
SMI = """\
| NVIDIA-SMI 550.54.14      Driver Version: 550.54.14      CUDA Version: 12.4     |
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:1B:00.0 Off |                    0 |
| N/A   31C    P0             70W /  700W |       0MiB /  81559MiB |      0%      Default |
"""


def test_a_data_centre_gpu_is_no_target_of_tensorrt_for_rtx(tmp_path: Path) -> None:
    wheels = '{"packages": {"onnxruntime": "1.31.1"}, "onnxruntime": {"version": "1.31.1"}}'
    examination = examined(machine_of(tmp_path, RTX, {"nvidia-smi": SMI, PROBE: wheels}))
    facts = examination.machine
    assert facts.gpus == ("NVIDIA H100 80GB HBM3",)
    assert (facts.compute, facts.gpu_memory_bytes) == ("9.0", 81559 << 20)
    assert "ONNX Runtime" in subjects(examination, "warning")  # the wheel for CPUs
    (outlook,) = (each for each in examination.expects.providers if each.name == "tensorrt-rtx")
    assert outlook.works is False
    assert outlook.reason == "TensorRT for RTX does not support compute capability 9.0"


@pytest.mark.parametrize(
    ("card", "works"),
    [("GeForce RTX 5090", True), ("GeForce RTX 2080 Ti", True), ("GeForce GTX 1080", False)],
)
def test_tensorrt_for_rtx_runs_on_the_cards_that_engines_can_be_built_for(
    tmp_path: Path, card: str, works: bool
) -> None:
    wheels = '{"packages": {"onnxruntime": "1.31.1", "tensorrt-rtx-cu12-bindings": "1.5"}}'
    outputs = {"nvidia-smi": SMI.replace("H100 80GB HBM3", card), PROBE: wheels}
    examination = examined(machine_of(tmp_path, RTX, outputs))
    (outlook,) = (each for each in examination.expects.providers if each.name == "tensorrt-rtx")
    assert outlook.works is works, examination.machine.compute


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch", "sudo reboot"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure",
         "sudo ubuntu-drivers install && sudo reboot"),
        ("No devices were found", "sudo ubuntu-drivers install && sudo reboot"),
        ("Failed to initialize NVML: GPU access blocked by the operating system",
         "wsl.exe --update"),
    ],
)  # fmt: skip
def test_what_nvidia_smi_says_is_mended(tmp_path: Path, text: str, mend: str) -> None:
    examination = examined(machine_of(tmp_path, RTX, {"nvidia-smi": Output(text, 9)}))
    assert mends(examination, "GPU") == [mend]
    assert examination.exit_code == 3


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("Debian GNU/Linux 12 (bookworm)", "sudo apt install nvidia-driver && sudo reboot"),
        ("Ubuntu 24.04.3 LTS", "sudo ubuntu-drivers install && sudo reboot"),
        ("Fedora Linux 43 (Workstation Edition)", None),
    ],
)
def test_the_driver_is_installed_by_the_systems_own_command(
    tmp_path: Path, name: str, mend: str | None
) -> None:
    outputs = {
        "nvidia-smi": Output("NVIDIA-SMI has failed because it couldn't communicate with", 9),
        "hostnamectl": f"Operating System: {name}\n",
    }
    assert mends(examined(machine_of(tmp_path, RTX, outputs)), "GPU") == [mend]


def test_a_broken_driver_is_a_fault_where_no_gpu_is_shown(tmp_path: Path) -> None:
    version = {"proc/driver/nvidia/version": RTX["proc/driver/nvidia/version"]}
    text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580"
    examination = examined(machine_of(tmp_path, version, {"nvidia-smi": Output(text, 18)}))
    assert mends(examination, "GPU") == ["sudo reboot"]
    assert subjects(examination, "fault") == {"GPU"}
    missing = {"nvidia-smi": Output("bash: nvidia-smi: command not found", 127)}
    assert not examined(machine_of(tmp_path / "b", {}, missing)).machine.has_gpu


def test_a_driver_without_cuda_is_a_fault_and_wsl_has_windows_driver(tmp_path: Path) -> None:
    table = SMI.replace("CUDA Version: 12.4", "CUDA Version: ERR!")
    (mend,) = mends(examined(machine_of(tmp_path, RTX, {"nvidia-smi": table})), "GPU")
    assert mend == "sudo ubuntu-drivers install && sudo reboot"
    wsl = {"proc/version": "Linux version 5.15.167.4-microsoft-standard-WSL2"}
    kernel = "5.15.167.4-microsoft-standard-WSL2"
    machine = machine_of(tmp_path / "wsl", RTX | wsl, {"nvidia-smi": table}, kernel=kernel)
    assert "wsl.exe --update" in mends(examined(machine), "GPU")


def test_a_divided_gpu_is_a_warning(tmp_path: Path) -> None:
    table = SMI + "|       |      |              Enabled |\n"
    examination = examined(machine_of(tmp_path, RTX, {"nvidia-smi": table}))
    assert mends(examination, "GPU") == ["sudo nvidia-smi -i 0 -mig 0"]
    assert "GPU" in subjects(examination, "warning")


def test_a_card_without_a_driver(tmp_path: Path) -> None:
    card = "sys/bus/pci/devices/0000:01:00.0"
    files = {f"{card}/vendor": "0x10de\n", f"{card}/class": "0x030000\n"}
    examination = examined(machine_of(tmp_path, files))
    assert "GPU" in subjects(examination, "fault")
    sound = {f"{card}/vendor": "0x10de\n", f"{card}/class": "0x040300\n"}
    assert not examined(machine_of(tmp_path / "b", sound)).machine.has_gpu


def test_a_driver_older_than_cuda(tmp_path: Path) -> None:
    probe = (
        '{"cuda_problem": "cudaGetDeviceCount: CUDA driver version is insufficient for CUDA '
        'runtime version (CUDA error 35)"}'
    )
    smi = SMI.replace("12.4", "11.4")
    examination = examined(machine_of(tmp_path, RTX, {"nvidia-smi": smi, PROBE: probe}))
    assert "driver" in subjects(examination, "fault")


def test_a_driver_without_cudas_libraries(tmp_path: Path) -> None:
    probe = '{"cuda_problem": "the CUDA runtime (libcudart) is not installed"}'
    examination = examined(machine_of(tmp_path, RTX, {"nvidia-smi": SMI, PROBE: probe}))
    assert "CUDA" in subjects(examination, "warning")


def test_wsl_is_told_and_asks_for_no_driver(tmp_path: Path) -> None:
    files = {"proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2\n"}
    machine = machine_of(tmp_path, files, {"nvidia-smi": SMI}, kernel="5.15.167.4-microsoft")
    examination = examined(machine)
    assert examination.machine.container == "wsl"
    assert "GPU" in subjects(examination, "note")
    assert "GPU" not in subjects(examination, "fault")


def test_a_tool_that_fails_shows_that_there_is_a_gpu(tmp_path: Path) -> None:
    text = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    machine = Machine(tmp_path, {"nvidia-smi": Output(text, 9)})
    assert subjects(examined(machine), "fault") == {"GPU"}
    assert not examined(Machine(tmp_path, {"pip list": Output("torch 2.4.0\n")})).findings


def test_tensorrt_without_an_engine_is_told(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    outputs = {"nvidia-smi": SMI.replace("H100 80GB HBM3", "L40"), PROBE: ABLE}
    subject = Subject(model=pair.draft, source="device.toml")
    examination = examined(machine_of(tmp_path, RTX, outputs), subject)
    assert examination.expects.provider == "tensorrt"
    mend = f"pilotfish export engine {pair.draft}"
    assert mends(examination, "engine") == [mend]
    name = f"tensorrt-{'0' * 32}.engine"
    digest = Artifact.open(pair.draft).manifest.digest
    plant(tmp_path, {f"cache/engines/of-another-model/{name}": ""})
    assert mends(examined(machine_of(tmp_path, RTX, outputs), subject), "engine") == [mend]
    plant(tmp_path, {f"cache/engines/{digest}/{name}": ""})
    assert not mends(examined(machine_of(tmp_path, RTX, outputs), subject), "engine")


def test_a_library_that_a_program_misses(tmp_path: Path) -> None:
    """Whatever program says so: ONNX Runtime loads its provider only in a session."""
    line = "Failed to load library libonnxruntime_providers_cuda.so with error: "
    text = f"{line}libcudnn.so.9: cannot open shared object file: No such file or directory"
    outputs = {"nvidia-smi": SMI, "./run.sh": Output(text, 1)}
    examination = examined(Machine(plant(tmp_path / "a", RTX), _as_outputs(outputs)))
    assert mends(examination, "CUDA") == ["pip install 'pilotfish[gpu]'"]
    outputs = {"nvcc -V": "Cuda compilation tools, release 12.6, V12.6.68\n", "./x": text}
    examination = examined(Machine(plant(tmp_path / "b", ORIN_NANO), _as_outputs(outputs)))
    assert mends(examination, "CUDA") == ["sudo apt update && sudo apt install nvidia-jetpack"]
    assert "JetPack" not in subjects(examination)  # nothing is known of TensorRT


def test_docker_without_nvidias_runtime(tmp_path: Path) -> None:
    text = 'docker: Error response from daemon: could not select device driver "" with'
    outputs = {"docker run --gpus all x": Output(text, 125)}
    examination = examined(Machine(plant(tmp_path, RTX), _as_outputs(outputs)))
    (mend,) = mends(examination, "GPU")
    assert mend is not None
    assert "nvidia-container-toolkit" in mend


def test_nobody_needs_a_gpus_libraries_without_a_gpu(tmp_path: Path) -> None:
    files = {"sys/bus/pci/devices/0/vendor": "0x1af4", "sys/bus/pci/devices/0/class": "0x030000"}
    absent = {"cpu": "", "cuda": "install onnxruntime-gpu", "tensorrt": "install tensorrt"}
    probe = {PROBE: Output(json.dumps({"absent": absent}))}
    reasons = {
        each.name: each.reason
        for each in examined(machine_of(tmp_path, files, probe)).expects.providers
    }
    assert reasons["cuda"] == reasons["tensorrt"] == "this machine has no NVIDIA GPU"
    assert reasons["cpu"] == ""
    files["sys/bus/pci/devices/0/vendor"] = "0x10de"
    examination = examined(machine_of(tmp_path, files, probe))
    assert "install onnxruntime-gpu" in {each.reason for each in examination.expects.providers}


def test_a_tool_that_crashes_is_a_fault_where_a_gpu_is(tmp_path: Path) -> None:
    outputs = {"nvidia-smi": Output("", -11)}
    examination = examined(machine_of(tmp_path / "rtx", RTX, outputs))
    (finding,) = [each for each in examination.findings if each.subject == "GPU"]
    assert "signal 11" in finding.message
    none = {"sys/bus/pci/devices/0/vendor": "0x1af4"}
    assert "GPU" not in subjects(examined(machine_of(tmp_path / "none", none, outputs)))


def _as_outputs(outputs: dict[str, Any]) -> dict[str, Output]:
    return {line: Output(each) if isinstance(each, str) else each for line, each in outputs.items()}
