"""Collect those facts about this machine on which latency depends.

In: /proc, /sys, /etc and /var below ``root``. Out: JSON values by name. A fact is absent if this
machine does not have it, or if only privileged users may read it.

A Jetson's power mode is in ``/var/lib/nvpmodel/status`` ("pmode:0002"), its name in
``/etc/nvpmodel.conf`` ("< POWER_MODEL ID=2 NAME=MODE_30W >"); ``nvpmodel -q`` prints the same,
but may need root.
"""

import os
import platform
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from pilotfish.base.cpus import cpu_quota
from pilotfish.base.memory import reported_bytes
from pilotfish.base.version import SOFTWARE
from pilotfish.deploy.power import modes

_ROOT = Path("/")
_PACKAGES = (
    *("onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "tensorrt-rtx-cu12-bindings"),
    *("tensorrt-rtx-cu13-bindings", "numpy", "pyzmq"),
)


def name() -> str:
    """Return the machine's name in its network."""
    return platform.node().encode(errors="replace").decode()


def facts(root: Path = _ROOT) -> dict[str, Any]:
    """Return the machine's facts by name.

    The names are: board, l4t (NVIDIA's release line), kernel, machine, cpu, cpus, cpu_quota (number
    of CPUs that the control groups grant), memory_bytes, power_mode, governor, gpu, python,
    pilotfish, and packages (versions by name).
    """
    values = {
        "board": board(root),
        "l4t": l4t(root),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": cpu(root),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_quota": cpu_quota(root),
        "memory_bytes": reported_bytes(root),
        "power_mode": power_mode(root),
        "governor": governor(root),
        "gpu": gpu(root),
        "python": platform.python_version(),
        "pilotfish": SOFTWARE.removeprefix("pilotfish "),
        "packages": packages(),
    }
    return {key: value for key, value in values.items() if value is not None}


def text(path: Path) -> str | None:
    """Read a small file; return None if it is missing or empty.

    A final NUL, as in files of a device tree, is removed.
    """
    try:
        return path.read_bytes().decode(errors="replace").strip("\0 \n\t") or None
    except OSError:
        return None


def l4t(root: Path = _ROOT) -> str | None:
    """Return the first line of NVIDIA's release file, as it is."""
    content = text(root / "etc/nv_tegra_release")
    return content.splitlines()[0] if content else None


def board(root: Path = _ROOT) -> str | None:
    """Return the board's name: the device tree's model, or else the DMI product name."""
    tree = text(root / "proc/device-tree/model")
    if tree is not None:
        return tree
    dmi = root / "sys/class/dmi/id"
    parts = [text(dmi / "sys_vendor"), text(dmi / "product_name")]
    return " ".join(part for part in parts if part) or None


def cpu(root: Path = _ROOT) -> str | None:
    """Return the name of the first core's model, or else its implementer and part number."""
    for line in (text(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "CPU part"):
            return value.strip() or None
    return None


def power_mode(root: Path = _ROOT) -> str | None:
    """Return the name of nvpmodel's power mode, or its number if nvpmodel.conf has no name."""
    status = re.search(r"pmode:\s*(\d+)", text(root / "var/lib/nvpmodel/status") or "")
    if status is None:
        return None
    number = int(status[1])
    names = {id: mode for mode, id in modes(text(root / "etc/nvpmodel.conf") or "").items()}
    return names.get(number, f"mode {number}")


def governor(root: Path = _ROOT) -> str | None:
    """Return the cores' frequency governor; if the cores differ, all governors, with commas."""
    cores = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    return ", ".join(sorted({mode for core in cores if (mode := text(core))})) or None


def gpu(root: Path = _ROOT) -> str | None:
    """Return the model of the first GPU, by the name that NVIDIA's kernel driver gives it."""
    for card in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        match = re.search(r"^Model:\s*(.+)$", text(card) or "", re.MULTILINE)
        if match:
            return match[1].strip()
    return None


def packages() -> dict[str, str]:
    """Return the versions of the installed wheels on which speed or results depend."""
    versions = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
