"""The board: its name, NVIDIA's software for it, power mode, clocks, temperatures.

A Jetson says what it is in its device tree, and its L4T in /etc/nv_tegra_release. A container has
the first of these, but often not the second. A recording may have neither, but the output of
`jetson_release`, of a program that many have installed (jetson-stats).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pilotfish.boards.board import ALL_BOARDS, BOARDS, Board
from pilotfish.boards.recognition import recognise
from pilotfish.deploy.power import modes
from pilotfish.lab import host
from pilotfish.lab.doctor.machine import Machine

_STATS = r"jetson_release|jtop|jetson_config"
_L4T_FILE = re.compile(r"R(\d+)\b.*?REVISION:\s*([\d.]+)")
# L4T → JetPack, where a line of L4T has several (https://developer.nvidia.com/embedded/jetpack-archive)
_JETPACKS = {
    "36.2.0": "6.0 (preview)", "36.3.0": "6.0", "36.4.0": "6.1", "36.4.2": "6.1",
    "36.4.3": "6.2", "36.4.4": "6.2.1", "38.2.0": "7.0", "38.2.1": "7.0", "38.4.0": "7.1",
    "39.2.0": "7.2", "35.1.0": "5.0.2", "35.2.1": "5.1", "35.3.1": "5.1.1", "35.4.1": "5.1.2",
    "35.5.0": "5.1.3", "35.6.0": "5.1.4", "32.7.1": "4.6.1", "32.6.1": "4.6", "32.5.1": "4.5.1",
}  # fmt: skip
_LINES = {28: "3.x", 31: "4.x", 32: "4.x", 34: "5.x", 35: "5.x", 36: "6.x", 38: "7.x", 39: "7.x"}
_KERNELS = {"4.9": "4.x", "5.10": "5.x", "5.15": "6.x", "6.8": "7.x"}
# Words in the names of Jetsons, the longest first → system on a chip.
_SOCS = {
    "thor": "tegra264", "orin": "tegra234", "xavier": "tegra194", "tx2": "tegra186",
    "tx1": "tegra210", "jetson nano": "tegra210", "jetson-nano": "tegra210",
}  # fmt: skip
_SLOWED = re.compile(r"throttle|^(cpufreq|devfreq)-")  # types of cooling devices that take speed


def board_facts(machine: Machine) -> dict[str, Any]:
    """Return the facts of the board by name (`MachineFacts`)."""
    root = machine.root
    model = host.board(root) or machine.find(
        r"(?:Model: |^ *- (?=NVIDIA Jetson))(.+?)(?: - Jetpack.*)?$", _STATS
    )
    part = machine.find(r"P-Number: (p\d{4}-\d{4})", _STATS) or _part(root)
    named = machine.find(r"Module: (.+)", _STATS) or machine.find(
        r"Machine:(.*(?:Jetson|NVIDIA).*)", "jetson_clocks"
    )
    board = recognise(root)
    if board is None or (board.name == "cpu" and machine.process is None):
        board = _board_of(part, model, named)  # a recording has few files: no GPU is no sign
    l4t = _l4t(machine)
    known_modes = modes(host.text(root / "etc/nvpmodel.conf") or "")
    listed = re.findall(r"POWER_MODEL:?\s+ID=(\d+)\s+NAME=(\S+)", machine.texts(r".*nvpmodel"))
    known_modes = known_modes or {name: int(number) for number, name in listed}
    package = _jetpack_package(machine)
    kernel = kernel_release(machine)
    return {
        "board": model or named,
        "board_name": None if board is None else board.name,
        "module": part,
        "soc": _soc(machine, model, named),
        "tegra": _is_tegra(machine, kernel),
        "l4t": l4t,
        "release_file": _has_release_file(machine),
        "jetpack": (package or "").partition("+")[0].partition("-")[0]
        or machine.find(r"Jetpack:? v?(\d[\d.]*)", _STATS)
        or _jetpack_of(l4t, kernel),
        "jetpack_package": package,
        "power_mode": host.power_mode(root)
        or machine.find(r"NV Power Mode(?:\[\d+\])?:\s*(\S+)", rf"nvpmodel|jetson_clocks|{_STATS}"),
        "power_modes": known_modes,
        "governor": host.governor(root)
        or machine.find(r"cpu\d+:.*Governor=(\S+)", "jetson_clocks"),
        "cpu_khz": _cpu_frequencies(machine),
        "gpu_hz": _gpu_frequencies(machine),
        "temperatures": _temperatures(machine),
        "throttles_at": _limits(root),
        "throttled": tuple(_throttled(machine)),
    }


def _part(root: Path) -> str | None:
    """Return the module's part number from the device tree's `compatible`."""
    text = host.text(root / "proc/device-tree/compatible") or ""
    match = re.search(r"\b(p(?:3767|3701|3834|3668|2888|3448|3636|3310)-\d{4})", text)
    return match[1] if match else None


def _board_of(part: str | None, *names: str | None) -> Board | None:
    """Return the board of a part number, else the only one whose plain name a text contains."""
    for board in ALL_BOARDS.values():
        if part is not None and f"nvidia,{part}" in board.tree:
            return board
    text = " ".join(filter(None, names)).lower().replace(" ", "-")
    matches = [board for name, board in BOARDS.items() if board.integrated and name in text]
    return matches[0] if len(matches) == 1 else None


def _soc(machine: Machine, *names: str | None) -> str | None:
    tree = host.text(machine.root / "proc/device-tree/compatible") or ""
    if match := re.search(r"tegra\d{3}\b", tree):
        return match[0]
    if stated := machine.find(r"(?:SoC: |SOC family:)(tegra\d{3})", f"{_STATS}|jetson_"):
        return stated
    text = " ".join(filter(None, names)).lower()
    if "nvidia" in text or "jetson" in text:
        return next((soc for word, soc in _SOCS.items() if word in text), None)
    return None


def _l4t(machine: Machine) -> str | None:
    """Return the release of L4T with three numbers, such as 36.4.3."""
    if match := _L4T_FILE.search(host.l4t(machine.root) or machine.texts(r".*nv_tegra_release")):
        return _three(f"{match[1]}.{match[2]}")
    if package := packages(machine).get("nvidia-l4t-core"):
        return _three(package.partition("-")[0])
    stated = machine.find(r"L4T:? ([\d.]+)", _STATS) or machine.find(
        r"-l4t-r(\d+\.[\d.]*\d)", "uname|cat /proc/version"
    )
    return None if stated is None else _three(stated)


def _has_release_file(machine: Machine) -> bool | None:
    """Return whether the release file is there; None: a recording does not say so."""
    if host.l4t(machine.root) is not None:
        return True
    statuses = [output.status for output in machine.outputs(r".*nv_tegra_release")]
    if machine.process is None:
        return None if not statuses else 0 in statuses
    return False


def _three(version: str) -> str:
    return ".".join([*version.split("."), "0", "0"][:3])


def _jetpack_of(l4t: str | None, kernel: str | None) -> str | None:
    """Return the JetPack of a release of L4T, else the line of JetPack that has such a kernel."""
    if l4t is not None:
        return _JETPACKS.get(l4t) or _near(l4t) or _LINES.get(int(l4t.partition(".")[0]))
    match = re.match(r"(\d+\.\d+)\..*tegra", kernel or "")
    return _KERNELS.get(match[1]) if match else None


def _near(l4t: str) -> str | None:
    """Return the first two numbers of the JetPack with the same minor release of L4T."""
    minor = l4t.rpartition(".")[0]
    names = [name for release, name in _JETPACKS.items() if release.rpartition(".")[0] == minor]
    return ".".join(names[-1].split(".")[:2]) if names else None


def kernel_release(machine: Machine) -> str | None:
    """Return the kernel's release."""
    if machine.process is not None:
        return str(machine.process["kernel"])
    release = r"(\d+\.\d+\.\d+\S*)"
    return machine.find(rf"^(?:Linux \S+ )?{release}", "uname") or machine.find(
        rf"(?:Release|Kernel\S*):(?: Linux)? {release}", rf"{_STATS}|hostnamectl"
    )


