"""The log on stderr: for people with the time, for systemd's journal with priorities."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pilotfish.cli.logs import prefixed

# What a process logs, in each way that there is.
_SAYS = """
import logging, sys, threading
from pilotfish.cli import logs
logs.set_up(verbose="-v" in sys.argv)
ours, theirs = logging.getLogger("pilotfish.edge"), logging.getLogger("library")
for log in (ours, theirs):
    log.debug("detail"); log.info("news"); log.warning("look out"); log.error("broken\\nin two")
logging.getLogger("pilotfish.answers").info("an answer")
try:
    raise ValueError("what was wrong")
except ValueError:
    ours.exception("failed")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(); thread.join()
raise KeyError("the end")
"""
_TIME = re.compile(r"\d\d:\d\d:\d\d")


def output_of(*flags: str, journal: bool) -> list[str]:
    """The lines of such a process, whose stderr is the journal's stream or another."""
    ours, theirs = socket.socketpair()
    status = os.fstat(theirs.fileno())
    named = f"{status.st_dev}:{status.st_ino if journal else status.st_ino + 1}"
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-c", _SAYS, *flags],
            env=os.environ | {"JOURNAL_STREAM": named},
            stderr=theirs,
            check=False,
            timeout=60,
        )
        assert done.returncode == 1
        return ours.recv(1 << 16).decode().splitlines()


def test_the_journal_gets_each_lines_priority_and_no_second_time() -> None:
    lines = output_of(journal=True)
    assert lines[:4] == [
        "<6>pilotfish.edge: news",
        "<4>pilotfish.edge: look out",
        "<3>pilotfish.edge: broken",
        "<3>in two",
    ]
    assert "<4>library: look out" in lines
    assert not [line for line in lines if "library: news" in line or "an answer" in line]
    assert "<3>ValueError: what was wrong" in lines  # of a traceback
    assert "<2>ZeroDivisionError: division by zero" in lines  # of a thread
    assert lines[-1] == "<2>KeyError: 'the end'"
    assert all(re.match("<[2-6]>", line) for line in lines)
    assert not any(_TIME.search(line) for line in lines)


def test_people_get_the_time_and_no_prefix() -> None:
    lines = output_of(journal=False)
    assert _TIME.search(lines[0])
    assert lines[0].endswith("WARNING pilotfish.edge: look out")
    assert not any("<" in line[:1] for line in lines)
    assert not any("news" in line for line in lines)
    verbose = output_of("-v", journal=False)
    for each in ("INFO pilotfish.edge: news", "INFO library: news", "an answer"):
        assert any(each in line for line in verbose), each


def test_verbose_in_the_journal_tells_of_each_answer() -> None:
    assert "<6>pilotfish.answers: an answer" in output_of("-v", journal=True)


@pytest.mark.parametrize("end", ["\n", "\0", "\r", "\r\n", "\x0b", "\x0c", "\x85", "\u2028"])
def test_foreign_text_cannot_choose_a_priority(end: str) -> None:
    """The journal ends a line at a NUL byte as well."""
    reply = prefixed(f"it said: <1>a{end}<0>the system is down{end}{end}<2>b", logging.WARNING)
    lines = re.split("[\n\0]", reply)
    assert len(lines) >= 3
    assert all(line.startswith("<4>") for line in lines)


def test_a_command_that_fails_is_an_error_in_the_journal(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    status = os.fstat(theirs.fileno())
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-m", "pilotfish", "edge", "serve", "--target", str(tmp_path)],
            env=os.environ | {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"},
            stderr=theirs,
            check=False,
            timeout=60,
        )
        assert done.returncode == 66
        [line] = ours.recv(1 << 16).decode().splitlines()
    assert line.startswith("<3>pilotfish: ")
