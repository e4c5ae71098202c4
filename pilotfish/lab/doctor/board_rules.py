"""What is wrong with a board: its JetPack, power mode, clocks, heat."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pilotfish.lab.doctor.facts import MachineFacts
from pilotfish.lab.doctor.finding import Finding, fault, note, warning
from pilotfish.lab.doctor.gpu_facts import NO_CUDA, NO_TENSORRT

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)
_SUPER_L4T = (36, 4, 3)  # JetPack 6.2, the first with the power mode MAXN_SUPER
_SUPER_BOARDS = ("orin-nano", "orin-nx")
# Boards for which NVIDIA makes no JetPack with Python 3.10: the last JetPack, and its Python.
_LAST = {
    "tegra210": ("Jetson Nano and TX1", "4.6", "3.6"),
    "tegra186": ("Jetson TX2", "4.6", "3.6"),
    "tegra194": ("Jetson Xavier", "5.1", "3.8"),
}
JETPACK = "sudo apt update && sudo apt install nvidia-jetpack"
_HOT_C = 5.0  # °C below the limit from which a machine is called hot
_HOT_ANYWHERE_C = 95.0  # the same for a sensor whose limit is not known


def board_findings(facts: MachineFacts) -> Iterator[Finding]:
    """Yield what is wrong with the board, the worst first."""
    if facts.is_tegra:
        yield from _jetpack(facts)
        yield from _unknown_board(facts)
        yield from _container(facts)
        yield from _libraries(facts)
        yield from _power(facts)
    yield from _heat(facts)
    yield from _clocks(facts)


def _release(facts: MachineFacts) -> tuple[int, ...]:
    return tuple(int(part) for part in (facts.l4t or "0").split(".") if part.isdigit())


def _jetpack(facts: MachineFacts) -> Iterator[Finding]:
    if facts.soc in _LAST:
        title, jetpack, python = _LAST[facts.soc]
        yield fault(
            "board",
            f"The last JetPack for {title} is {jetpack} with Python {python}, and Pilotfish needs "
            "Python 3.10 or later: this board cannot be used. Use an Orin or a Thor.",
        )
    elif 0 < facts.jetpack_line < 6:
        python = "3.6" if facts.jetpack_line < 5 else "3.8"
        release = f" (L4T {facts.l4t})" if facts.l4t else f" (kernel {facts.kernel})"
        yield (fault if facts.container is None else warning)(
            "JetPack",
            f"JetPack {facts.jetpack}{release} has Python {python}, and Pilotfish needs 3.10 or "
            "later: flash JetPack 6.2 or later (docs/jetson.md).",
        )
    elif facts.l4t is not None and facts.jetpack in ("6.0", "6.0 (preview)", "6.1", "7.0", "7.1"):
        later = "6.2" if facts.jetpack < "7" else "7.2"
        yield note(
            "JetPack",
            f"Bundles are made for JetPack 6.2 and 7.2, and this is {facts.jetpack}: what is "
            f"delivered in a bundle for {later} may not fit its CUDA and TensorRT.",
        )


def _unknown_board(facts: MachineFacts) -> Iterator[Finding]:
    if facts.board_name is None and facts.soc not in _LAST and facts.jetpack_line not in (4, 5):
        yield note(
            "board",
            "This is a Jetson, but which one is not known, so nothing can be said of its memory "
            "and speed; Pilotfish needs an Orin or a Thor.",
        )


def _container(facts: MachineFacts) -> Iterator[Finding]:
    if facts.l4t is None and (facts.container is not None or facts.release_file is False):
        what = f"a container ({facts.container})" if facts.container else "perhaps a container"
        yield warning(
            "container",
            f"This is {what} on a Jetson, without NVIDIA's files of L4T: it cannot use the GPU "
            "unless it was started with NVIDIA's runtime.",
            "docker run --runtime nvidia …",
        )


def _libraries(facts: MachineFacts) -> Iterator[Finding]:
    """Yield that CUDA or TensorRT is missing on a system of NVIDIA's."""
    if facts.l4t is None or facts.jetpack_line < 6 or facts.soc in _LAST:
        return
    sought = facts.jetpack_package == "" or facts.absent is not None
    missing = []
    if facts.cuda is None and (sought or facts.cuda_problem == NO_CUDA):
        missing.append("CUDA")
    libraries = facts.tensorrt or facts.tensorrt_libraries
    if libraries is None and (sought or facts.tensorrt_problem == NO_TENSORRT):
        missing.append("TensorRT")
    if missing:
        yield warning(
            "JetPack",
            f"{' and '.join(missing)} {'was' if len(missing) == 1 else 'were'} not found, and the "
            "GPU needs them: L4T alone does not bring JetPack's libraries.",
            JETPACK,
        )
    elif facts.absent is not None and facts.tensorrt is None and facts.tensorrt_libraries:
        yield from _wrong_python(facts)


