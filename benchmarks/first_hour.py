"""The first hour: commands and minutes from empty machines to a first answer.

    sudo python benchmarks/first_hour.py [--only demo,up,two] [--bind PATH …]

Each way begins on machines that are booted from a fresh minimal Debian or Ubuntu of this machine's
release with Python, venv, make, git and curl, and nothing of Pilotfish. The commands are typed as
the documents say; the last step, a question, is the curl line that a command printed. The way `two`
has two machines, which are two systems with one network, this machine's; it installs the wheel of
this checkout. The machines download packages and the default model from where this machine's pip
does: pip's configuration is passed on, and ``--bind`` makes folders of this machine (wheels,
certificates) readable there. Needs root, debootstrap and systemd-nspawn.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from _common import Goal, Rows, at_most, conclude, options

from pilotfish.base.errors import PilotfishError

ROOT = Path(__file__).parents[1]
TOOLS = ("python3-venv", "make", "git", "curl", "ca-certificates")
REPOSITORY = "/srv/pilotfish"
INSTALLED = "v/bin/pip install -q './{wheel}[cpu,export,serve]'"
WAYS = ("demo", "up", "two")
PATIENCE_S = 1200.0
COLUMNS = ("way", "commands", "install", "until ready", "first answer")


@dataclass
class Way:
    """What was typed in one way, and when what was reached (s since the first command)."""

    name: str
    commands: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    _begun_s: float | None = None

    def type(self, machine: str, command: str) -> None:
        """Note a command that the user types."""
        if self._begun_s is None:
            self._begun_s = time.monotonic()
        self.commands.append(f"{machine}: {command}")
        print(f"  {machine}$ {command}", file=sys.stderr, flush=True)

    def reach(self, what: str) -> None:
        """Note that something is reached now."""
        assert self._begun_s is not None
        self.seconds[what] = time.monotonic() - self._begun_s

    def row(self) -> dict[str, object]:
        """Return the row of the table; times are minutes since the first command."""
        minutes = {what: round(s / 60, 2) for what, s in self.seconds.items()}
        return {"way": self.name, "commands": len(self.commands), **minutes, "typed": self.commands}


class Output:
    """What a command prints while it runs."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.text = process, ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def until(self, pattern: str) -> str:
        """Wait for the pattern; return its first group, or all of the match.

        The output may end anywhere, so a pattern that may match more goes on to what follows it.
        """
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            ended = not self._reader.is_alive()
            if match := re.search(pattern, self.text, re.MULTILINE):
                return match[1] if match.re.groups else match[0]
            if ended:
                break
            time.sleep(0.05)
        raise PilotfishError(f"{pattern!r} was not printed:\n{self.text[-3000:]}")

    def end(self) -> str:
        """Wait for the command's end; return what it printed."""
        if self.process.wait(PATIENCE_S) != 0:
            raise PilotfishError(f"A command failed:\n{self.text[-3000:]}")
        self._reader.join(PATIENCE_S)
        return self.text

    def _read(self) -> None:
        assert self.process.stdout is not None
        while letters := self.process.stdout.read(1):
            self.text += letters


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--only", default=",".join(WAYS), help="ways (default: %(default)s)")
    parser.add_argument("--bind", type=Path, action="append", default=[], metavar="PATH")
    parser.add_argument("--cache", type=Path, help="folder that keeps the fresh system")
    args = parser.parse_args()
    ways = {"demo": _demo, "up": _up, "two": _two}
    wanted = args.only.split(",")
    if unknown := [name for name in wanted if name not in ways]:
        parser.error(f"--only: there is no way {', '.join(unknown)}; ways: {', '.join(ways)}")
    rows: Rows = []
    with tempfile.TemporaryDirectory(prefix="pilotfish-hour-", dir="/var/tmp") as name:
        machines = Machines(Path(name), args.cache or Path(name), args.bind)
        for each in wanted:
            with ExitStack() as stack:
                rows.append(ways[each](machines, stack).row())
    goals: list[Goal] = [
        at_most("two machines: commands", float(row["commands"]), 6)
        for row in rows
        if row["way"] == "two"
    ]
    title = "from empty machines, minutes since the first command"
    return conclude(args, title, COLUMNS, rows, goals)


