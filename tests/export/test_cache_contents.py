"""Removals from the cache, beside commands that begin to use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pilotfish.export.cache_contents import remove_leftovers

# Removes the entry of this name; says for each manifest whether a command could begin to use it.
REMOVAL = """
import fcntl, sys
from pathlib import Path
from pilotfish.export.cache_contents import list_contents, remove

def tell(event, words):
    if event == "os.rename":
        for manifest in sorted(Path(words[0]).rglob("manifest.json")):
            with manifest.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    print(manifest.parent.name, "free")
                except BlockingIOError:
                    print(manifest.parent.name, "locked")

sys.addaudithook(tell)
(entry,) = (each for each in list_contents() if each.name == sys.argv[1])
assert remove(entry)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


def test_no_command_begins_to_use_what_is_being_removed(tmp_path: Path, cache: Path) -> None:
    for name in ("stage-1", "stage-2"):
        folder = cache / "stages" / "0123-2" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    whole = cache / "artifacts" / "whole"
    whole.mkdir(parents=True)
    (whole / "manifest.json").write_text("{}")
    for name, lines in (("whole", ["whole"]), ("0123-2", ["stage-1", "stage-2"])):
        done = subprocess.run(
            [sys.executable, "-c", REMOVAL, name], capture_output=True, text=True, check=False
        )
        assert done.stdout.splitlines() == [f"{line} locked" for line in lines], done.stderr
    assert not list(cache.glob("*/*"))


def test_the_next_removal_removes_what_a_killed_one_left(cache: Path, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    container = os.getpid()  # in a container, each command may have the same number
    folders = [cache / kind for kind in ("artifacts", "stages", "engines")]
    for folder in (*folders, tmp_path / "hub"):
        for number in (ended.pid, container):
            (folder / f".gone.removed-{number}" / "part").mkdir(parents=True)
    going = cache / "stages" / f".going.removed-{os.getppid()}"
    going.mkdir()
    remove_leftovers()
    assert [*cache.glob("*/.*"), *tmp_path.glob("hub/.*")] == [going]
