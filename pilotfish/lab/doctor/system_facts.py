"""The operating system: memory, disks, systemd, clock, locale, limits, Python."""

from __future__ import annotations

import locale
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pilotfish
from pilotfish.base.cpus import cpu_quota
from pilotfish.base.memory import reported_bytes
from pilotfish.base.version import VERSION
from pilotfish.deploy.versions import HOME
from pilotfish.engines.cache import cache_directory
from pilotfish.engines.gpus import gpu_nodes
from pilotfish.engines.huge_pages import SETTINGS
from pilotfish.lab import host
from pilotfish.lab.doctor.board_facts import kernel_release
from pilotfish.lab.doctor.facts import Disk, Unit
from pilotfish.lab.doctor.machine import Machine

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = r"(\d+(?:[.,]\d+)?)\s?([KMGT]?)i?B?"
_DATE = re.compile(r"\b([A-Z][a-z]{2}) +(\d+) +(\d\d:\d\d:\d\d)(?: [AP]M)? \S+ (\d{4})$", re.M)
# Files that root alone may read on a board, and what is not known without them.
_OF_ROOT = {
    "etc/pilotfish/device.toml": "the device's configuration",
    "etc/pilotfish/edge.toml": "the edge's configuration",
}


def process_facts() -> dict[str, Any]:
    """Return the facts that only a process on the machine can know, by name."""
    newest = Path(pilotfish.__file__).stat().st_mtime
    now = datetime.now(timezone.utc)
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "disks": tuple(_disks()),
        "python": platform.python_version(),
        "pilotfish": VERSION,
        "time": now.isoformat(timespec="seconds"),
        # a day for time zones of archives and images
        "clock_behind": now.timestamp() < newest - 86400,
        "encoding": locale.getpreferredencoding(False) if not sys.flags.utf8_mode else "utf-8",
        "open_files": tuple(
            min(each, 2**31) if each >= 0 else 2**31
            for each in resource.getrlimit(resource.RLIMIT_NOFILE)
        ),
        "unread": tuple(_unread()),
    }


def system_facts(machine: Machine) -> dict[str, Any]:
    """Return the facts of the operating system by name (`MachineFacts`)."""
    root = machine.root
    devices = root / "sys/devices/system/cpu"
    python = machine.find(r"^Python (\d+\.\d+\.\d+)", r"python[\d.]* (?:-V|--version)")
    facts: dict[str, Any] = {
        "system": _system(machine),
        "container": _container(machine),
        "cpu": host.cpu(root) or machine.find(r"Model name:\s*(.+)", "lscpu"),
        "cpus_online": host.text(devices / "online"),
        "cpus_present": host.text(devices / "present"),
        "cpu_quota": cpu_quota(root),
        **_memory(machine),
        "system_python": machine.find(r"^Python (\S+)", r"/usr/bin/python3 (?:-V|--version)")
        or python,
        "systemd": machine.find(r"^systemd (\d+)", "systemctl --version|systemd --version"),
        "units": tuple(_units(machine)),
        "battery_clock": machine.find(r"(?:RTC time:|RTCTimeUSec=)\s*(.+)", "timedatectl"),
        "time_synchronised": _synchronised(machine),
        "huge_pages": _chosen(host.text(root / SETTINGS.relative_to("/") / "enabled")),
    }
    if machine.process is None:
        return facts | _shown_process(machine, python)
    return facts | dict(machine.process)


def _shown_process(machine: Machine, python: str | None) -> dict[str, Any]:
    """Return what a recording shows of the facts of `process_facts`."""
    limit = machine.find(r"^(\d+)$", "ulimit -n")
    cpus = machine.find(r"^(\d+)$", "nproc") or machine.find(r"^CPU\(s\):\s*(\d+)", "lscpu")
    return {
        "kernel": kernel_release(machine),
        "machine": machine.find(r"\b(aarch64|x86_64|armv7l|i686)\b", "uname|lscpu"),
        "cpus": None if cpus is None else int(cpus),
        "disks": tuple(_shown_disks(machine)),
        "python": python,
        "time": _shown_time(machine),
        "encoding": machine.find(r"^LC_CTYPE=\"?[\w@]+\.([\w-]+)", "locale"),
        "open_files": None if limit is None else (int(limit), int(limit)),
    }


def _system(machine: Machine) -> str | None:
    release = host.text(machine.root / "etc/os-release") or machine.texts("lsb_release")
    match = re.search(r'PRETTY_NAME="?([^"\n]+)|Description:\s*(.+)', release)
    if match:
        return (match[1] or match[2]).strip()
    parts = re.findall(r"(?:Distributor ID|Release):\s*(\S+)", release)
    stated = r"(?:Distribution|Operating System): (.+)"
    return " ".join(parts) or machine.find(stated, "jetson_release|jtop|hostnamectl")


def _container(machine: Machine) -> str | None:
    """Return the kind of container, or "wsl"; None: none is known."""
    root = machine.root
    kernel = host.text(root / "proc/sys/kernel/osrelease") or ""
    kernel += (host.text(root / "proc/version") or "") + machine.texts("uname")
    if re.search("microsoft", kernel, re.IGNORECASE):
        return "wsl"
    for place, kind in (("run/.containerenv", "podman"), (".dockerenv", "docker")):
        if (root / place).exists():
            return kind
    groups = host.text(root / "proc/1/cgroup") or ""
    match = re.search(r"docker|kubepods|lxc|containerd", groups)
    return match[0] if match else host.text(root / "run/systemd/container")