class Machines:
    """Makes empty machines, and the wheel of this checkout."""

    def __init__(self, folder: Path, cache: Path, bound: Sequence[Path]) -> None:
        from tests.deploy.booted import rootfs

        rootfs.tools()
        self._folder, self._bound = folder, bound
        self._archive = rootfs.archive(cache, (*rootfs.INCLUDED, *TOOLS))
        self._count = 0
        passed = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        self.environment = {"HOME": "/root", "PATH": path, "TERM": "dumb", "LANG": "C.UTF-8"}
        self.environment |= passed

    def machine(self, stack: ExitStack) -> "Shell":
        """Boot an empty machine, which ``stack`` switches off."""
        from tests.deploy.booted import rootfs
        from tests.deploy.booted.machine import Machine

        self._count += 1
        root = self._folder / f"machine-{self._count}" / "root"
        rootfs.unpack(self._archive, root)
        machine = Machine(root, shares_network=True, bound=self._bound)
        machine.boot()
        stack.callback(machine.cut_power)
        return Shell(
            lambda command: Output(
                machine.start("bash", "-c", f"cd; {command}", environment=self.environment)
            ),
            root,
        )

    def place_repository(self, machine: "Shell") -> None:
        """Put the commits of this checkout where the machine can clone them."""
        subprocess.run(
            ["git", "clone", "-q", "--bare", str(ROOT), str(machine.root / REPOSITORY[1:])],
            check=True,
        )

    @cached_property
    def wheel(self) -> Path:
        """The wheel of this checkout, which is built when it is first asked for."""
        made = self._folder / "dist"
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", made, ROOT]
        subprocess.run([*map(str, command)], check=True)
        return next(made.glob("pilotfish-*.whl"))


@dataclass(frozen=True)
class Shell:
    """A machine at which one types; run: starts a command. root: its file system."""

    run: Callable[[str], Output]
    root: Path


def _ask(way: Way, machine: Shell, curl: str) -> None:
    """Paste the curl line that a command printed, until the first answer is there."""
    reply = machine.run(curl).end()
    if '"content"' not in reply:
        raise PilotfishError(f"{curl} gave no answer: {reply}")
    way.reach("first answer")


def _demo(machines: Machines, stack: ExitStack) -> Way:
    """Clone and `make demo`."""
    machine, way = machines.machine(stack), Way("demo")
    machines.place_repository(machine)
    way.type("A", f"git clone {REPOSITORY}")
    machine.run(f"git -c safe.directory='*' clone -q {REPOSITORY}").end()
    way.type("A", "make -C pilotfish demo")
    demo = machine.run("make -C pilotfish demo")
    demo.until(r"edge process \d+")
    way.reach("install")
    demo.until(r"greedy, temperature 0 ─+\n.*\S \S.*\n")  # a whole line of the answer
    way.reach("first answer")
    demo.end()
    way.reach("until ready")
    return way


def _up(machines: Machines, stack: ExitStack) -> Way:
    """Install the wheel, then `up` and the curl line that it prints."""
    machine, way = machines.machine(stack), Way("up")
    _ = machines.wheel  # its build is no time of the user
    _install(machines, way, "A", machine)
    way.reach("install")
    way.type("A", "v/bin/pilotfish up")
    up = machine.run("exec v/bin/pilotfish up")
    curl = _curl(up)
    way.reach("until ready")
    _ask(way, machine, curl)
    _stop(up)
    return way


def _two(machines: Machines, stack: ExitStack) -> Way:
    """Install the wheel on both machines; `edge up` on one, its line on the other."""
    edge, device, way = machines.machine(stack), machines.machine(stack), Way("two")
    _ = machines.wheel  # its build is no time of the user
    _install(machines, way, "edge", edge)
    _install(machines, way, "device", device)
    way.reach("install")
    way.type("edge", "v/bin/pilotfish edge up")
    edge_up = edge.run("exec v/bin/pilotfish edge up")
    line = edge_up.until(r"pilotfish (device up \S+)\s")
    way.type("device", f"v/bin/pilotfish {line[:40]}…")
    device_up = device.run(f"exec v/bin/pilotfish {line}")
    curl = _curl(device_up)
    way.reach("until ready")
    _ask(way, device, curl)
    _stop(device_up)
    _stop(edge_up)
    return way


def _install(machines: Machines, way: Way, name: str, machine: Shell) -> None:
    wheel = machines.wheel
    (machine.root / "root" / wheel.name).write_bytes(wheel.read_bytes())
    for command in ("python3 -m venv v", INSTALLED.format(wheel=wheel.name)):
        way.type(name, command)
        machine.run(command).end()


def _curl(output: Output) -> str:
    """Return the curl line that a command printed, with the lines that continue it."""
    return output.until(r"^ *(curl (?:.*\\\n)*.*[^\\\n])\n")


def _stop(output: Output) -> None:
    output.process.terminate()
    with suppress(subprocess.TimeoutExpired):
        output.process.wait(30)


if __name__ == "__main__":
    sys.exit(main())
