"""Installing onto a system that runs: a version whose service does not start is taken back."""

from __future__ import annotations

import shutil

import pytest

from pilotfish.deploy.wheelhouse import pack
from tests.deploy.booted.machine import Machine
from tests.support.bundles import release, seal, tiny_bundle

pytestmark = pytest.mark.slow

DEVICE = "pilotfish-device.service"
GOOD = "[Service]\nExecStart=/bin/sleep {}\n[Install]\nWantedBy=multi-user.target\n"
BAD = (
    "[Service]\nExecStart=/bin/sh -c 'echo no such drafter; exit 1'\nRestart=always\n"
    "RestartSec=0.1\n[Install]\nWantedBy=multi-user.target\n"
)


def bring(board: Machine, version: str, unit: str, **others: str) -> str:
    """A bundle of that version on the machine, whose unit is ``unit``; its path there.

    others: name of another unit, without its ending → its text.
    """
    python = next(path.name for path in (board.root / "usr/bin").glob("python3.[0-9]*[0-9]"))
    folder = board.root / "root" / version
    units = {DEVICE: unit} | {f"{name}.service": text for name, text in others.items()}
    tiny_bundle(folder, version=version, python=python.removeprefix("python"), units=units)
    (folder / f"wheels/pilotfish-{version}-py3-none-any.whl").unlink()
    pack(folder / "wheels")
    seal(folder)
    shutil.copytree(release() / "signers", board.root / "root/signers", dirs_exist_ok=True)
    return f"/root/{version}"


def install(board: Machine, wheel_of: str, *words: str, code: int = 0) -> str:
    """Run the installer on the machine, as `pilotfish flash --ssh` does; what it says."""
    (wheel,) = (board.root / wheel_of.lstrip("/") / "wheels").glob("pilotfish-*.whl")
    script = (
        f"PYTHONPATH={wheel_of}/wheels/{wheel.name} python3 -B -m pilotfish.deploy.install "
        f"--signers /root/signers {' '.join(words)}; echo code $?"
    )
    completed = board.run("sh", "-c", script)
    assert f"code {code}" in completed.splitlines(), completed
    return completed


def runs(board: Machine) -> str:
    """What the unit runs now."""
    pid = board.show(DEVICE, "MainPID")
    return board.run("cat", f"/proc/{pid}/cmdline").replace("\0", " ").strip()


def test_a_version_that_does_not_start_is_taken_back(board: Machine) -> None:
    broken = bring(board, "0.9", BAD)
    reply = install(board, broken, broken, code=75)  # there is nothing to go back to
    assert "no such drafter" in reply
    assert "Went back" not in reply
    item = bring(board, "1.0", GOOD.format(1001))
    assert f"{DEVICE} is active" in install(board, item, item)
    assert runs(board) == "/bin/sleep 1001"
    install(board, item, "--check")

    worse = bring(board, "2.0", BAD)
    reply = install(board, worse, worse, code=75)
    assert "no such drafter" in reply
    assert "Went back to version 1.0" in reply
    assert "which is active" in reply
    assert runs(board) == "/bin/sleep 1001"
    there = sorted(path.name[:3] for path in (board.root / "opt/pilotfish/versions").iterdir())
    assert there == ["0.9", "1.0"]  # as it was before

    three = bring(board, "3.0", GOOD.format(1003))
    install(board, three, three)
    assert runs(board) == "/bin/sleep 1003"
    install(board, three, "--rollback")
    assert runs(board) == "/bin/sleep 1001"
    install(board, three, "--check")
    board.reboot()
    board.until_active(DEVICE)
    assert runs(board) == "/bin/sleep 1001"

    install(board, three, "--uninstall", "--purge")
    assert board.show(DEVICE, "ActiveState") == "inactive"
    assert board.show(DEVICE, "LoadState") == "not-found"
    assert not (board.root / "opt/pilotfish").exists()
    assert not (board.root / "etc/pilotfish").exists()
    for path in (broken, item, worse, three):
        shutil.rmtree(board.root / path.lstrip("/"))


def test_a_service_that_waits_for_another_unit_is_waited_for(board: Machine) -> None:
    """As at the first boot, while an engine is built: it has not begun, which is no failure."""
    slow = board.root / "etc/systemd/system/slow.service"
    slow.write_text("[Service]\nType=oneshot\nExecStart=/bin/sleep 6\n")
    board.run("systemctl", "daemon-reload")
    board.run("systemctl", "start", "--no-block", slow.name)
    waiting = bring(board, "4.0", f"[Unit]\nAfter={slow.name}\n{GOOD.format(1004)}")
    board.run("systemctl", "restart", "--no-block", slow.name)
    assert f"{DEVICE} is active" in install(board, waiting, waiting)
    assert runs(board) == "/bin/sleep 1004"
    install(board, waiting, "--uninstall", "--purge")
    shutil.rmtree(board.root / waiting.lstrip("/"))


def test_the_build_of_an_engine_is_left_to_do_where_tensorrt_is(board: Machine) -> None:
    build = (
        "[Unit]\nConditionPathExistsGlob=|/usr/lib/*-linux-gnu/libnvinfer.so.*\n"
        "[Service]\nType=oneshot\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"
    )
    units = {"pilotfish-engine-build": build}
    without = bring(board, "7.0", GOOD.format(7000), **units)
    assert "to do:" not in install(board, without, without)
    library = board.root / "usr/lib/x86_64-linux-gnu/libnvinfer.so.10"
    library.touch()
    try:
        item = bring(board, "7.1", GOOD.format(7001), **units)
        reply = install(board, item, item)
    finally:
        library.unlink()
    both = f"restart pilotfish-engine-build.service && sudo systemctl restart {DEVICE}"
    assert both in " ".join(reply.split())
    assert runs(board) == "/bin/sleep 7001"  # at once
    install(board, item, "--uninstall", "--purge")
    for path in (without, item):
        shutil.rmtree(board.root / path.lstrip("/"))