def _wrong_python(facts: MachineFacts) -> Iterator[Finding]:
    """Yield that this Python cannot import JetPack's TensorRT."""
    system = (facts.system_python or "").rpartition(".")[0]
    if system and (facts.python or "").rpartition(".")[0] != system:
        yield warning(
            "TensorRT",
            f"JetPack's TensorRT is for the system's Python {system}, and Pilotfish runs in "
            f"{facts.python}: make its environment with the system's Python.",
            "/usr/bin/python3 -m venv --system-site-packages pilotfish-venv",
        )
    else:
        yield warning(
            "TensorRT",
            "TensorRT's libraries are installed, but this Python cannot import its package"
            + (f" ({facts.tensorrt_problem})" if facts.tensorrt_problem else "")
            + ": the package is missing, or the environment hides the system's packages.",
            "sudo apt install python3-libnvinfer && "
            "/usr/bin/python3 -m venv --system-site-packages pilotfish-venv",
        )


def _power(facts: MachineFacts) -> Iterator[Finding]:
    mode = facts.power_mode
    if mode is None:
        return
    strongest = max(facts.power_modes, key=_strength, default=None)
    family = next((name for name in _SUPER_BOARDS if name in (facts.board_name or "")), None)
    has_super = family is not None and _release(facts) >= _SUPER_L4T
    if strongest is not None and _strength(mode) < _strength(strongest):
        yield warning(
            "power mode",
            f"The power mode is {mode}; {strongest} is faster, if power and cooling suffice.",
            f"sudo nvpmodel -m {facts.power_modes[strongest]}",
        )
    elif strongest is None and not mode.startswith("MAXN") and not _is_fastest(facts, has_super):
        yield warning(
            "power mode",
            f"The power mode is {mode}, which limits the clocks: a faster one may be defined. The "
            "command lists the modes; `sudo nvpmodel -m ID` sets one.",
            "grep POWER_MODEL /etc/nvpmodel.conf",
        )
    elif strongest is None and not mode.startswith("MAXN") and facts.jetpack_line >= 6:
        yield note(
            "power mode",
            f"The power mode {mode} is the fastest that JetPack {facts.jetpack} has for this "
            "module: JetPack 6.2 has faster ones (25W, MAXN_SUPER).",
        )
    elif has_super and strongest != "MAXN_SUPER" and not mode.startswith("MAXN"):
        yield note(
            "power mode",
            "JetPack 6.2 has the power mode MAXN_SUPER for this module, but this board was flashed "
            "without it: flash it with a configuration whose name ends in -super.",
        )


def _is_fastest(facts: MachineFacts, has_super: bool) -> bool:
    """Whether a mode is the board's fastest, where its modes are not known."""
    nano = facts.board_name is not None and facts.board_name.startswith("orin-nano")
    return nano and not has_super and facts.l4t is not None and _watts(facts.power_mode or "") >= 15


def _strength(mode: str) -> tuple[int, float]:
    """Return a mode's rank: MAXN_SUPER, then MAXN, then by watts."""
    return ("SUPER" in mode) + mode.startswith("MAXN"), _watts(mode)


def _watts(mode: str) -> float:
    match = re.search(r"(\d+)W", mode)
    return float(match[1]) if match else 0.0


def _heat(facts: MachineFacts) -> Iterator[Finding]:
    supply = [each for each in facts.throttled if "current" in each or "supply" in each]
    others = [each for each in facts.throttled if each not in supply]
    if supply:
        yield warning(
            "power supply",
            f"The power supply is too weak, and the board slows down: {'; '.join(supply)}. Use a "
            "stronger one, or a lower power mode.",
        )
    if others:
        yield warning(
            "throttling",
            f"The machine is slower than it could be now: {'; '.join(others)}. Cool it, or choose "
            "a lower power mode.",
        )
    for sensor, degrees in sorted(facts.temperatures.items(), key=lambda each: -each[1]):
        limit = facts.throttles_at.get(sensor)
        if degrees >= (limit - _HOT_C if limit is not None else _HOT_ANYWHERE_C):
            slows = f"slows down at {limit:.0f} °C" if limit else "is about to slow down"
            yield warning(
                "temperature",
                f"{sensor} has {degrees:.0f} °C, and {slows}: cool the machine.",
                "sudo jetson_clocks --fan" if facts.is_tegra else None,
            )
            return


def _clocks(facts: MachineFacts) -> Iterator[Finding]:
    if facts.is_tegra:
        low, high, _ = facts.cpu_khz or (0, 0, 0)
        gpu_low, gpu_high, gpu_top = facts.gpu_hz or (0, 0, 0)
        if (high and low < high) or (gpu_high and gpu_low < gpu_high):
            yield note(
                "clocks",
                "The clocks rise and fall with the load, and a short pass ends before they have "
                "risen: jetson_clocks sets them to their maximum until the next start.",
                "sudo jetson_clocks",
            )
        if gpu_top and gpu_high < gpu_top:
            yield note(
                "clocks",
                f"The GPU may use {gpu_high / 1e6:.0f} of its {gpu_top / 1e6:.0f} MHz in this "
                "power mode.",
            )
    elif facts.governor in ("powersave", "conservative"):
        yield note(
            "clocks",
            f"The CPUs' governor is {facts.governor}: with performance, short passes are faster.",
            "sudo cpupower frequency-set -g performance",
        )
    if facts.cpus_online and facts.cpus_present and facts.cpus_online != facts.cpus_present:
        yield note(
            "clocks",
            f"Only the CPUs {facts.cpus_online} of {facts.cpus_present} are on"
            + (", because of the power mode." if facts.is_tegra else "."),
        )
