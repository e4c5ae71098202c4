"""A rootfs that cannot be made leaves nothing behind, and is told with its cause."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.deploy.booted import rootfs

# Stands in for debootstrap, whose fourth argument is the folder.
BEGINS = """#!/bin/sh
echo "I: Retrieving InRelease"
mkdir -p "$4/proc" "$4/debootstrap" && mount -t proc proc "$4/proc" || exit 99
echo "dpkg: error: no space left on device" > "$4/debootstrap/debootstrap.log"
tail -f "$4/debootstrap/debootstrap.log" >/dev/null &
"""
FAILS = 'for i in $(seq 100); do echo "I: Extracting $i..."; done\necho "E: no disk" >&2; exit 3'
HANGS = 'tail -f "$4/debootstrap/debootstrap.log" >/dev/null'


def can_mount() -> bool:
    probe = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    if os.geteuid() != 0:
        return False
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(rootfs, "release", lambda: ("http://mirror.example", "suite"))
    return folder


@pytest.mark.skipif(not can_mount(), reason="to mount takes root")
@pytest.mark.parametrize(
    ("then", "text"),
    [
        (FAILS, r"^debootstrap failed \(3\): E: no disk; its log: dpkg: error: no space left"),
        (HANGS, r"^debootstrap was not done after 1 s; its log: dpkg"),
    ],
    ids=["fails", "hangs"],
)
def test_what_fails_leaves_no_mount_and_no_process(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, text: str
) -> None:
    (bin_folder / "debootstrap").write_text(BEGINS + then + "\n")
    (bin_folder / "debootstrap").chmod(0o755)
    monkeypatch.setattr(rootfs, "LIMIT_S", 1.0)
    for _ in range(2):  # and may be tried again
        with pytest.raises(rootfs.Impossible, match=text):
            rootfs.archive(tmp_path / "cache")
        assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
        assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
        mine = os.fsencode(tmp_path / "cache")
        deadline = time.monotonic() + 30.0
        while left := [
            path for path in Path("/proc").glob("[0-9]*/cmdline") if mine in _read(path)
        ]:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""
