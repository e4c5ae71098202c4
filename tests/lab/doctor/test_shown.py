"""The forms in which people show facts, each as a command line and its output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pilotfish.boards.board import JETPACKS, JetPack
from pilotfish.lab.doctor.commands import Output
from pilotfish.lab.doctor.examination import read_facts
from pilotfish.lab.doctor.facts import MachineFacts
from pilotfish.lab.doctor.machine import Machine
from tests.support.machines import plant

SMI = """\
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 470.82.01    Driver Version: 470.82.01    CUDA Version: 11.4     |
|-------------------------------+----------------------+----------------------+
|   0  Tesla T4            Off  | 00000000:00:1E.0 Off |                    0 |
| N/A   34C    P8     9W /  70W |      0MiB / 15109MiB |      0%      Default |
"""
ORIN_SMI = """\
| NVIDIA-SMI 540.4.0                Driver Version: 540.4.0      CUDA Version: 12.6     |
|   0  Orin (nvgpu)                  N/A  | N/A              N/A |                  N/A |
| N/A   N/A  N/A               N/A /  N/A | Not Supported        |     N/A          N/A |
"""
MIG = """\
|   0  NVIDIA A100-SXM4-80GB           Off| 00000000:40:00.0 Off |                   On |
|                                         |                      |              Enabled |
|   1  NVIDIA A100-SXM4-80GB           Off| 00000000:B1:00.0 Off |                   On |
|                                         |                      |              Enabled |
"""
FORMER_STATS = """\
 - NVIDIA Jetson Nano (Developer Kit Version)
   * Jetpack 4.6 [L4T 32.6.1]
   * NV Power Mode: MAXN - Type: 0
   * jetson_stats.service: active
 - Libraries:
   * CUDA: 10.2.300
   * TensorRT: 8.0.1.6
"""
CLOCKS = """\
SOC family:tegra234  Machine:NVIDIA Jetson Orin Nano Developer Kit
cpu0: Online=1 Governor=schedutil MinFreq=729600 MaxFreq=1510400 CurrentFreq=1510400 IdleStates: 1
GPU MinFreq=306000000 MaxFreq=624750000 CurrentFreq=306000000
EMC MinFreq=204000000 MaxFreq=2133000000 CurrentFreq=2133000000 FreqOverride=0
NV Power Mode: 15W
"""
PERFORMANCE = """\
    Clocks Throttle Reasons
        Idle                              : Not Active
        SW Power Cap                      : Active
        HW Slowdown                       : Not Active
        SW Thermal Slowdown               : Active
