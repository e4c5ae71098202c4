"""A real sshd on loopback, with keys and a configuration of its own, and bundles for it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pilotfish.deploy.wheelhouse import pack
from tests.support.bundles import seal, tiny_bundle

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
STARTUP_S = 60.0

has_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None,
    reason="installing over ssh is tested against sshd, which is not here",
)


class Server:
    """An sshd that lets one key in, as root; ``scratch`` is where it has temporary folders.

    allowed: its authorized_keys. own_opt: it has an empty /opt, which is `opt` here.
    """

    def __init__(self, folder: Path, *, own_opt: bool = False) -> None:
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
        command = [str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")]
        if own_opt:
            mounting = 'mount -t tmpfs none /opt && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", mounting, "sh", *command]
        self._process = subprocess.Popen(command, stderr=self._log)
        self._wait()

    @property
    def opt(self) -> Path:
        """Its /opt, as this machine sees it."""
        return Path(f"/proc/{self._process.pid}/root/opt")

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
        while time.monotonic() < until_s and self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("sshd does not listen")


def real_bundle(folder: Path, version: str) -> Path:
    """A small bundle whose pilotfish is the one under test: it brings the installer."""
    tiny_bundle(folder, version=version)
    (folder / f"wheels/pilotfish-{version}-py3-none-any.whl").unlink()
    pack(folder / "wheels")
    return seal(folder)
