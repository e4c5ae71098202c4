"""The readings of a machine: files below a root, and outputs of commands.

`this_machine` reads this machine; it needs no root and waits for no command longer than a limit.
`recorded_machine` reads a recording: a TOML file with files and outputs of a machine.

    address = "https://…"            where it was shown
    title = "…"
    [files]                          absolute path → text
    "/etc/nv_tegra_release" = "# R36 (release), REVISION: 4.3, …"
    [commands]                       command line → its output, or {output, status}
    "nvpmodel -q" = {output = "NV Power Mode: 15W\n0", status = 0}
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from weakref import finalize

import msgspec
from msgspec import Struct

from pilotfish.base.errors import ConfigError
from pilotfish.base.reading import read_text, reading_file
from pilotfish.lab.doctor.commands import Output, run_commands

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIMIT_S = 2.0
PROBE = "python3 -m pilotfish.lab.doctor.probe"  # the process that imports the runtimes
UNITS = tuple(
    f"pilotfish-{name}.service"
    for name in ("device", "edge", "engine-build", "power", "worker", "watch")
)
_UNIT_FACTS = "Id,LoadState,ActiveState,Result,ExecMainStatus,NRestarts"
_GPU_FACTS = "name,driver_version,memory.total,compute_cap,clocks_throttle_reasons.active"
_PACKAGES = (
    *("nvidia-jetpack", "nvidia-l4t-core", "python3-libnvinfer", "libnvinfer[0-9]*"),
    *("cuda-cudart-[0-9]*", "libcudnn[0-9]*"),
)
# What is run on this machine. A recording may have other commands: see `Machine.outputs`.
COMMANDS = (
    "nvidia-smi",
    f"nvidia-smi --query-gpu={_GPU_FACTS} --format=csv,noheader,nounits",
    "nvpmodel -q",
    f"dpkg-query -W {' '.join(_PACKAGES)}",
    "/usr/bin/python3 --version",
    "systemctl --version",
    f"systemctl show --property={_UNIT_FACTS} {' '.join(UNITS)}",
    "timedatectl show",
)
# Folders of tools that are often missing in PATH: of root's tools, and of WSL's driver.
_FOLDERS = ("/usr/sbin", "/sbin", "/usr/lib/wsl/lib", "/usr/local/sbin")
_DEVICE_TREE = "/sys/firmware/devicetree/base"  # to which /proc/device-tree links
_CAT = re.compile(r"(?:cat|tr -d '\\0' <) (/[\w./@,:+-]+)")
_MOST_LETTERS = 4000  # of a line; no program that is asked here writes longer ones
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ABSURD = re.compile(r"\d{16,}")  # no number of a machine has so many digits
# What people write before a command that they show.
_BEFORE = re.compile(r"^(?:[\w.@~:/-]*[$#] +)?(?:(?:sudo|time|env|[A-Z_]+=\S*) +)*")


class Machine:
    """The readings of one machine.

    root: the folder with the machine's files. process: facts that only a process on the machine
    can know, by name (`system_facts.process_facts`); None for a recording.
    """

    def __init__(
        self, root: Path, outputs: Mapping[str, Output], process: Mapping[str, Any] | None = None
    ) -> None:
        self.root, self.process = root, process
        self._outputs = {
            _plain(name): output if name == PROBE else Output(_readable(output.text), output.status)
            for name, output in outputs.items()
        }

    def outputs(self, pattern: str) -> Iterator[Output]:
        """Yield the outputs of the commands whose line begins with this pattern."""
        return (output for _, output in self.listed(pattern))

    def listed(self, pattern: str) -> Iterator[tuple[str, Output]]:
        """Yield the same, each with its command line."""
        compiled = re.compile(pattern)
        return ((name, each) for name, each in self._outputs.items() if compiled.match(name))

    def texts(self, pattern: str) -> str:
        """Return the texts of these commands, one after the other; "" if there are none."""
        return "\n".join(output.text for output in self.outputs(pattern))

    def find(self, pattern: str, command: str) -> str | None:
        """Search these commands' texts; return the first group of the first match."""
        match = re.search(pattern, self.texts(command), re.MULTILINE)
        return match[1].strip() if match else None

    def probed(self) -> dict[str, Any]:
        """Return the results of the probe by name (`doctor.probe`)."""
        results: dict[str, Any] = {}
        output = next(self.outputs(re.escape(PROBE)), None)
        for line in self.texts(re.escape(PROBE)).splitlines():
            if line.startswith("{"):
                try:
                    results |= json.loads(line)
                except ValueError:  # the line was cut off
                    continue
        if output is not None and output.status and (part := results.get("doing")):
            results[f"{part}_problem"] = "the process that tried it crashed"
        return results

    @property
    def unfinished(self) -> list[str]:
        """The commands that did not end in time."""
        names = [name for name, output in self._outputs.items() if output.status is None]
        doing = self.probed().get("doing", "its start")
        return [f"{name} ({doing})" if name == PROBE else name for name in names]