def _is_tegra(machine: Machine, kernel: str | None) -> bool:
    """Return whether programs, files or the kernel are those of NVIDIA's Linux for Tegra."""
    tools = any(output.status == 0 for output in machine.outputs("nvpmodel|tegrastats"))
    return tools or bool(re.search(r"tegra|-l4t-", kernel or ""))


def _jetpack_package(machine: Machine) -> str | None:
    """Return the version of nvidia-jetpack; "" if dpkg was asked and does not have it."""
    version = packages(machine).get("nvidia-jetpack")
    if version is None and any(machine.outputs(r"(?:dpkg|apt)[\w-]* .*nvidia-jetpack")):
        return ""
    return version


def packages(machine: Machine) -> dict[str, str]:
    """Return the Debian packages that the readings show: version by name."""
    text = machine.texts(r"(dpkg|apt)")
    listed = dict(re.findall(r"^([a-z][\w.+-]+)(?::\w+)?[\t ]+(\d[\w.+:~-]*)$", text, re.MULTILINE))
    listed |= dict(re.findall(r"^ii\s+([\w.+-]+)(?::\w+)?\s+(\S+)", text, re.MULTILINE))
    listed |= dict(re.findall(r"^([\w.+-]+)/\S+ (\S+) .*\[installed", text, re.MULTILINE))
    listed |= dict(re.findall(r"^Package: (\S+)\n(?:.+\n)*?Version: (\S+)", text, re.MULTILINE))
    return listed


