"""README's blocks run as they stand, in a fresh clone; LINE is the line that the edge printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 400.0
CURL = r"(?m)^ *(curl (?:.*\\\n)*.*)$"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def blocks(kind: str) -> list[str]:
    """The README's blocks of a language."""
    text = (ROOT / "README.md").read_text("utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of what is committed, in which the first command has run."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    folder = tmp_path_factory.mktemp("readme") / "pilotfish"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True, timeout=60)
    first, _ = blocks("sh")[0].splitlines()
    done = run(folder, first)
    if "No matching distribution" in done or "Temporary failure" in done:
        pytest.skip("no packages can be installed here")
    assert re.search(r"^next: \S*pilotfish up ", done, re.MULTILINE), done[-3000:]
    return folder


def environment(clone: Path) -> dict[str, str]:
    """That of a user of this clone, who has a home of its own."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VENV", "VIRTUAL_ENV", "PILOTFISH_KEYS")
    }
    path = f"{clone}/.venv/bin:{variables['PATH']}"
    return variables | {"PATH": path, "XDG_CONFIG_HOME": str(clone.parent / "config")}


def run(clone: Path, command: str) -> str:
    """Run a line in the clone; return what it printed."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=clone, env=environment(clone), text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_S,
    )  # fmt: skip
    return done.stdout


class Typed:
    """A command that runs until it is interrupted, and what it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.text = process, ""
        threading.Thread(target=self._read, daemon=True).start()

    def until(self, pattern: str) -> str:
        """Wait for a match; return its first group."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            running = self.process.poll() is None
            if match := re.search(pattern, self.text):
                return match[1]
            assert running, self.text
            time.sleep(0.05)
        raise AssertionError(f"{pattern} was not printed:\n{self.text}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line


@contextmanager
def typed(clone: Path, command: str) -> Iterator[Typed]:
    """Run a line that goes on until Ctrl-C."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=clone, env=environment(clone), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield Typed(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_two_commands_to_a_chat(clone: Path) -> None:
    _, second = blocks("sh")[0].splitlines()
    with typed(clone, second) as up:
        assert '"content"' in run(clone, up.until(CURL))
        assert "<html" in run(clone, f"curl -s {up.until('chat page +(.*)')}")


def test_two_machines(clone: Path) -> None:
    edge, device = (line.partition(" #")[0] for line in blocks("sh")[1].splitlines())
    with typed(clone, edge) as edge_up:
        line = edge_up.until(r"(pf1_\S+)")
        assert "LINE" in device
        with typed(clone, device.replace("LINE", line)) as device_up:
            assert '"content"' in run(clone, device_up.until(CURL))


def test_the_program(clone: Path) -> None:
    (program,) = blocks("python")
    folder = clone.parent / "program"
    folder.mkdir()
    (folder / "fish.py").write_text(program)
    printed = run(clone, f"cd {folder} && {clone}/.venv/bin/python fish.py")
    assert '"fish"' in printed, printed
    assert "Traceback" not in printed
