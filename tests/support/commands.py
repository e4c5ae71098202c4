"""Run the `pilotfish` command as a user does, and watch its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pilotfish.cli import main
from tests.conftest import Pair


def patience_s() -> float:
    """Return three seconds, or more on a machine with more runnable threads than cores."""
    return 3.0 * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "pilotfish", *map(str, arguments)]


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def complaint(process: subprocess.Popen[str], code: int, within_s: float) -> str:
    """Assert that a process ends in time with this code; returns its one line on stderr."""
    began = time.monotonic()
    try:
        _, stderr = process.communicate(timeout=within_s + 20)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"still running: {process.communicate()}")
    # As a shell shows it: Python may end by the very signal where that came while a string was
    # executed, as dataclasses do, although it was caught.
    display = 128 - process.returncode if process.returncode < 0 else process.returncode
    assert display == code, stderr
    assert "Traceback" not in stderr
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("pilotfish: ")
    assert time.monotonic() - began < within_s
    return lines[0]


def await_end(pid: int) -> None:
    deadline = time.monotonic() + patience_s()
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie has ended and only waits to be reaped


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def refusal(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """Run a command here, assert its time and exit code, and return its one line."""
    began = time.monotonic()
    assert main(list(map(str, arguments))) == code
    assert time.monotonic() - began < patience_s()
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("pilotfish: ")
    return line


def device_run(pair: Pair, address: str, *more: object) -> subprocess.Popen[str]:
    return start("device", "run", "abc", "--draft", pair.draft, "--edge", address, *more)


def orphan(target: Path, more: str = "") -> int:
    """Run an `EdgeServer` in a process, and kill the process; return the server's pid.

    more: further arguments of `EdgeServer`, in Python.
    """
    script = (
        "import sys, time; from pilotfish import EdgeServer\n"
        f"with EdgeServer({str(target)!r}{more}) as server:\n"
        "    print(server.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert alive(pid)
    process.kill()
    process.communicate()
    return pid
