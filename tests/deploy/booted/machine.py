"""A system that is really booted: systemd as PID 1, in systemd-nspawn, on a network of its own.

The network has a loopback and nothing else, so ports are the machine's alone. What a test does "on
the machine's network" runs in this process, in a thread that has stepped into that network. A
machine may share this machine's network instead, to install what has to be downloaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

_CLONE_NEWNET = 0x40000000
_POWER_OFF = signal.SIGRTMIN + 4  # what systemd as PID 1 takes for an orderly shutdown
T = TypeVar("T")


class Machine:
    """The system in the folder ``root``; off at first.

    shares_network: it is on this machine's network, with this machine's resolver. bound: paths of
    this machine that can be read there, too.
    """

    def __init__(
        self, root: Path, *, shares_network: bool = False, bound: Sequence[Path] = ()
    ) -> None:
        self.root = root
        self._options = [f"--bind-ro={path}" for path in bound]
        self._options += ["--resolv-conf=copy-host"] if shares_network else ["--private-network"]
        self.console = root.parent / f"{root.name}.console"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0
        self._groups: list[Path] = []

    def boot(self, timeout_s: float = 60.0) -> None:
        """Switch on; returns when all that is started at boot has been."""
        self._groups = _own_groups()
        joining = "".join(f"echo 0 >{group}/cgroup.procs; " for group in self._groups)
        command = ["sh", "-c", f'{joining}exec "$@"', "sh",
                   "systemd-nspawn", "-D", str(self.root), "--register=no", "--keep-unit", "--boot",
                   *self._options, "--console=read-only", "--machine=booted"]  # fmt: skip
        with self.console.open("ab") as console:
            self._nspawn = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=console
            )
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and self._nspawn.poll() is None:
            self._leader = child(self._nspawn.pid)
            if self._leader and self._up():
                return
            time.sleep(0.05)
        output = self.console.read_text(errors="replace")[-3000:]
        self.cut_power()
        raise AssertionError(f"the system did not come up:\n{output}")

    @property
    def running(self) -> bool:
        """Whether it is switched on."""
        return self._nspawn is not None and self._nspawn.poll() is None

    def shut_down(self, timeout_s: float = 90.0) -> None:
        """Switch off in order."""
        if self._nspawn is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._leader, _POWER_OFF)
            try:
                self._nspawn.wait(timeout_s)
            finally:
                self.cut_power()

    def cut_power(self) -> None:
        """Off, at once."""
        if self._nspawn is not None:
            if self._nspawn.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._leader or self._nspawn.pid, signal.SIGKILL)
                try:
                    self._nspawn.wait(5)
                except subprocess.TimeoutExpired:
                    self._nspawn.kill()
                    self._nspawn.wait()
            self._nspawn, self._leader = None, 0
            for group in self._groups:
                _remove(group)

    def reboot(self) -> None:
        """As `systemctl reboot` does it."""
        assert self._nspawn is not None
        self.run("systemctl", "reboot", "--no-block")
        self._nspawn.wait(90)
        self.cut_power()
        self.boot()

    def run(self, *command: object, check: bool = True, timeout_s: float = 120.0) -> str:
        """Run a command inside; its output. Fails with all that it said."""
        done = subprocess.run(
            [*self._inside("-m", "-u", "-i", "-p", "-n"), *map(str, command)],
            capture_output=True, text=True, check=False, timeout=timeout_s,
        )  # fmt: skip
        output = done.stdout + done.stderr
        if check:
            assert done.returncode == 0, f"{command} ended with {done.returncode}: {output}"
        return output.strip()

    def start(self, *command: object, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command inside; its output and errors are one pipe."""
        variables = [f"{name}={value}" for name, value in environment.items()]
        return subprocess.Popen(
            [*self._inside("-m", "-u", "-i", "-p", "-n"), "env", "-i", *variables,
             *map(str, command)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def stand_in_for_ssh(self, folder: Path) -> None:
        """Make an ``ssh`` in ``folder`` that runs commands here, as root, wherever it leads."""
        inside = " ".join(self._inside("-m", "-u", "-i", "-p", "-n"))
        path = "/usr/sbin:/usr/bin:/sbin:/bin"
        login = f'{inside} env -i PATH={path} HOME=/root sh -c \'cd && eval "$1"\' sh "$word"'
        script = folder / "ssh"
        script.write_text(f"#!/bin/sh\nfor word; do :; done\nexec {login}\n")
        script.chmod(0o755)

    def show(self, unit: str, what: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", "-p", what, unit)

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> float:
        """Wait for ``condition``; seconds that it took. Fails with the journal's end."""
        began_s = time.monotonic()
        while time.monotonic() < began_s + timeout_s:
            if condition():
                return time.monotonic() - began_s
            time.sleep(0.05)
        raise AssertionError(f"not within {timeout_s} s: {what}\n{self.journal()}")

    def until_active(self, unit: str, timeout_s: float = 60.0) -> float:
        """Wait until a unit is running."""
        return self.until(
            lambda: self.show(unit, "SubState") in ("running", "exited", "listening"),
            f"{unit} is running", timeout_s,
        )  # fmt: skip

    def journal(self, unit: str | None = None, lines: int = 60) -> str:
        """The end of the log."""
        of = ["-u", unit] if unit else []
        return self.run("journalctl", "--no-pager", "-o", "cat", "-n", lines, *of, check=False)

    def on_network(self, work: Callable[[], T]) -> T:
        """The result of ``work``, done in a thread that is on the machine's network."""
        with self.thread() as thread:
            return thread.submit(work).result()

    def thread(self) -> ThreadPoolExecutor:
        """A thread that is on the machine's network."""
        return ThreadPoolExecutor(1, initializer=self._step_in)

    def _step_in(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{self._leader}/ns/net", "rb") as network:
            if libc.setns(network.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def _inside(self, *namespaces: str) -> list[str]:
        assert self._leader, "the machine is off"
        return ["nsenter", "-t", str(self._leader), *namespaces]

    def _up(self) -> bool:
        state = self.run("systemctl", "is-system-running", "--wait", check=False)
        return state in ("running", "degraded")


def _own_groups() -> list[Path]:
    """Control groups for one machine, so that two of them do not take each other's services.

    They have one name, since nspawn mirrors the unified hierarchy in the old one.
    """
    made = []
    name = f"pilotfish-{os.getpid()}-{time.monotonic_ns()}"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mounts = [Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")]
        elif controllers == "name=systemd":
            mounts = [Path("/sys/fs/cgroup/systemd")]
        else:
            continue
        for mount in mounts:
            parent = mount / path.lstrip("/")
            if (parent / "cgroup.procs").exists():
                made.append(parent / name)
                made[-1].mkdir()
                break
    return made


def _remove(group: Path, timeout_s: float = 10.0) -> None:
    """Wait until all in a group is gone; what is left then is left."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        for folder in sorted([group, *group.rglob("*")], reverse=True):
            if folder.is_dir():
                with contextlib.suppress(OSError):
                    folder.rmdir()
        if not group.exists():
            return
        time.sleep(0.02)


def child(pid: int) -> int:
    """The first child of a process; 0 if it has none."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return 0
    return int(text.split()[0]) if text.split() else 0
