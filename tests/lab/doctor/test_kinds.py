"""Kinds of machines, made of the files and outputs that such a machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish.lab.doctor.commands import Output
from pilotfish.lab.doctor.machine import PROBE, UNITS
from pilotfish.lab.doctor.outlook import Subject
from tests.conftest import Pair
from tests.support.machines import ORIN_NANO, examined, machine_of, mends, subjects
from tests.support.tiny import tiny_artifact


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


def test_a_library_that_crashes_or_hangs_while_it_is_imported(tmp_path: Path) -> None:
    """What hangs is unknown, since the machine may only be slow."""
    begun = '{"packages": {"onnxruntime": "1.21.0"}}\n{"doing": "onnxruntime"}\n'
    examination = examined(machine_of(tmp_path, {}, {PROBE: Output(begun, -4)}))
    assert "crashed" in str(examination.machine.onnxruntime_problem)
    assert "ONNX Runtime" in subjects(examination, "fault")
    examination = examined(machine_of(tmp_path, {}, {PROBE: Output(begun, None)}))
    assert subjects(examination) == {"command"}
    assert examination.machine.unfinished == (f"{PROBE} (onnxruntime)",)


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


def test_a_model_larger_than_the_board_is_a_fault(tmp_path: Path, pair: Pair) -> None:
    files = ORIN_NANO | {"proc/meminfo": "MemTotal: 400 kB\n"}
    subject = Subject(model=pair.draft, source="device.toml")
    examination = examined(machine_of(tmp_path, files), subject)
    assert "model" in subjects(examination, "fault")
