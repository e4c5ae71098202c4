"""Other releases of Pilotfish: wheels of earlier commits, unpacked, and processes that run them.

A process of a release has the release's folder in PYTHONPATH, and so imports that `pilotfish`, with
the libraries of this environment.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.commands import await_end

ROOT = Path(__file__).parents[2]
START_S = 90.0
END_S = 60.0  # for an answer or an error; after that a process hangs
ADVICE = re.compile(r"install the same Pilotfish release|upgrade|update the (device|edge|node)")


class Release(NamedTuple):
    """A release: its name in test ids, and the folder that has its `pilotfish`."""

    name: str
    folder: Path

    def environment(self) -> dict[str, str]:
        """Return the environment of its processes."""
        return {**os.environ, "PYTHONPATH": str(self.folder), "NO_COLOR": "1"}

    def run(self, *words: object, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run Python with this release; a process that hangs fails the test."""
        try:
            return subprocess.run(
                [sys.executable, *map(str, words)],
                cwd=folder,
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=END_S,
                check=False,
            )
        except subprocess.TimeoutExpired as hanging:
            pytest.fail(f"{self.name} hangs: {words}: {hanging.stderr!r}")


def checkout_of(commit: str, folder: Path) -> Path:
    """Write a commit's files to a folder; skips the test if the history lacks the commit."""
    folder.mkdir()
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", commit], capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"the history here lacks commit {commit}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def unpacked_wheel(checkout: Path, folder: Path) -> Path:
    """Build a checkout's wheel and unpack it. Building fetches setuptools, as pip does."""
    build = [
        sys.executable,
        "-m",
        "uv",
        "build",
        "--wheel",
        "--out-dir",
        folder / "wheel",
        checkout,
    ]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no wheel can be built here: {done.stderr.strip().splitlines()[-1]}")
    [wheel] = (folder / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


class Daemon:
    """A running daemon of a release, with its log."""

    def __init__(self, release: Release, folder: Path, *words: object) -> None:
        self.name = release.name
        self._path = folder / f"{release.name}-{time.monotonic_ns()}.log"
        with self._path.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pilotfish", *map(str, words)],
                cwd=folder,
                env=release.environment(),
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        """What the daemon has logged until now."""
        return self._path.read_text()

    def await_log(self, *patterns: str | re.Pattern[str]) -> re.Match[str]:
        """Wait for the first of these patterns in the log; a traceback fails the test."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            ended = self._process.poll() is not None
            log = self.log
            assert "Traceback" not in log, log
            for pattern in patterns:
                if match := re.search(pattern, log):
                    return match
            assert not ended, f"{self.name} has ended:\n{log}"
            time.sleep(0.05)
        raise AssertionError(f"{self.name} logged none of {patterns}:\n{self.log}")

    def address(self) -> str:
        """Wait for the address on which it serves."""
        return self.await_log(r"serves on (\S+)\s")[1]

    def _children(self) -> list[int]:
        """List the processes that its threads have started."""
        tasks = Path(f"/proc/{self._process.pid}/task")
        lists = [path.read_text() for path in tasks.glob("*/children")]
        return [int(pid) for words in lists for pid in words.split()]

    def end(self) -> None:
        """Stop it; asserts that it and its children stop in time, without a traceback."""
        below = []
        if self._process.poll() is None:
            below = self._children()
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        finally:
            self._process.kill()
            self._process.wait()
        for pid in below:
            await_end(pid)
        assert "Traceback" not in self.log, self.log


@contextmanager
def daemon(release: Release, folder: Path, *words: object) -> Iterator[Daemon]:
    """Run a daemon of a release."""
    running = Daemon(release, folder, *words)
    try:
        yield running
    finally:
        running.end()
