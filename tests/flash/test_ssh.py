"""Installing over ssh: a real sshd on loopback, with keys and a configuration of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import manifest
from deploy.wheelhouse import pack
from pilotfish.cli import main
from tests.bundles import can_install, seal, tiny_bundle, tiny_rootfs

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
HOME = "opt/pilotfish"
STARTUP_S = 60.0

pytestmark = [
    can_install,
    pytest.mark.skipif(
        SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None,
        reason="installing over ssh is tested against sshd, which is not here",
    ),
]


class Server:
    """An sshd that lets one key in, as root; ``scratch`` is where it has temporary folders.

    allowed: its authorized_keys.
    """

    def __init__(self, folder: Path) -> None:
        self.scratch = folder / "scratch"
        self.known = folder / "known_hosts"
        self._key = folder / "id"
        self.allowed = folder / "id.pub"
        self.scratch.mkdir()
        for path in (self._key, folder / "host"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
            subprocess.run(command, check=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        host = (folder / "host.pub").read_text().split()
        self.known.write_text(f"[127.0.0.1]:{self.port} {host[0]} {host[1]}\n")
        bin_folder = folder / "bin"  # the board's Python is the one that runs the tests
        bin_folder.mkdir()
        (bin_folder / "python3").symlink_to(os.path.realpath(sys.executable))
        (folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\n"
            f"AuthorizedKeysFile {self._key}.pub\nPidFile none\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
            f"SetEnv PATH={bin_folder}:/usr/sbin:/usr/bin:/sbin:/bin TMPDIR={self.scratch}\n"
        )
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists on it
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")], stderr=self._log
        )
        self._wait()

    def options(self, known: Path | None = None) -> list[str]:
        """The flags of `pilotfish flash` that lead there."""
        options = (
            f"IdentityFile={self._key}",
            "IdentitiesOnly=yes",
            f"UserKnownHostsFile={known or self.known}",
            "GlobalKnownHostsFile=/dev/null",
        )
        words = ["--ssh", "root@127.0.0.1", "--port", str(self.port)]
        return words + [f"--ssh-option={option}" for option in options]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def _wait(self) -> None:
        until_s = time.monotonic() + STARTUP_S
        while time.monotonic() < until_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("sshd does not listen")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("sshd"))
    try:
        yield running
    finally:
        running.close()


def real_bundle(folder: Path, version: str) -> Path:
    """A small bundle whose pilotfish is the one under test: it brings the installer."""
    tiny_bundle(folder, version=version)
    (folder / f"wheels/pilotfish-{version}-py3-none-any.whl").unlink()
    pack(folder / "wheels")
    return seal(folder)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return [real_bundle(folder / version, version) for version in ("1.0", "2.0")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root file system "on the board"; its own is not to be touched by a test."""
    return tiny_rootfs(tmp_path / "mounted")


def flash(server: Server, root: Path, *words: object, known: Path | None = None) -> int:
    return main(["flash", *server.options(known), "--root", str(root), *map(str, words)])


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
    assert "its shell runs no commands" in line
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