"""
SHOWN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "the table of a server": (
        "nvidia-smi",
        SMI,
        {"gpus": ("Tesla T4",), "driver": "470.82.01", "driver_cuda": "11.4", "compute": "7.5",
         "gpu_memory_bytes": 15109 << 20, "board_name": "rtx"},
    ),
    "the table of an Orin": (
        "$ nvidia-smi",
        ORIN_SMI,
        {"gpus": ("Orin (nvgpu)",), "driver": "540.4.0", "compute": "8.7"},
    ),
    "the table of a divided GPU, without spaces": (
        "nvidia-smi",
        MIG,
        {"gpus": ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"), "mig": True,
         "compute": "8.0"},
    ),
    "a list": (
        "nvidia-smi -L",
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)\nGPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2)\n",
        {"gpus": ("NVIDIA A100-SXM4-40GB",) * 2},
    ),
    "a query with a head": (
        "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv",
        "name, driver_version, memory.total [MiB]\nNVIDIA GeForce RTX 3060, 535.54.03, 12288 MiB\n",
        {"gpus": ("NVIDIA GeForce RTX 3060",), "driver": "535.54.03", "compute": "8.6",
         "gpu_memory_bytes": 12288 << 20},
    ),
    "performance": ("nvidia-smi -q -d PERFORMANCE", PERFORMANCE,
                    {"throttled": ("GPU: SW Thermal slowdown",)}),
    "a former jetson_release": (
        "sudo jetson_release",
        FORMER_STATS,
        {"jetpack": "4.6", "l4t": "32.6.1", "soc": "tegra210", "power_mode": "MAXN",
         "cuda": "10.2.300", "tensorrt_libraries": "8.0.1.6"},
    ),
    "the power mode": ("sudo nvpmodel -q", "NV Fan Mode:quiet\nNV Power Mode: MODE_30W\n2\n",
                       {"power_mode": "MODE_30W", "tegra": True}),
    "the power modes": (
        "nvpmodel -p --verbose",
        "NVPM VERB: POWER_MODEL: ID=0 NAME=MAXN\nNVPM VERB: POWER_MODEL: ID=1 NAME=MODE_15W\n",
        {"power_modes": {"MAXN": 0, "MODE_15W": 1}},
    ),
    "the clocks": (
        "sudo jetson_clocks --show",
        CLOCKS,
        {"soc": "tegra234", "governor": "schedutil", "power_mode": "15W",
         "cpu_khz": (729600, 1510400, 1510400), "gpu_hz": (306000000, 624750000, 624750000)},
    ),
    "the clocks of an Orin NX": (
        "jetson_clocks --show",
        CLOCKS.replace("Nano Developer Kit", "NX Kit").replace("cpu0: ", "cpu0:  "),
        {"board": "NVIDIA Jetson Orin NX Kit", "board_name": "orin-nx",
         "cpu_khz": (729600, 1510400, 1510400)},
    ),
    "dpkg -l": (
        "dpkg -l | grep nvidia",
        "ii  nvidia-jetpack   6.1+b123   arm64   NVIDIA Jetpack Meta Package\n"
        "ii  nvidia-l4t-core  36.4.0-20240912212859  arm64  NVIDIA Core Package\n",
        {"jetpack": "6.1", "l4t": "36.4.0", "jetpack_package": "6.1+b123"},
    ),
    "apt show": (
        "apt show nvidia-jetpack -a",
        "Package: nvidia-jetpack\nVersion: 5.1.1-b56\nPriority: standard\n",
        {"jetpack": "5.1.1", "jetpack_package": "5.1.1-b56"},
    ),
    "apt list": (
        "apt list --installed",
        "Listing...\nlibnvinfer8/stable,now 8.5.2-1+cuda11.4 arm64 [installed,automatic]\n",
        {"tensorrt_libraries": "8.5.2"},
    ),
    "no package": ("dpkg -l nvidia-jetpack", "dpkg-query: no packages found matching\n",
                   {"jetpack_package": ""}),
    "a later L4T": ("head -n 1 /etc/nv_tegra_release", "# R36 (release), REVISION: 4.7, GCID: 1\n",
                    {"l4t": "36.4.7", "jetpack": "6.2", "release_file": True}),
    "the model without a NUL": ("cat /sys/firmware/devicetree/base/model",
                                "NVIDIA Jetson AGX Thor Developer Kit", {"board_name": "thor"}),
    "compatible without NULs": (
        "cat /proc/device-tree/compatible",
        "nvidia,p3768-0000+p3767-0004nvidia,p3767-0004nvidia,tegra234",
        {"board_name": "orin-nano-4gb", "soc": "tegra234", "module": "p3767-0004"},
    ),
    "Windows' Linux": ("uname -a", "Linux host 5.15.167.4-microsoft-standard-WSL2 #1 SMP x86_64\n",
                       {"container": "wsl", "machine": "x86_64",
                        "kernel": "5.15.167.4-microsoft-standard-WSL2"}),
    "free -h": ("free -h", "      total  used\nMem:   7.4Gi  1.2Gi\nSwap:   0B  0B\n",
                {"memory_bytes": round(7.4 * 2**30), "swap_bytes": 0}),
    "free -m": ("free -m", "      total used\nMem:    7619   900\nSwap:   3809     0\n",
                {"memory_bytes": 7619 << 20, "swap_bytes": 3809 << 20}),
    "swapon": ("swapon --show", "NAME       TYPE      SIZE USED PRIO\n"
               "/dev/zram0 partition 635M   0B    5\n/dev/zram1 partition 635M   0B    5\n",
               {"swap_bytes": 1270 << 20, "zram_bytes": 1270 << 20}),
    "tegrastats": ("tegrastats", "RAM 3000/7620MB (lfb 1x4MB) SWAP 10/3810MB (cached 0MB) "
                   "cpu@98.2C soc2@-256C gpu@97C\n",
                   {"memory_bytes": 7620 << 20, "swap_bytes": 3810 << 20,
                    "temperatures": {"cpu": 98.2, "gpu": 97.0}}),
    "a clock of 1970": ("date", "Thu Jan  1 08:03:14 CST 1970\n",
                        {"time": "1970-01-01T08:03:14+00:00"}),
    "ONNX Runtime": (
        "python3 -c 'import onnxruntime as ort; print(ort.get_available_providers())'",
        "['TensorrtExecutionProvider', 'CUDAExecutionProvider', 'CPUExecutionProvider']\n",
        {"onnxruntime_providers": ("TensorrtExecutionProvider", "CUDAExecutionProvider",
                                   "CPUExecutionProvider")},
    ),
    "pip freeze": ("pip3 freeze", "onnxruntime_gpu==1.18.0\nnumpy==1.26.4\n",
                   {"packages": {"onnxruntime-gpu": "1.18.0", "numpy": "1.26.4"},
                    "onnxruntime": "1.18.0"}),
    "pip show": ("pip show onnxruntime", "Name: onnxruntime\nVersion: 1.22.0\nSummary: x\n",
                 {"onnxruntime": "1.22.0"}),
    "nvcc": ("nvcc -V", "Cuda compilation tools, release 12.2, V12.2.140\n", {"cuda": "12.2"}),
    "TensorRT": ('python3 -c "import tensorrt; print(tensorrt.__version__)"', "10.3.0\n",
                 {"tensorrt": "10.3.0"}),
    "systemctl": ("systemctl --version", "systemd 245 (245.4-4ubuntu3.24)\n", {"systemd": "245"}),
    "a card without a driver": (
        "lspci -nn | grep -i nvidia",
        "01:00.0 VGA compatible controller [0300]: NVIDIA Corporation GA104 [10de:2484] (rev a1)\n",
        {"gpus": ("NVIDIA Corporation GA104 [10de:2484]",)},
    ),
    "hostnamectl": ("hostnamectl", "  Operating System: Ubuntu 22.04.5 LTS\n"
                    "            Kernel: Linux 5.15.148-tegra\n",
                    {"kernel": "5.15.148-tegra", "jetpack": "6.x", "tegra": True}),
    "df": ("df -h", "Filesystem      Size  Used Avail Use% Mounted on\n"
           "/dev/nvme0n1p1   57G   55G  150M 100% /\n", {}),
}  # fmt: skip


def facts_of(root: Path, line: str, text: str, status: int | None = 0) -> MachineFacts:
    path = line.removeprefix("cat /sys/firmware/devicetree/base/")
    if path != line:  # as `recorded_machine` does
        (root / "proc/device-tree").mkdir(parents=True)
        (root / "proc/device-tree" / path).write_text(text)
    return read_facts(Machine(root, {line: Output(text, status)}))


@pytest.mark.parametrize("form", SHOWN)
def test_a_form_is_understood(tmp_path: Path, form: str) -> None:
    line, text, expected = SHOWN[form]
    if line == "cat /proc/device-tree/compatible":
        line = "cat /sys/firmware/devicetree/base/compatible"
    facts = facts_of(tmp_path, line, text)
    assert {name: getattr(facts, name) for name in expected} == expected


def test_a_full_disk_is_shown(tmp_path: Path) -> None:
    line, text, _ = SHOWN["df"]
    (disk,) = facts_of(tmp_path, line, text).disks
    assert (disk.path, disk.free_bytes, disk.total_bytes) == ("/", 150 << 20, 57 << 30)


def test_a_missing_tool_is_a_missing_driver_but_not_on_an_old_jetson(tmp_path: Path) -> None:
    text = "bash: nvidia-smi: command not found"
    assert facts_of(tmp_path, "nvidia-smi", text, 127).gpu_problem == text
    outputs = {"nvidia-smi": Output(text, 127), "uname -r": Output("5.10.104-tegra\n")}
    assert read_facts(Machine(tmp_path, outputs)).gpu_problem is None


@pytest.mark.parametrize("jetpack", JETPACKS.values(), ids=JETPACKS)
def test_a_release_of_each_jetpack_of_our_boards_is_recognised(
    tmp_path: Path, jetpack: JetPack
) -> None:
    """A line of L4T has several JetPacks, so `boards.toml` names only the line."""
    major, minor = jetpack.l4t.split(".")
    names = set()
    for revision in range(5):
        text = f"# R{major} (release), REVISION: {minor}.{revision}, GCID: 1\n"
        plant(tmp_path, {"etc/nv_tegra_release": text})
        names.add(read_facts(Machine(tmp_path, {})).jetpack)
    assert jetpack.version in names
