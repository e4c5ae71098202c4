"""The target in the edge's package, and what becomes of the link to it. Nothing is booted here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pilotfish.deploy import deb, wheelhouse
from tests.deploy.booted import rootfs
from tests.deploy.booted.conftest import ETC, STATE
from tests.support.tiny import tiny_artifact

pytestmark = pytest.mark.slow
ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
OURS = "/usr/lib/pilotfish-edge/target"


def test_link_comes_and_goes_with_the_packages_target(archive: Path, tmp_path: Path) -> None:
    made = tiny_artifact(tmp_path / "model", dialect="opset17")
    (tmp_path / "wheels").mkdir()
    wheelhouse.pack(tmp_path / "wheels")
    python, machine = rootfs.python(archive), os.uname().machine
    root = tmp_path / "root"
    rootfs.unpack(archive, root)
    # the package has no other wheels, so its program cannot make the edge's keys
    (root / ETC / "keys").mkdir(parents=True)
    (root / ETC / "keys/edge.pub").touch()
    packages = [
        deb.build(root, python, machine, revision, lambda *_: None, tmp_path / "wheels", target)
        for revision, target in (("1", made.path), ("2", None), ("3", made.path))
    ]
    link = root / STATE / "target"

    def dpkg(action: str, word: str) -> None:
        inside = (
            'mount -t proc proc "$0/proc" && exec chroot "$0" dpkg "$@"'  # for systemd-tmpfiles
        )
        command = [*ALONE, "sh", "-c", inside, str(root), action, word]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    dpkg("--install", f"/{packages[0].name}")
    assert os.readlink(link) == OURS
    assert (root / OURS[1:] / "model.onnx").read_bytes() == made.graph_path.read_bytes()
    dpkg("--install", f"/{packages[1].name}")
    assert not os.path.lexists(link)
    dpkg("--install", f"/{packages[2].name}")
    assert os.readlink(link) == OURS
    dpkg("--remove", "pilotfish-edge")
    assert not os.path.lexists(link)

    link.mkdir()  # a target that somebody copied there
    dpkg("--install", f"/{packages[2].name}")
    dpkg("--remove", "pilotfish-edge")
    assert link.is_dir()
    assert not link.is_symlink()
