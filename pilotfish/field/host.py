"""Collect the facts of this machine that latency depends on.

In: /proc, /sys, /etc and /var below ``root``. Out: names and JSON values. A fact that this machine
does not have, or shows only to privileged users, is absent.

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


def facts(root: Path = _ROOT) -> dict[str, Any]:
    """Collect the machine's facts.

    board, l4t (NVIDIA's release line), kernel, machine, cpu, cpus, cpu_quota (CPUs that the control
    groups grant), memory_bytes, power_mode, governor, gpu, python, pilotfish, and packages: names
    and versions.
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
    """Read a small file; None where it is missing or empty. Device trees end in NUL."""
    try:
        return path.read_bytes().decode(errors="replace").strip("\0 \n\t") or None
    except OSError:
        return None


def _first_line(path: Path) -> str | None:
    text = _text(path)
    return text.splitlines()[0] if text else None


def _board(root: Path) -> str | None:
    """Return the device tree's model, else the DMI product."""
    tree = _text(root / "proc/device-tree/model")
    if tree is not None:
        return tree
    dmi = root / "sys/class/dmi/id"
    parts = [_text(dmi / "sys_vendor"), _text(dmi / "product_name")]
    return " ".join(part for part in parts if part) or None


def _cpu(root: Path) -> str | None:
    """Return the first core's name, or its implementer and part number."""
    for line in (_text(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "CPU part"):
            return value.strip() or None
    return None


def _memory_bytes(root: Path) -> int | None:
    match = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _power_mode(root: Path) -> str | None:
    """Return nvpmodel's mode by name, or by number where its table does not name it."""
    status = re.search(r"pmode:\s*(\d+)", _text(root / "var/lib/nvpmodel/status") or "")
    if status is None:
        return None
    number = int(status[1])
    table = _text(root / "etc/nvpmodel.conf") or ""
    names: dict[str, str] = dict(re.findall(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)", table))
    return names.get(str(number), f"mode {number}")


def _governor(root: Path) -> str | None:
    """Return the governors of all cores, joined by commas if they differ."""
    cores = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    return ", ".join(sorted({name for core in cores if (name := _text(core))})) or None


def _gpu(root: Path) -> str | None:
    """Return the model of the first GPU, as NVIDIA's kernel driver names it."""
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
