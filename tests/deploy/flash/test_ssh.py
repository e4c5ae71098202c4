"""Installing over ssh: a real sshd on loopback, with keys and a configuration of its own."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotfish.cli import main
from pilotfish.deploy import manifest
from pilotfish.deploy.ssh import Board
from tests.deploy.flash.sshd import Server, has_sshd, real_bundle
from tests.support.bundles import can_install, release, seal, tiny_rootfs

HOME = "opt/pilotfish"

pytestmark = [pytest.mark.slow, can_install, has_sshd]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("sshd"))
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return [real_bundle(folder / version, version) for version in ("1.0", "2.0")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root file system "on the board"; its own is not to be touched by a test."""
    return tiny_rootfs(tmp_path / "mounted")


def flash(server: Server, root: Path, *words: object, known: Path | None = None) -> int:
    signers = ["--signers", str(release() / "signers")]
    return main(["flash", *server.options(known), *signers, "--root", str(root), *map(str, words)])


def test_the_whole_life_of_an_installation_over_ssh(
    server: Server, root: Path, bundles: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    for bundle in bundles:
        assert flash(server, root, bundle) == 0, capfd.readouterr().err
        name = manifest.read(bundle).name
        assert os.readlink(root / HOME / "current") == f"versions/{name}"
        assert f"version {name} is current" in capfd.readouterr().err
    assert (root / "etc/pilotfish/keys/device.key").stat().st_mode & 0o777 == 0o600
    assert flash(server, root, "--check") == 0
    assert flash(server, root, "--rollback") == 0
    assert os.readlink(root / HOME / "current").startswith("versions/1.0-")
    (root / HOME / "current/bin/pilotfish").write_text("x")
    assert flash(server, root, "--check") == 1
    assert "bin/pilotfish was changed" in capfd.readouterr().err
    assert flash(server, root, "--uninstall", "--purge") == 0
    assert not (root / HOME).exists()
    assert not (root / "etc/pilotfish").exists()
    assert os.listdir(server.scratch) == []


def test_what_the_installer_refuses_there_is_an_error_here(
    server: Server, tmp_path: Path, bundles: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    other = tiny_rootfs(tmp_path / "other", python="3.9")
    assert flash(server, other, bundles[0]) == 73
    assert "has 3.9" in capfd.readouterr().err
    assert flash(server, tmp_path / "nothing", "--check") == 73
    assert os.listdir(server.scratch) == []
    assert not (other / "opt").exists()


def test_a_bundle_for_another_machine_is_not_sent(
    server: Server,
    tmp_path: Path,
    bundles: list[Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = manifest.read(bundles[0]).machine
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[here]
    board = tiny_rootfs(tmp_path / "other", machine=other)
    monkeypatch.setattr(Board, "_send", lambda *_: pytest.fail("it is sent"))
    assert flash(server, board, bundles[0]) == 73
    err = capfd.readouterr().err
    assert f"The bundle is for {here}" in err
    assert f"is for {other}: make another bundle with --machine or --jetpack" in err
    assert os.listdir(server.scratch) == []


def test_a_damaged_bundle_is_not_even_sent(
    server: Server, root: Path, tmp_path: Path, bundles: list[Path]
) -> None:
    damaged = Path(shutil.copytree(bundles[0], tmp_path / "damaged"))
    with (damaged / "systemd/pilotfish-device.service").open("a") as file:
        file.write("x")
    assert flash(server, root, damaged) == 65
    assert not (root / "opt").exists()


def test_a_bundle_without_an_installer_is_not_sent(
    server: Server,
    root: Path,
    tmp_path: Path,
    bundles: list[Path],
    capfd: pytest.CaptureFixture[str],
) -> None:
    bare = Path(shutil.copytree(bundles[0], tmp_path / "bare"))
    next((bare / "wheels").glob("pilotfish-*")).unlink()
    assert flash(server, root, seal(bare)) == 65
    assert "no wheel of pilotfish" in capfd.readouterr().err


def test_a_server_that_runs_something_else_is_refused_in_one_line(
    server: Server, root: Path, bundles: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    before = server.allowed.read_text()
    server.allowed.write_text(f'command="true" {before}')
    try:
        assert flash(server, root, bundles[0]) == 69
    finally:
        server.allowed.write_text(before)
    (line,) = capfd.readouterr().err.splitlines()[-1:]
    assert "runs no commands" in line
    assert not (root / "opt").exists()


def test_what_looks_like_an_option_is_a_host(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    for host in (f"-oProxyCommand=touch {made}", f"x@-oProxyCommand=touch {made}"):
        assert main(["flash", f"--ssh={host}", "--check"]) == 69
        assert "cannot be used" in capfd.readouterr().err
    assert not made.exists()


def test_a_board_with_another_host_key_is_not_trusted(
    server: Server,
    root: Path,
    tmp_path: Path,
    bundles: list[Path],
    capfd: pytest.CaptureFixture[str],
) -> None:
    empty = tmp_path / "known"
    empty.touch()
    assert flash(server, root, bundles[0], known=empty) == 69
    (line,) = capfd.readouterr().err.splitlines()[-1:]
    assert "cannot be used: Host key verification failed" in line
    assert not (root / "opt").exists()


def test_a_board_that_is_not_there_is_an_error_in_one_line(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["flash", "--ssh", "root@127.0.0.1", "--port", str(port), "--check"]
    assert main(words) == 69
    (line,) = capfd.readouterr().err.splitlines()
    assert "Connection refused" in line