def _cpu_frequencies(machine: Machine) -> tuple[int, int, int] | None:
    """Return the lowest and highest frequency of the CPUs now, and the highest there is (kHz)."""
    rows = []
    for core in (machine.root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"):
        with suppress(ValueError, TypeError):
            names = ("scaling_min_freq", "scaling_max_freq", "cpuinfo_max_freq")
            low, high, top = (int(host.text(core / name) or "") for name in names)
            rows.append((low, high, top))
    pattern = r"cpu\d+:\s+Online=1 .*?MinFreq=(\d+) MaxFreq=(\d+)"
    for low_text, high_text in re.findall(pattern, machine.texts("jetson_clocks")):
        rows.append((int(low_text), int(high_text), int(high_text)))
    if not rows:
        return None
    return min(row[0] for row in rows), max(row[1] for row in rows), max(row[2] for row in rows)


def _gpu_frequencies(machine: Machine) -> tuple[int, int, int] | None:
    """Return the same of a Jetson's GPU (Hz)."""
    for folder in sorted((machine.root / "sys/class/devfreq").glob("*")):
        if not re.search(r"gpu|ga10b|gv11b|gp10b", folder.name):
            continue
        with suppress(ValueError, TypeError):
            low, high = (int(host.text(folder / name) or "") for name in ("min_freq", "max_freq"))
            listed = (host.text(folder / "available_frequencies") or "").split()
            return low, high, max([high, *map(int, listed)])
    match = re.search(r"GPU MinFreq=(\d+) MaxFreq=(\d+)", machine.texts("jetson_clocks"))
    return (int(match[1]), int(match[2]), int(match[2])) if match else None


def _temperatures(machine: Machine) -> dict[str, float]:
    values = {}
    for zone in sorted((machine.root / "sys/class/thermal").glob("thermal_zone*")):
        with suppress(ValueError, TypeError):
            degrees = int(host.text(zone / "temp") or "") / 1000
            if -40 < degrees < 200:  # a sensor that is off shows an absurd value
                values[host.text(zone / "type") or zone.name] = degrees
    for name, number in re.findall(r"(\w+)@(-?\d+(?:\.\d+)?)C\b", machine.texts("tegrastats")):
        if float(number) > -40:
            values[name] = float(number)
    # the sensor of a Jetson's power chip shows a constant
    return {name: value for name, value in values.items() if not name.startswith("PMIC")}


def _limits(root: Path) -> dict[str, float]:
    """Return the temperature from which the kernel slows the machine down, by sensor."""
    limits: dict[str, float] = {}
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        for trip in zone.glob("trip_point_*_type"):
            if host.text(trip) in ("passive", "hot", "critical"):
                with suppress(ValueError, TypeError):
                    limit = int(host.text(trip.with_name(trip.name[:-4] + "temp")) or "") / 1000
                    name = host.text(zone / "type") or zone.name
                    if limit > 0:
                        limits[name] = min(limit, limits.get(name, limit))
    return limits


def _throttled(machine: Machine) -> Iterator[str]:
    """Yield the reasons for which the kernel or the board takes speed now."""
    for device in sorted((machine.root / "sys/class/thermal").glob("cooling_device*")):
        kind = host.text(device / "type") or ""
        if _SLOWED.search(kind) and (host.text(device / "cur_state") or "0") != "0":
            yield f"{kind} is active"
    for counter in sorted((machine.root / "sys/class/hwmon").glob("hwmon*/oc*_event_cnt")):
        if (count := host.text(counter) or "0") != "0":
            yield f"over-current: {count} events since the start ({counter.name.partition('_')[0]})"
    log = machine.texts(r"dmesg|journalctl")
    if re.search(r"OC ALARM|soctherm.*OC|throttled due to [Oo]ver-?current", log):
        yield "over-current: an alarm in the kernel's log"
    elif re.search(r"clock throttled|[Tt]hermal throttling", log):
        yield "the kernel's log says so"
