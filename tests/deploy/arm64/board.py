"""A root file system of arm64 and the programs that run in it, as on a machine of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.deploy.arm64.emulated import Emulation
from tests.deploy.booted.machine import child

START_S = 120.0
RUN_S = 300.0


class Board:
    """The system in the folder ``root``, in which no systemd runs.

    log: the output of the program that `serving` runs.
    """

    def __init__(self, root: Path, emulation: Emulation) -> None:
        self.root = root
        self.log = root.parent / "log"
        self._emulation = emulation
        emulation.prepare(root)

    def run(self, *command: object, check: bool = True) -> str:
        """Run a command as root; its output. Fails with all that it said."""
        done = subprocess.run(
            self._emulation.words(self.root, *command),
            capture_output=True, text=True, check=False, timeout=RUN_S, stdin=subprocess.DEVNULL,
            errors="replace",
        )  # fmt: skip
        output = done.stdout + done.stderr
        if check:
            assert done.returncode == 0, f"{command} ended with {done.returncode}: {output}"
        return output.strip()

    def execute(self, text: str, site: str, *arguments: object) -> str:
        """Run a program of Python with the modules of a folder below the root; what it prints."""
        (self.root / "root/program.py").write_text(text)
        variables = (f"PYTHONPATH=/{site}", "PYTHONDONTWRITEBYTECODE=1")
        return self.run("env", *variables, "python3", "-s", "/root/program.py", *arguments)

    @contextmanager
    def serving(self, unit: str, announcement: str) -> Iterator[str]:
        """Run the program of a unit with the unit's user, credentials and environment.

        announcement: what it says before the address that is yielded.
        """
        lines = (self.root / "usr/lib/systemd/system" / unit).read_text().splitlines()
        settings = defaultdict[str, list[str]](list)
        for line in lines:
            name, _, value = line.partition("=")
            settings[name].append(value)
        (user,), (start,), (variables,) = (
            settings[name] for name in ("User", "ExecStart", "Environment")
        )
        folder = self._bring_credentials(user, settings["LoadCredential"])
        command = ("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups",
                   "env", f"CREDENTIALS_DIRECTORY={folder}", *variables.split(),
                   *start.split())  # fmt: skip
        with (
            self.log.open("w") as log,
            subprocess.Popen(
                self._emulation.words(self.root, *command),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            ) as process,
        ):  # fmt: skip
            try:
                yield self._announced(process, announcement)
            finally:
                if started := child(process.pid):  # by nsenter, which passes no signal on
                    os.kill(started, signal.SIGTERM)
                process.wait(60)

    def _bring_credentials(self, user: str, lines: Sequence[str]) -> str:
        """Copy what a unit loads as credentials, for this user alone; the folder's path there."""
        entries = [line.split(":") for line in (self.root / "etc/passwd").read_text().splitlines()]
        (owner,) = [int(entry[2]) for entry in entries if entry[0] == user]
        folder = self.root / "run/credentials"
        folder.mkdir(exist_ok=True)
        for name, source in (line.split(":") for line in lines):
            path = self.root / source.lstrip("/")
            (folder / name).write_bytes(path.read_bytes() if path.exists() else b"\n")
            (folder / name).chmod(0o400)
        for path in (folder, *folder.iterdir()):
            os.chown(path, owner, owner)
        return "/run/credentials"

    def _announced(self, process: subprocess.Popen[bytes], announcement: str) -> str:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and process.poll() is None:
            for line in self.log.read_text(errors="replace").splitlines(keepends=True):
                if announcement in line and line.endswith("\n"):
                    return line.rpartition(announcement)[2].split()[0]
            time.sleep(0.1)
        raise AssertionError(f"it did not serve:\n{self.log.read_text(errors='replace')}")
