"""Emulation leaves nothing on this machine, not even when its user is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.deploy.arm64 import emulated
from tests.deploy.arm64.emulated import Emulation
from tests.deploy.booted.rootfs import Impossible

# Mounts something in a folder's namespaces, names its first process, and never ends.
USE = """
import subprocess, sys, time
from pathlib import Path
from tests.deploy.arm64.emulated import Emulation
emulation = Emulation()
emulation.begin()
root = Path(sys.argv[1])
for name in ("proc", "run", "sys", "dev/shm"):
    (root / name).mkdir(parents=True)
(root / "proc/cpuinfo").touch()
emulation.prepare(root)
subprocess.Popen([*emulation.words(Path("/")), "tail", "-f", "/dev/null", sys.argv[1]])
print("busy", flush=True)
time.sleep(600)
"""


@pytest.fixture
def usable() -> None:
    """Skip where there are no such namespaces."""
    emulation = Emulation()
    try:
        emulation.begin()
    except Impossible as reason:
        pytest.skip(str(reason))
    finally:
        emulation.end()


@pytest.mark.usefixtures("usable")
def test_killed_user_leaves_no_process_no_mount_and_no_registration(tmp_path: Path) -> None:
    command = [sys.executable, "-c", USE, str(tmp_path / "root")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        assert _users(tmp_path)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30.0
    while left := _users(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert [path.name for path in (tmp_path / "root/proc").iterdir()] == ["cpuinfo"]


def _users(folder: Path) -> list[str]:
    """Processes that name the folder, but for this one."""
    users = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:  # it has ended
            continue
        if os.fsencode(folder) in words and path.parent.name != str(os.getpid()):
            users.append(path.parent.name)
    return users


@pytest.mark.skipif(emulated.NATIVE, reason="arm64 needs no QEMU here")
def test_without_qemu_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(emulated, "_REGISTERED", tmp_path / "absent")
    monkeypatch.setattr(emulated, "_QEMU", "no-such-qemu")
    with pytest.raises(Impossible, match=r"missing: install the package qemu-user-static$"):
        Emulation().begin()


@pytest.mark.skipif(emulated.NATIVE, reason="arm64 needs no QEMU here")
def test_registration_of_the_machine_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registered = tmp_path / "qemu-aarch64"
    registered.write_text("enabled\ninterpreter /usr/bin/qemu-aarch64\nflags: POCF\noffset 0\n")
    monkeypatch.setattr(emulated, "_REGISTERED", registered)
    monkeypatch.setattr(emulated, "_QEMU", "no-such-qemu")
    assert emulated._rule() == ""
    registered.write_text(registered.read_text().replace("POCF", "P"))  # QEMU is not in the root
    with pytest.raises(Impossible):
        emulated._rule()
