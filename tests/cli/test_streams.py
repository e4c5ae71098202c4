"""Standard streams that are closed, that nobody reads, or whose encoding lacks characters."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pilotfish.cli.options import write_json
from tests.conftest import Pair
from tests.support.commands import command

NARROW = (
    {"PYTHONIOENCODING": "latin-1"},
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
)
NOBODY = 69  # no edge answers


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which P is our command."""
    defined = f'P() {{ {shlex.join(command())} "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", defined],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        errors="replace",
    )


@pytest.mark.parametrize("narrow", NARROW, ids=lambda narrow: "-".join(narrow.values()))
@pytest.mark.parametrize("requests", ["--help", "edge serve --help", "export list --supported"])
def test_help_in_a_narrow_encoding(narrow: dict[str, str], requests: str) -> None:
    done = shell(f"P {requests}", **narrow)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_an_answer_in_a_narrow_encoding_from_a_path_that_is_none(
    pair: Pair, tmp_path: Path
) -> None:
    """The folder's name is UTF-8, and this locale has ASCII alone."""
    folder = tmp_path / "dépôt 模型"
    folder.symlink_to(pair.draft)
    wanted = f"P device run --draft '{folder}' --protocol local --max-tokens 8 --seed 1 hi"
    done = shell(wanted, **NARROW[2])
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("P --version >&-", 0),
        ("P --version | true; exit ${PIPESTATUS[0]}", 0),
        ("P --help | true; exit ${PIPESTATUS[0]}", 0),
        ("P export list --supported | true; exit ${PIPESTATUS[0]}", 0),
        ("P probe tcp://127.0.0.1:1 2>&-", NOBODY),
        ("P probe tcp://127.0.0.1:1 2>&1 | true; exit ${PIPESTATUS[0]}", NOBODY),
        ("P --version <&-", 0),
        ("P --version <&- >&- 2>&-", 0),
    ],
)
def test_streams_that_are_closed_or_unread(line: str, code: int) -> None:
    done = shell(line)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_no_file_takes_the_number_of_a_closed_stream() -> None:
    script = (
        "import os; from pilotfish.cli.streams import repair; repair();"
        "opened = os.open(os.devnull, os.O_RDONLY); os.write(2, str(opened).encode())"
    )
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -c '{script}' <&- >&-"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert int(done.stderr) > 2


@pytest.mark.parametrize("requests", ["", "keys", "edge", "field"])
def test_without_an_action_a_command_shows_its_help(requests: str) -> None:
    done = shell(f"P {requests}")
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("usage: pilotfish")
    assert requests or "first steps" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_with_the_name_of_the_file() -> None:
    with pytest.raises(OSError, match="/dev/full"):
        write_json("/dev/full", {"figure": 1})
    done = shell("P keys list --keys /nonexistent --json > /dev/full")
    assert done.returncode == 74
    assert "No space left on device" in done.stderr