def this_machine(limit_s: float = LIMIT_S) -> Machine:
    """Read this machine. limit_s: time limit of all commands, which run at once."""
    from pilotfish.lab.doctor.system_facts import process_facts

    commands = {}
    for line in COMMANDS:
        program, *words = line.split()
        path = shutil.which(program) or shutil.which(program, path=":".join(_FOLDERS))
        if path is not None:
            commands[line] = [path, *words]
    commands[PROBE] = [sys.executable, "-m", "pilotfish.lab.doctor.probe"]
    return Machine(Path("/"), run_commands(commands, limit_s), process_facts())


class RecordedOutput(Struct, frozen=True):
    """The output of a recorded command; status "timeout": it did not end."""

    output: str = ""
    status: int | Literal["timeout"] = 0


class Recording(Struct, frozen=True):
    """The content of a recording's file."""

    address: str = ""
    title: str = ""
    files: dict[str, str] = {}
    commands: dict[str, str | RecordedOutput] = {}


def recorded_machine(path: Path) -> Machine:
    """Read a recording; raise `ConfigError` if it cannot be used.

    The recorded files are written below a temporary folder, which is removed with the machine.
    """
    with reading_file(lambda problem: ConfigError(f"{path} is no recorded machine: {problem}.")):
        recording = msgspec.convert(tomllib.loads(read_text(path)), Recording)
    root = Path(tempfile.mkdtemp(prefix="pilotfish-doctor-"))
    outputs = {name: _output(each) for name, each in recording.commands.items()}
    machine = Machine(root, outputs)
    finalize(machine, shutil.rmtree, root, ignore_errors=True)
    files = {
        match[1]: output.text
        for name, output in machine._outputs.items()
        if (match := _CAT.fullmatch(name)) and output.status == 0
    } | recording.files
    for name, text in files.items():
        try:
            _write(root, name, _readable(text))
        except (OSError, ValueError) as error:  # no name of a file, or a folder's
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{path} is no recorded machine: its file {name[:80]!r} cannot be used: {reason}."
            ) from error
    return machine


def _write(root: Path, name: str, text: str) -> None:
    name = os.path.normpath("/" + name).replace(_DEVICE_TREE, "/proc/device-tree")
    path = root / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _output(value: str | RecordedOutput) -> Output:
    if isinstance(value, str):
        return Output(value)
    return Output(value.output, None if value.status == "timeout" else value.status)


def _plain(line: str) -> str:
    """Return a command line without what differs between people who show it."""
    return " ".join(_BEFORE.sub("", line.strip()).split())


def _readable(text: str) -> str:
    """Return a text without colours and absurd numbers, and with lines of limited length."""
    text = _ABSURD.sub("", _COLOURS.sub("", text))
    return "\n".join(line[:_MOST_LETTERS] for line in text.split("\n"))
