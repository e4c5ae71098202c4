"""Flashing another version: cut in the middle, the machine boots and serves; so do new and old."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from pilotfish.deploy import manifest
from tests.deploy.booted.asking import complete
from tests.deploy.booted.conftest import DEVICE, Prepared, command, pilotfish, signed
from tests.deploy.booted.machine import Machine
from tests.support.bundles import seal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MARK = "# the unit of another version\n"


@pytest.fixture
def newer(prepared: Prepared, tmp_path: Path) -> Path:
    """A bundle that differs from the installed one in its unit."""
    bundle = tmp_path / "newer"
    shutil.copytree(prepared.bundle, bundle)
    unit = bundle / "systemd" / DEVICE
    unit.write_text(unit.read_text() + MARK)
    return seal(bundle)


def test_machine_boots_whatever_cut_the_flash(machine: Machine, newer: Path) -> None:
    current = machine.root / "opt/pilotfish/current"
    old, new = os.readlink(current), f"versions/{manifest.read(newer).name}"
    text = complete(machine, tokens=50)

    for moment, then in (("unpacking", old), ("is current", new)):
        machine.shut_down()
        _flash_until(machine.root, newer, moment)
        assert os.readlink(current) == then
        _boots(machine, text)

    machine.shut_down()
    pilotfish("flash", *signed(), "--rootfs", machine.root, newer)
    pilotfish("flash", "--rootfs", machine.root, "--check")
    _boots(machine, text)
    assert MARK in machine.run("systemctl", "cat", DEVICE)

    machine.shut_down()
    pilotfish("flash", "--rootfs", machine.root, "--rollback")
    assert os.readlink(current) == old
    _boots(machine, text)
    assert MARK not in machine.run("systemctl", "cat", DEVICE)


def _boots(machine: Machine, text: str) -> None:
    machine.boot()
    machine.until_active(DEVICE)
    assert complete(machine, tokens=50) == text


def _flash_until(root: Path, bundle: Path, moment: str) -> None:
    """Flash, and cut the power when it says ``moment``."""
    words = command("flash", *signed(), "--rootfs", root, bundle)
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as flashing:
        assert flashing.stderr is not None
        for line in flashing.stderr:
            if moment in line:
                flashing.send_signal(signal.SIGKILL)
                break
        else:
            raise AssertionError(f"it never said {moment!r}")
    assert flashing.returncode == -signal.SIGKILL
