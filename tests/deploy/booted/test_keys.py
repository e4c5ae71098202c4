"""Keys of installed services: `pilotfish keys` as root, a rotation in mid-stream, the journal."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotfish import Device
from pilotfish.base.errors import PilotfishError
from pilotfish.device_runtime.enrolment import enrol
from pilotfish.wire import keys
from pilotfish.wire.invitation import parse_line
from tests.deploy.booted.asking import is_undisturbed, link_losses, stream
from tests.deploy.booted.conftest import DEVICE, EDGE, ETC, Prepared
from tests.deploy.booted.machine import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
_KEYS = "/etc/pilotfish/keys"


@pytest.fixture
def local(machine: Machine, prepared: Prepared) -> Iterator[Path]:
    """The machine's folder of keys; afterwards it is again as other tests expect it."""
    folder = machine.root / ETC / "keys"
    yield folder
    for left in folder.glob("edge.old.*"):
        left.unlink()
    for name in ("edge.key", "edge.pub"):
        shutil.copy(prepared.edge_keys / name, folder / name)
    machine.run("systemd-tmpfiles", "--create", "pilotfish.conf")
    machine.run("systemctl", "restart", EDGE)
    machine.run("systemctl", "reload", DEVICE)


@pytest.fixture
def newcomer(prepared: Prepared, local: Path, tmp_path: Path) -> Path:
    """A device's folder, with the edge.pub of before."""
    keys.create(tmp_path, keys.DEVICE)
    shutil.copy(local / "edge.pub", tmp_path)
    return tmp_path


def comes_in(machine: Machine, prepared: Prepared, folder: Path) -> bool:
    def ask() -> bool:
        try:
            with Device(prepared.pair.draft, "tcp://127.0.0.1:7077", folder, threads=1) as device:
                return bool(device.generate("abc", max_tokens=4).tokens)
        except PilotfishError:
            return False

    return machine.on_network(ask)


def invitation_of(machine: Machine, *flags: str) -> str:
    """Invite a device; the command's output, which is the file /root/invite."""
    path = machine.root / "root" / "invite"
    path.unlink(missing_ok=True)
    machine.run(
        "systemd-run", "--unit=invite", "--collect", "-p", "StandardOutput=file:/root/invite",
        "-p", "StandardError=journal", "pilotfish", "keys", "invite", *flags,
    )  # fmt: skip
    machine.until(lambda: path.exists() and "\n" in path.read_text(), "the line")
    return path.read_text()


def entries(machine: Machine, unit: str, *flags: str) -> list[tuple[int, str]]:
    """The journal's entries of a unit: priority and text."""
    completed = machine.run("journalctl", "--no-pager", "-o", "json", "-u", unit, *flags)
    result = [json.loads(line) for line in completed.splitlines() if line.startswith("{")]
    return [(int(each["PRIORITY"]), str(each["MESSAGE"])) for each in result]


def test_a_rotation_in_mid_stream(
    machine: Machine, prepared: Prepared, local: Path, newcomer: Path
) -> None:
    """As docs/keys.md has it, by the commands alone; nobody restarts anything."""
    shutil.copy(newcomer / "device.pub", machine.root / "root" / "newcomer.pub")
    completed = machine.run("pilotfish", "keys", "allow", "/root/newcomer.pub")
    assert f"{_KEYS}/allowed/newcomer.pub" in completed
    assert "sudo systemctl reload pilotfish-edge" in completed
    machine.run("systemctl", "reload", EDGE)
    pids, losses = [machine.show(unit, "MainPID") for unit in (EDGE, DEVICE)], link_losses(machine)

    def rotate() -> None:
        assert "--finish" in machine.run("pilotfish", "keys", "rotate")
        machine.run("systemctl", "reload", EDGE)
        assert "two keys are accepted" in machine.show(EDGE, "StatusText")
        assert comes_in(machine, prepared, newcomer)  # with the edge.pub of before
        machine.run("systemctl", "reload", DEVICE)  # its folder is the same one
        shutil.copy(local / "edge.pub", newcomer)
        assert comes_in(machine, prepared, newcomer)
        machine.until(
            lambda: (
                "0 devices last connected with the former key" in machine.show(EDGE, "StatusText")
            ),
            "the device has the new edge.pub",
        )
        machine.run("pilotfish", "keys", "rotate", "--finish")
        machine.run("systemctl", "reload", EDGE)
        assert "two keys" not in machine.show(EDGE, "StatusText")

    answer = stream(machine, rotate, seed=21)
    assert is_undisturbed(machine, answer, seed=21)
    assert [machine.show(unit, "MainPID") for unit in (EDGE, DEVICE)] == pids
    assert link_losses(machine) <= losses + 1  # the device's own reload connects anew
    assert comes_in(machine, prepared, newcomer)
    machine.run("pilotfish", "keys", "deny", "newcomer")
    machine.run("systemctl", "reload", EDGE)
    assert not comes_in(machine, prepared, newcomer)


