"""Signed bundles on a system that runs: the right one is installed, no code of any other is run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pilotfish.deploy import signatures
from tests.deploy.booted.conftest import DEVICE, command
from tests.deploy.booted.machine import Machine
from tests.deploy.booted.test_flash_live import GOOD, bring, runs
from tests.support.bundles import plant, release, seal, sign

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MARK = "root/pilotfish-was-here"
SIGNERS = "etc/pilotfish/signers"


def flash(bin_folder: Path, trusted: Path, *words: object) -> tuple[int, str]:
    """`pilotfish flash --ssh`, led into the machine; exit code and what was said."""
    environment = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        command("flash", "--ssh", "root@board", "--signers", trusted, *words),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def on_the_board(board: Machine, bundle: Path) -> tuple[int, str]:
    """The same bundle, brought there by other ways, and left to the version that is installed."""
    shutil.rmtree(board.root / "root/brought", ignore_errors=True)
    shutil.copytree(bundle, board.root / "root/brought")
    installed = "PYTHONPATH=/opt/pilotfish/current/site python3 -B -m pilotfish.deploy.install"
    completed = board.run("sh", "-c", f"cd / && {installed} /root/brought 2>&1; echo $?")
    return int(completed.splitlines()[-1]), completed


def test_a_signed_bundle_is_installed_and_no_other_runs(board: Machine, tmp_path: Path) -> None:
    board.stand_in_for_ssh(tmp_path)
    other = tmp_path / "other"
    subprocess.run(command("keys", "new", "signer", "--keys", other), check=True)
    both = Path(shutil.copytree(release() / "signers", tmp_path / "both"))
    shutil.copy(other / "signers/signer.pub", both / "other.pub")

    def bundle(version: str) -> Path:
        return board.root / bring(board, version, GOOD.format(3000)).lstrip("/")

    right = board.root / bring(board, "2.0", GOOD.format(2000)).lstrip("/")
    code, reply = flash(tmp_path, release() / "signers", right)
    assert code == 0, reply
    assert f"{DEVICE} is active" in reply
    assert "signed by signer" in reply
    assert os.listdir(board.root / SIGNERS) == ["signer.pub"]
    pid = board.show(DEVICE, "MainPID")

    wrong = sign(plant(bundle("3.0"), f"/{MARK}"), other)
    missing = plant(bundle("3.1"), f"/{MARK}")
    (missing / signatures.NAME).unlink()
    older = plant(bundle("1.0"), f"/{MARK}")
    tampered = bundle("3.2")
    data = (tampered / signatures.NAME).read_bytes()
    (plant(tampered, f"/{MARK}") / signatures.NAME).write_bytes(data)
    for refused, exit_code, words in (
        (wrong, 65, "is not among the 1 trusted signers in /etc/pilotfish/signers"),
        (missing, 65, "The bundle is not signed"),
        (older, 73, "give --downgrade"),
        (tampered, 65, "was changed since signer signed it"),
    ):
        for code, reply in (flash(tmp_path, both, refused), on_the_board(board, refused)):
            assert code == exit_code, reply
            assert words in reply
        assert not (board.root / MARK).exists()
        assert not Path("/", MARK).exists()
    assert board.show(DEVICE, "MainPID") == pid
    assert runs(board) == "/bin/sleep 2000"
    assert board.run("sh", "-c", "ls -d /var/tmp/pilotfish-* 2>/dev/null; true") == ""

    # the mark is no blank: what the right signer signed is run
    code, reply = flash(tmp_path, both, sign(tampered))
    assert code == 0, reply
    assert (board.root / MARK).exists()
    assert runs(board) == "/bin/sleep 3000"
    code, reply = flash(tmp_path, both, "--rollback")
    assert code == 0, reply
    assert runs(board) == "/bin/sleep 2000"


def test_a_board_without_ssh_keygen_says_what_it_lacks(board: Machine, tmp_path: Path) -> None:
    board.stand_in_for_ssh(tmp_path)
    bundle = seal(board.root / bring(board, "5.0", GOOD.format(5000)).lstrip("/"))
    tool = board.root / "usr/bin/ssh-keygen"
    away = tool.with_name("ssh-keygen.away")
    tool.rename(away)
    try:
        code, reply = flash(tmp_path, release() / "signers", bundle)
    finally:
        away.rename(tool)
    assert code == 65, reply
    assert "install the package openssh-client" in reply
