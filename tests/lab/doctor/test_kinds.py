"""Kinds of machines, made of the files and outputs that such a machine has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pilotfish.engines.artifact import Artifact
from pilotfish.lab.doctor.commands import Output
from pilotfish.lab.doctor.machine import PROBE, UNITS, Machine
from pilotfish.lab.doctor.outlook import Subject
from tests.conftest import Pair
from tests.support.machines import ORIN_NANO, examined, machine_of, mends, plant, subjects
from tests.support.tiny import tiny_artifact

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


def test_a_board_without_faults_has_no_findings_but_notes(tmp_path: Path) -> None:
    examination = examined(machine_of(tmp_path, ORIN_NANO))
    assert examination.machine.board_name == "orin-nano"
    assert examination.machine.jetpack == "6.2"
    assert examination.machine.power_mode == "MAXN_SUPER"
    assert subjects(examination) <= {"ONNX Runtime"}


@pytest.mark.parametrize("mode", ["0", "1"])
def test_a_slower_power_mode_is_mended_by_its_number(tmp_path: Path, mode: str) -> None:
    files = ORIN_NANO | {"var/lib/nvpmodel/status": f"pmode:000{mode}"}
    assert mends(examined(machine_of(tmp_path, files)), "power mode") == ["sudo nvpmodel -m 2"]


def test_a_nano_that_was_flashed_without_super_is_told_so(tmp_path: Path) -> None:
    files = ORIN_NANO | {
        "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=7W >\n",
        "var/lib/nvpmodel/status": "pmode:0000",
    }
    examination = examined(machine_of(tmp_path, files))
    assert "power mode" in subjects(examination, "note")
    assert mends(examination, "power mode") == [None]


@pytest.mark.parametrize(
    ("model", "compatible", "name"),
    [
        ("Seeed reComputer J4012", "seeed,j401\0nvidia,p3768-0000+p3767-0000\0nvidia,p3767-0000\0"
         "nvidia,tegra234\0", "orin-nx"),
        ("CTI Rogue AGX-Orin", "nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,tegra234\0",
         "agx-orin"),
        ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit",
         "nvidia,p3768-0000+p3767-0001\0nvidia,p3767-0001\0nvidia,tegra234\0", "orin-nx-8gb"),
    ],
)  # fmt: skip
def test_a_carrier_of_another_maker_is_known_by_its_module(
    tmp_path: Path, model: str, compatible: str, name: str
) -> None:
    files = ORIN_NANO | {
        "proc/device-tree/model": f"{model}\0",
        "proc/device-tree/compatible": compatible,
    }
    facts = examined(machine_of(tmp_path, files)).machine
    assert (facts.board, facts.board_name) == (model, name)


def test_jetpack_4_is_a_fault_and_a_container_on_it_is_a_warning(tmp_path: Path) -> None:
    tree = {
        "proc/device-tree/model": "NVIDIA Jetson TX2 Developer Kit\0",
        "proc/device-tree/compatible": "nvidia,quill\0nvidia,tegra186\0",
        "etc/nv_tegra_release": "# R32 (release), REVISION: 7.1, GCID: 29818004, BOARD: t186ref\n",
    }
    examination = examined(machine_of(tmp_path / "a", tree, kernel="4.9.253-tegra"))
    assert examination.machine.jetpack == "4.6.1"
    assert "board" in subjects(examination, "fault")
    xavier = {"proc/device-tree/compatible": "nvidia,e3900\0", ".dockerenv": ""}
    examination = examined(machine_of(tmp_path / "b", xavier, kernel="5.10.104-tegra"))
    assert examination.machine.jetpack == "5.x"
    assert subjects(examination, "warning") >= {"container", "JetPack"}


def test_a_container_without_l4t_is_told_of_the_runtime(tmp_path: Path) -> None:
    files = {name: text for name, text in ORIN_NANO.items() if name.startswith("proc/device")}
    examination = examined(machine_of(tmp_path, files | {".dockerenv": ""}))
    assert mends(examination, "container") == ["docker run --runtime nvidia …"]


def test_l4t_without_jetpacks_libraries_is_mended_by_apt(tmp_path: Path) -> None:
    outputs = {
        "dpkg-query -W nvidia-jetpack nvidia-l4t-core": Output(
            "dpkg-query: no packages found matching nvidia-jetpack\n"
            "nvidia-l4t-core\t36.4.3-20250107174145\n",
            1,
        )
    }
    examination = examined(machine_of(tmp_path, ORIN_NANO, outputs))
    assert examination.machine.jetpack_package == ""
    assert "sudo apt update && sudo apt install nvidia-jetpack" in mends(examination, "JetPack")


def test_tensorrt_of_another_python_is_told(tmp_path: Path) -> None:
    outputs = {
        "dpkg-query -W": "python3-libnvinfer\t10.3.0.30-1+cuda12.5\ncuda-cudart-12-6\t12.6.68-1\n",
        "/usr/bin/python3 --version": "Python 3.10.12\n",
        PROBE: '{"packages": {"onnxruntime": "1.23.2"}}\n{"onnxruntime": {"version": "1.23.2", '
        '"providers": ["CPUExecutionProvider"]}}\n'
        '{"absent": {"cpu": "", "tensorrt": "TensorRT cannot be imported"}}\n',
    }
    examination = examined(machine_of(tmp_path, ORIN_NANO, outputs, python="3.12.1"))
    assert "TensorRT" in subjects(examination, "warning")
    assert mends(examination, "TensorRT") == [
        "/usr/bin/python3 -m venv --system-site-packages pilotfish-venv"
    ]


def test_no_swap_and_zram_alone(tmp_path: Path) -> None:
    meminfo = "MemTotal: 7802216 kB\nMemAvailable: 6000000 kB\nSwapTotal: {} kB\n"
    none = examined(machine_of(tmp_path / "a", ORIN_NANO | {"proc/meminfo": meminfo.format(0)}))
    assert "swap" in subjects(none, "warning")
    zram = ORIN_NANO | {
        "proc/meminfo": meminfo.format(3900000),
        "proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 3900000 0 5\n",
    }
    assert "swap" in subjects(examined(machine_of(tmp_path / "b", zram)), "note")


def test_heat_throttling_and_a_weak_supply(tmp_path: Path) -> None:
    zone, device = "sys/class/thermal/thermal_zone1", "sys/class/thermal/cooling_device3"
    files = ORIN_NANO | {
        f"{zone}/type": "cpu-thermal",
        f"{zone}/temp": "97500\n",
        f"{zone}/trip_point_0_type": "active",
        f"{zone}/trip_point_0_temp": "51000",
        f"{zone}/trip_point_1_type": "passive",
        f"{zone}/trip_point_1_temp": "99000",
        f"{device}/type": "cpu-throttle-alert\n",
        f"{device}/cur_state": "1\n",
        "sys/class/hwmon/hwmon2/oc3_event_cnt": "7\n",
    }
    examination = examined(machine_of(tmp_path, files))
    assert subjects(examination) >= {"temperature", "throttling", "power supply"}
    assert examination.machine.throttles_at == {"cpu-thermal": 99.0}


def test_a_cool_fan_is_no_throttling(tmp_path: Path) -> None:
    device = "sys/class/thermal/cooling_device0"
    files = ORIN_NANO | {f"{device}/type": "pwm-fan\n", f"{device}/cur_state": "2\n"}
    assert not subjects(examined(machine_of(tmp_path, files))) & {"throttling", "temperature"}


def test_clocks_that_follow_the_load_are_a_note(tmp_path: Path) -> None:
    core, gpu = "sys/devices/system/cpu/cpu0/cpufreq", "sys/class/devfreq/17000000.gpu"
    files = ORIN_NANO | {
        f"{core}/scaling_min_freq": "729600",
        f"{core}/scaling_max_freq": "1728000",
        f"{core}/cpuinfo_max_freq": "1728000",
        f"{gpu}/min_freq": "306000000",
        f"{gpu}/max_freq": "624750000",
        f"{gpu}/available_frequencies": "306000000 624750000 1020000000",
    }
    assert mends(examined(machine_of(tmp_path, files)), "clocks") == ["sudo jetson_clocks", None]


def test_a_clock_of_1970_is_a_fault(tmp_path: Path) -> None:
    examination = examined(machine_of(tmp_path, {}, time="1970-01-01T00:03:00+00:00"))
    assert mends(examination, "clock") == ["sudo timedatectl set-ntp true"]
    examination = examined(machine_of(tmp_path, {}, clock_behind=True))
    assert "clock" in subjects(examination, "fault")


def test_units_that_fail_are_faults_with_their_exit_code(tmp_path: Path) -> None:
    text = "\n\n".join(
        f"Id={name}\nLoadState=loaded\nActiveState={state}\nResult={result}\nExecMainStatus={code}"
        f"\nNRestarts={restarts}"
        for name, state, result, code, restarts in (
            (UNITS[2], "failed", "exit-code", 65, 0),
            (UNITS[0], "activating", "exit-code", 78, 9),
            (UNITS[1], "active", "success", 0, 0),
        )
    )
    examination = examined(machine_of(tmp_path, {}, {"systemctl show pilotfish-x": text}))
    messages = [each.message for each in examination.findings if each.subject == "service"]
    assert len(messages) == 2
    assert "pilotfish-engine-build.service failed with exit code 65" in messages[0]
    assert "restarts again and again with exit code 78 (the configuration is broken)" in messages[1]


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


def test_a_library_that_crashes_or_hangs_while_it_is_imported(tmp_path: Path) -> None:
    """What hangs is unknown, since the machine may only be slow."""
    begun = '{"packages": {"onnxruntime": "1.21.0"}}\n{"doing": "onnxruntime"}\n'
    examination = examined(machine_of(tmp_path, {}, {PROBE: Output(begun, -4)}))
    assert "crashed" in str(examination.machine.onnxruntime_problem)
    assert "ONNX Runtime" in subjects(examination, "fault")
    examination = examined(machine_of(tmp_path, {}, {PROBE: Output(begun, None)}))
    assert subjects(examination) == {"command"}
    assert examination.machine.unfinished == (f"{PROBE} (onnxruntime)",)


def test_a_tool_that_fails_shows_that_there_is_a_gpu(tmp_path: Path) -> None:
    text = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    machine = Machine(tmp_path, {"nvidia-smi": Output(text, 9)})
    assert subjects(examined(machine), "fault") == {"GPU"}
    assert not examined(Machine(tmp_path, {"pip list": Output("torch 2.4.0\n")})).findings


def test_a_quota_below_one_cpu_is_a_warning_and_above_a_note(tmp_path: Path) -> None:
    tree = {
        "proc/self/cgroup": "0::/box\n",
        "proc/self/mountinfo": "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    }
    for quota, severity in (("50000", "warning"), ("150000", "note")):
        files = tree | {"sys/fs/cgroup/box/cpu.max": f"{quota} 100000\n"}
        examination = examined(machine_of(tmp_path / quota, files, cpus=4))
        assert "CPU quota" in subjects(examination, severity)


def test_few_files_no_huge_pages_and_another_locale(tmp_path: Path) -> None:
    files = {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"}
    machine = machine_of(tmp_path, files, open_files=(64, 64), encoding="ISO-8859-1")
    examination = examined(machine)
    assert "open files" in subjects(examination, "warning")
    assert {"huge pages", "locale"} <= subjects(examination, "note")
    assert not subjects(examined(machine_of(tmp_path / "b", {}, encoding="ANSI_X3.4-1968")), "note")


def test_a_gpu_that_this_user_may_not_use(tmp_path: Path) -> None:
    machine = machine_of(tmp_path, ORIN_NANO, unread=("/dev/nvhost-gpu (the GPU)",))
    assert mends(examined(machine), "GPU") == ["sudo usermod -aG video,render $USER"]


def test_an_artifact_that_leaves_the_gpu_idle_is_told_with_the_export(tmp_path: Path) -> None:
    """TensorRT 10.3 of JetPack 6.2 does not read opset 24."""
    tiny_artifact(tmp_path / "drafter", dialect="opset24")
    subject = Subject(model=tmp_path / "drafter", source="device.toml")
    machine = machine_of(tmp_path, ORIN_NANO, {"dpkg-query -W": "libnvinfer10\t10.3.0.30-1\n"})
    examination = examined(machine, subject)
    (mend,) = mends(examination, "model")
    assert mend == "pilotfish export model MODEL --board orin-nano --jetpack 6.2 --out FOLDER"
    assert examination.expects.provider != "tensorrt"


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


def test_a_model_larger_than_the_board_is_a_fault(tmp_path: Path, pair: Pair) -> None:
    files = ORIN_NANO | {"proc/meminfo": "MemTotal: 400 kB\n"}
    subject = Subject(model=pair.draft, source="device.toml")
    examination = examined(machine_of(tmp_path, files), subject)
    assert "model" in subjects(examination, "fault")


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


def _as_outputs(outputs: dict[str, Any]) -> dict[str, Output]:
    return {line: Output(each) if isinstance(each, str) else each for line, each in outputs.items()}


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