def test_an_edge_that_starts_within_a_rotation_answers_to_both_keys(
    machine: Machine, prepared: Prepared, local: Path, newcomer: Path
) -> None:
    """Also after a boot, which makes both secret keys root's alone again."""
    shutil.copy(newcomer / "device.pub", local / "allowed" / "newcomer.pub")
    try:
        machine.run("pilotfish", "keys", "rotate")
        machine.run("systemd-tmpfiles", "--create", "pilotfish.conf")
        assert (local / "edge.old.key").stat().st_mode & 0o777 == 0o600
        machine.run("systemctl", "restart", EDGE)
        assert "not in force" not in machine.show(EDGE, "StatusText")
        assert comes_in(machine, prepared, newcomer)
        machine.run("systemctl", "reload", EDGE)  # which cannot read them; nothing has changed
        assert comes_in(machine, prepared, newcomer)
        shutil.copy(local / "edge.pub", newcomer)
        assert comes_in(machine, prepared, newcomer)
    finally:
        (local / "allowed" / "newcomer.pub").unlink()


def test_a_device_is_enrolled_by_a_line(
    machine: Machine, prepared: Prepared, local: Path, tmp_path: Path
) -> None:
    """The service may not write its allow-list; the command of root does, and nobody reloads."""
    try:
        invitation = parse_line(invitation_of(machine, "--device-name", "enrolled"))
        assert "1 invitation open" in machine.show(EDGE, "StatusText")
        assert invitation.address == "tcp://127.0.0.1:7077"
        done = machine.on_network(lambda: enrol(invitation, tmp_path))
        assert done.name == "enrolled"
        assert comes_in(machine, prepared, tmp_path)
        machine.until(lambda: "enrolled: enrolled, key" in machine.journal("invite"), "its name")
        assert not [*(local / "invitations").iterdir()]
        # a device whose service is installed, and whose key is on the list
        invitation_of(machine)
        advice = machine.run("sh", "-c", "pilotfish keys accept - </root/invite")
        assert "enrolled as board at tcp://127.0.0.1:7077" in advice
        assert 'edge = "tcp://127.0.0.1:7077"' in advice
    finally:
        (local / "allowed" / "enrolled.pub").unlink(missing_ok=True)
        machine.run("systemctl", "reload", EDGE)


def test_the_journal_knows_what_is_serious_and_how_a_service_runs(machine: Machine) -> None:
    allowed = machine.root / ETC / "keys/allowed"
    (allowed / "empty.pub").touch()
    try:
        machine.run("systemctl", "reload", EDGE, check=False)
    finally:
        (allowed / "empty.pub").unlink()
        machine.run("systemctl", "reload", EDGE)
    serious = entries(machine, EDGE, "-p", "warning")
    assert (3, True) in {(priority, "empty.pub" in text) for priority, text in serious}
    for unit in (EDGE, DEVICE):
        ours = [text for _, text in entries(machine, unit) if text.startswith("pilotfish.")]
        [start] = [text for text in ours if re.search(r": serving .*provider cpu", text)][-1:]
        assert "precision fp32" in start
        assert "1 thread" in start
        assert any("edge.pub" in text for text in ours)
        # the journal has the time
        assert not [text for text in ours if re.search(r"\d\d:\d\d:\d\d", text)]
        assert not [text for text in ours if text.startswith("<")]
    assert any("connected: board" in text for _, text in entries(machine, EDGE))
