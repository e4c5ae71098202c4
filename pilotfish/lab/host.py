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
from pilotfish.base.version import SOFTWARE

_ROOT = Path("/")
_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "tensorrt", "numpy", "pyzmq")


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
        "board": _board(root),
        "l4t": _first_line(root / "etc/nv_tegra_release"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu(root),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_quota": cpu_quota(root),
        "memory_bytes": _memory_bytes(root),
        "power_mode": _power_mode(root),
        "governor": _governor(root),
        "gpu": _gpu(root),
        "python": platform.python_version(),
        "pilotfish": SOFTWARE.removeprefix("pilotfish "),
        "packages": _packages(),
    }
    return {name: value for name, value in values.items() if value is not None}


def _text(path: Path) -> str | None:
    """Read a small file; return None if it is missing or empty.

    A final NUL, as in files of a device tree, is removed.
    """
    try:
        return path.read_bytes().decode(errors="replace").strip("\0 \n\t") or None
    except OSError:
        return None


def _first_line(path: Path) -> str | None:
    text = _text(path)
    return text.splitlines()[0] if text else None


def _board(root: Path) -> str | None:
    """Return the board's name: the device tree's model, or else the DMI product name."""
    tree = _text(root / "proc/device-tree/model")
    if tree is not None:
        return tree
    dmi = root / "sys/class/dmi/id"
    parts = [_text(dmi / "sys_vendor"), _text(dmi / "product_name")]
    return " ".join(part for part in parts if part) or None


def _cpu(root: Path) -> str | None:
    """Return the name of the first core's model, or else its implementer and part number."""
    for line in (_text(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "CPU part"):
            return value.strip() or None
    return None


def _memory_bytes(root: Path) -> int | None:
    match = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _power_mode(root: Path) -> str | None:
    """Return the name of nvpmodel's power mode, or its number if nvpmodel.conf has no name."""
    status = re.search(r"pmode:\s*(\d+)", _text(root / "var/lib/nvpmodel/status") or "")
    if status is None:
        return None
    number = int(status[1])
    table = _text(root / "etc/nvpmodel.conf") or ""
    names: dict[str, str] = dict(re.findall(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)", table))
    return names.get(str(number), f"mode {number}")


def _governor(root: Path) -> str | None:
    """Return the cores' frequency governor; if the cores differ, all governors, with commas."""
    cores = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    return ", ".join(sorted({name for core in cores if (name := _text(core))})) or None


def _gpu(root: Path) -> str | None:
    """Return the model of the first GPU, by the name that NVIDIA's kernel driver gives it."""
    for card in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        match = re.search(r"^Model:\s*(.+)$", _text(card) or "", re.MULTILINE)
        if match:
            return match[1].strip()
    return None


def _packages() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
