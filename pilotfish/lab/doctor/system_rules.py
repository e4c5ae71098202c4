"""What is wrong with the operating system: memory, disks, systemd, clock, limits, Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

from pilotfish.boards.board import GIB
from pilotfish.lab.doctor.board_rules import NEWEST_PYTHON, OLDEST_PYTHON
from pilotfish.lab.doctor.facts import MachineFacts, Unit
from pilotfish.lab.doctor.finding import Finding, fault, note, warning

_OLDEST_SYSTEMD = 249
_FIRST_YEAR = 2018  # a clock before this year was never set
_FEW_FILES, _ENOUGH_FILES = 256, 1024
_SCARCE_BYTES, _LITTLE_BYTES = GIB // 4, 2 * GIB  # free on a disk
_SMALL_BYTES = 12 * GIB  # memory of a board that needs swap
_ARCHITECTURES = ("x86_64", "aarch64")
# Exit codes of our daemons → what they mean.
_EXITS = {
    65: "the model cannot be built or is damaged",
    66: "the model's folder is missing",
    69: "no TensorRT, or no GPU",
    77: "a file may not be read",
    78: "the configuration is broken",
}


def system_findings(facts: MachineFacts) -> Iterator[Finding]:
    """Yield what is wrong with the operating system, part by part."""
    yield from _python(facts)
    yield from _clock(facts)
    yield from _disks(facts)
    yield from _memory(facts)
    yield from _units(facts)
    yield from _limits(facts)
    yield from _settings(facts)
    tools = [each if "(" in each else each.partition(" ")[0] for each in facts.unfinished]
    for command in dict.fromkeys(tools):  # a driver that hangs stops several commands of a tool
        yield warning(
            "command",
            f"`{command}` did not end in time: it hangs, as with a broken driver, or the "
            "machine is busy.",
            "pilotfish doctor --wait 20",
        )


def _python(facts: MachineFacts) -> Iterator[Finding]:
    version = tuple(int(part) for part in (facts.python or "3.10").split(".") if part.isdigit())
    unusable = 0 < facts.jetpack_line < 6 and facts.container is None  # and said so
    if not OLDEST_PYTHON <= version[:2] <= NEWEST_PYTHON and not unusable:
        old = "old" if version[:2] < OLDEST_PYTHON else "new"
        yield fault(
            "Python",
            f"Python {facts.python} is too {old}: Pilotfish needs 3.10 to 3.13.",
            "uv venv --python 3.12 pilotfish-venv",
        )
    if facts.machine is not None and facts.machine not in _ARCHITECTURES:
        yield fault(
            "CPU",
            f"The architecture is {facts.machine}: ONNX Runtime has wheels for x86_64 and aarch64.",
        )


def _clock(facts: MachineFacts) -> Iterator[Finding]:
    wrong = facts.clock_behind or (
        facts.time is not None and datetime.fromisoformat(facts.time).year < _FIRST_YEAR
    )
    if wrong:
        yield fault(
            "clock",
            f"The clock is wrong ({facts.time}): certificates and invitations look as if they were "
            "not valid yet.",
            "sudo timedatectl set-ntp true",
        )
    elif facts.time_synchronised is False and _first_year(facts.battery_clock) < _FIRST_YEAR:
        yield warning(
            "clock",
            f"The clock does not follow time servers, and the battery's clock is not set "
            f"({facts.battery_clock}): the clock ({facts.time}) may be wrong, and certificates may "
            "look invalid. Check that a time server can be reached.",
            "sudo timedatectl set-ntp true",
        )
    elif facts.time_synchronised is False and facts.container is None:
        yield note(
            "clock",
            "The clock does not follow time servers: after a power cut it may be wrong.",
            "sudo timedatectl set-ntp true",
        )


def _first_year(text: str | None) -> int:
    match = re.search(r"\b(\d{4})-", text or "")
    return int(match[1]) if match else _FIRST_YEAR


def _disks(facts: MachineFacts) -> Iterator[Finding]:
    for disk in facts.disks:
        free = f"{disk.free_bytes / GIB:.1f} GiB of {disk.total_bytes / GIB:.0f}"
        if disk.read_only or not disk.writable:
            why = "lies on a disk that is mounted read-only"
            yield fault(
                "disk",
                f"{disk.path} ({disk.purpose}) "
                f"{why if disk.read_only else 'cannot be written by this user'}.",
                "export PILOTFISH_CACHE=FOLDER",
            )
        elif disk.free_bytes < _SCARCE_BYTES:
            yield fault(
                "disk",
                f"The disk of {disk.path} ({disk.purpose}) is full: {free} free.",
                "pilotfish models list",
            )
        elif disk.free_bytes < _LITTLE_BYTES:
            yield warning(
                "disk",
                f"The disk of {disk.path} ({disk.purpose}) is almost full: {free} free; a model or "
                "an engine takes 0.1 to 2 GiB.",
                "pilotfish models list",
            )


def _memory(facts: MachineFacts) -> Iterator[Finding]:
    if facts.memory_bytes is None or facts.container not in (None, "wsl"):
        return
    if facts.swap_bytes == 0 and facts.memory_bytes < _SMALL_BYTES and facts.is_tegra:
        yield warning(
            "swap",
            f"The board has {facts.memory_bytes / GIB:.1f} GiB of memory and no swap: the build of "
            "an engine may be killed.",
            "sudo fallocate -l 8G /swapfile && sudo chmod 600 /swapfile && "
            "sudo mkswap /swapfile && sudo swapon /swapfile",
        )
    elif (
        facts.is_tegra
        and facts.swap_bytes
        and facts.zram_bytes is not None
        and facts.zram_bytes >= facts.swap_bytes
        and facts.memory_bytes < _SMALL_BYTES
    ):
        yield note(
            "swap",
            "All swap is compressed memory (zram): it helps little when an engine is built.",
            "sudo fallocate -l 8G /swapfile && sudo chmod 600 /swapfile && "
            "sudo mkswap /swapfile && sudo swapon /swapfile",
        )
    if facts.available_bytes is not None and facts.available_bytes < GIB // 2:
        yield warning(
            "memory",
            f"Programs can get only {facts.available_bytes / GIB:.2f} GiB of memory now.",
            "ps aux --sort=-rss | head",
        )


def _units(facts: MachineFacts) -> Iterator[Finding]:
    if facts.systemd is not None and int(facts.systemd) < _OLDEST_SYSTEMD:
        yield warning(
            "systemd",
            f"systemd {facts.systemd} is older than {_OLDEST_SYSTEMD}, with which the units were "
            "tried: some of their settings are ignored.",
        )
    for unit in facts.units:
        yield from _unit(unit)


def _unit(unit: Unit) -> Iterator[Finding]:
    meaning = _EXITS.get(unit.status)
    why = f" with exit code {unit.status}" + (f" ({meaning})" if meaning else "")
    journal = f"journalctl -u {unit.name} -n 50 --no-pager"
    if unit.state == "failed":
        yield fault("service", f"{unit.name} failed{why if unit.status else ''}.", journal)
    elif unit.state == "activating" and unit.restarts > 2:
        yield fault("service", f"{unit.name} restarts again and again{why}.", journal)


def _limits(facts: MachineFacts) -> Iterator[Finding]:
    soft, hard = facts.open_files or (_ENOUGH_FILES, _ENOUGH_FILES)
    if hard < _FEW_FILES:
        yield warning(
            "open files",
            f"At most {hard} files may be open: an edge serves few devices, and a device few "
            "clients.",
            "ulimit -n 4096   # as root; in a unit: LimitNOFILE=16384",
        )
    elif soft < _FEW_FILES:
        yield note(
            "open files",
            f"{soft} files may be open, and the daemons raise this to {hard}; other commands of "
            "this shell do not.",
            f"ulimit -n {min(hard, 4096)}",
        )
    if facts.cpu_quota is not None and facts.cpus is not None and facts.cpu_quota < facts.cpus:
        text = f"The control group grants {facts.cpu_quota:g} of {facts.cpus} CPUs"
        if facts.cpu_quota < 1:
            yield warning("CPU quota", f"{text}: each pass is stopped for a part of its time.")
        else:
            yield note("CPU quota", f"{text}; passes use whole CPUs of them.")


def _settings(facts: MachineFacts) -> Iterator[Finding]:
    if facts.huge_pages == "never":
        yield note(
            "huge pages",
            "Transparent huge pages are off: on the CPU, passes take 10 to 15 % longer.",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    encoding = (facts.encoding or "utf-8").lower().replace("-", "").replace("_", "")
    if encoding not in ("utf8", "ascii", "ansix3.41968"):
        yield note(
            "locale",
            f"The locale's encoding is {facts.encoding}: texts from pipes and files are read as "
            "UTF-8 only with another locale.",
            "export LANG=C.UTF-8",
        )