def _memory(machine: Machine) -> dict[str, int | None]:
    root = machine.root
    zram, swapped = 0, reported_bytes(root, "SwapTotal")
    rows = (host.text(root / "proc/swaps") or machine.texts(r"cat /proc/swaps")).splitlines()
    for row in rows[1:]:
        with suppress(ValueError, IndexError):
            zram += 1024 * int(row.split()[2]) * ("zram" in row.split()[0])
    for name, *size in re.findall(rf"^(\S+) +\w+ +{_SIZE} ", machine.texts("swapon"), re.M):
        swapped = (swapped or 0) + _bytes(*size)
        zram += _bytes(*size) * ("zram" in name)
    facts: dict[str, int | None] = {
        "memory_bytes": reported_bytes(root),
        "available_bytes": reported_bytes(root, "MemAvailable"),
        "swap_bytes": swapped,
        "zram_bytes": zram if rows or zram else None,
    }
    for line, output in machine.listed("free"):
        unit = re.search(r"-(?:-?)([bkmg])", line)
        scale = (unit[1] if unit else "k").upper().replace("B", "")
        for key, name in (("Mem", "memory_bytes"), ("Swap", "swap_bytes")):
            if match := re.search(rf"^{key}:\s+{_SIZE}", output.text, re.MULTILINE):
                size = _bytes(match[1], match[2] or ("" if match[1] == "0" else scale))
                facts[name] = facts[name] if facts[name] is not None else size
    stats = re.search(r"RAM \d+/(\d+)MB", machine.texts("tegrastats"))
    if stats and facts["memory_bytes"] is None:
        facts["memory_bytes"] = int(stats[1]) << 20
    stats = re.search(r"SWAP \d+/(\d+)MB", machine.texts("tegrastats"))
    if stats and facts["swap_bytes"] is None:
        facts["swap_bytes"] = int(stats[1]) << 20
    return facts


def _bytes(number: str, unit: str) -> int:
    return round(float(number.replace(",", ".")) * _UNITS[unit.upper()])


def _disks() -> Iterator[Disk]:
    """Yield the file systems that we write to on this machine, each once."""
    devices = set()
    for folder, purpose in (
        (cache_directory(), "models, engines and downloads"),
        (Path("/") / HOME, "installed versions"),
        (Path("/var/cache/pilotfish"), "the service's cache"),
    ):
        place = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        with suppress(OSError):
            usage, device = shutil.disk_usage(place), place.stat().st_dev
            if device not in devices:
                devices.add(device)
                mine = folder == cache_directory()
                yield Disk(
                    path=str(folder),
                    purpose=purpose,
                    free_bytes=usage.free,
                    total_bytes=usage.total,
                    writable=os.access(place, os.W_OK) or not mine,
                    read_only=bool(os.statvfs(place).f_flag & os.ST_RDONLY),
                )


def _shown_disks(machine: Machine) -> Iterator[Disk]:
    """Yield the root's file system, if a recording shows it."""
    for line, output in machine.listed("df"):
        scale = "K" if not re.search(r"-\w*[hHB]", line) else ""
        pattern = rf"^\S+(?:\s+(?!\d)\S+)?\s+{_SIZE}\s+{_SIZE}\s+{_SIZE}\s+\d+%\s+/$"
        if match := re.search(pattern, output.text, re.MULTILINE):
            total = _bytes(match[1], match[2] or scale)
            free = _bytes(match[5], match[6] or scale)
            yield Disk(path="/", purpose="the system", free_bytes=free, total_bytes=total)
            return


def _units(machine: Machine) -> Iterator[Unit]:
    """Yield our units that are installed, by the properties that systemd shows."""
    for block in machine.texts("systemctl show").split("\n\n"):
        values = dict(line.partition("=")[::2] for line in block.strip().splitlines())
        if values.get("Id", "").startswith("pilotfish") and values.get("LoadState") == "loaded":
            yield Unit(
                name=values["Id"],
                state=values.get("ActiveState", ""),
                result=values.get("Result", ""),
                status=_count(values.get("ExecMainStatus")),
                restarts=_count(values.get("NRestarts")),
            )


def _count(text: str | None) -> int:
    return int(text) if text is not None and re.fullmatch(r"\d{1,9}", text) else 0


def _synchronised(machine: Machine) -> bool | None:
    state = machine.find(
        r"(?:NTPSynchronized=|System clock synchronized:\s*)(yes|no)", "timedatectl"
    )
    return None if state is None else state == "yes"


def _chosen(text: str | None) -> str | None:
    """Return the word in brackets of a setting in /sys: "always [madvise] never"."""
    match = re.search(r"\[(\w+)\]", text or "")
    return match[1] if match else None


def _shown_time(machine: Machine) -> str | None:
    """Return the clock that a recording shows, in ISO 8601; a wrong clock shows its year."""
    text = machine.texts("date|timedatectl").strip()
    if match := _DATE.search(text):
        month, day, hours, year = match.groups()
        with suppress(ValueError):
            clock = datetime.strptime(f"{year} {month} {day} {hours}", "%Y %b %d %H:%M:%S")
            return clock.replace(tzinfo=timezone.utc).isoformat()
    day = r" time: \w{3} (\d{4}-\d\d-\d\d) ([\d:]+)"
    match = re.search(f"Universal{day}", text) or re.search(f"Local{day}", text)
    if match is None:
        return None
    with suppress(ValueError):  # no such day or hour
        return datetime.fromisoformat(f"{match[1]}T{match[2]}+00:00").isoformat()
    return None


def _unread() -> Iterator[str]:
    """Yield what this user may not read."""
    for place, content in _OF_ROOT.items():
        path = Path("/") / place
        if os.path.exists(path) and not os.access(path, os.R_OK):
            yield f"/{place} ({content})"
    for node in gpu_nodes():
        if not os.access(node, os.R_OK | os.W_OK):
            yield f"{node} (the GPU)"
