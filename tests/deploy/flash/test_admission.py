"""What was verified is what is installed, and no older version is, unless it is asked for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pilotfish.cli import main
from pilotfish.deploy import signatures
from pilotfish.deploy.errors import BundleError, InstallError
from pilotfish.deploy.wheels import Wheel
from tests.support.bundles import (
    can_install,
    current,
    demands,
    installation,
    put,
    release,
    sign,
    snapshot,
    tiny_bundle,
    write_wheel,
)

pytestmark = can_install


# --- what is used is what was verified ---

SWAPPED = (
    "wheels/pilotfish-1.0-py3-none-any.whl",
    "artifacts/draft/manifest.json",
    "systemd/pilotfish-device.service",
    "keys/device.key",
)


@pytest.mark.parametrize("manner", ["in place", "another file", "a link", "a pipe", "longer"])
@pytest.mark.parametrize("path", SWAPPED)
def test_a_file_that_is_swapped_after_it_was_verified_is_not_installed(
    root: Path, version_1: Path, path: str, manner: str
) -> None:
    evil = version_1.with_name("evil")
    evil.write_bytes((version_1 / path).read_bytes()[::-1])

    def swap(what: str, done: int, total: int) -> None:
        if (what, done) == ("unpacking wheels", 0):
            if manner != "in place":
                (version_1 / path).unlink()
            if manner in ("in place", "another file"):
                (version_1 / path).write_bytes(evil.read_bytes())
            elif manner == "a link":
                (version_1 / path).symlink_to(evil)
            elif manner == "a pipe":
                os.mkfifo(version_1 / path)
            else:
                (version_1 / path).write_bytes(evil.read_bytes() * 2)

    here, _ = installation(root)
    here.progress = swap
    with pytest.raises(BundleError):
        here.install(version_1, demands())
    assert here.versions.current is None
    assert not (root / "etc/pilotfish/keys/device.key").exists()


def test_a_wheel_that_is_written_to_after_it_was_hashed_is_unpacked_as_it_was(
    root: Path, version_1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same file, so that an open descriptor of it sees the change."""
    evil = write_wheel(
        version_1.parent, "pilotfish", {"pilotfish/cli.py": b"EVIL = 1\n"}
    ).read_bytes()
    unpack = Wheel.unpack

    def late(wheel: Wheel, *arguments: Any) -> None:
        if wheel.name == "pilotfish":
            wheel.path.write_bytes(evil)
        unpack(wheel, *arguments)

    monkeypatch.setattr(Wheel, "unpack", late)
    put(root, version_1)
    installed = root / "opt/pilotfish/current/site/pilotfish/cli.py"
    assert installed.read_text().startswith("VERSION = '1.0'")


def test_the_manifest_that_was_verified_is_the_one_that_is_gone_by(
    root: Path, version_1: Path, tmp_path: Path
) -> None:
    """Another bundle, whole in itself, takes its place between verification and use."""
    other = tmp_path / "other"
    signatures.create(other)

    def swap(what: str, done: int, total: int) -> None:
        if what == "checking the bundle" and done == total:
            shutil.rmtree(version_1)
            sign(tiny_bundle(version_1, version="1.0", marker="# evil"), other)

    here, _ = installation(root)
    here.progress = swap
    with pytest.raises(BundleError, match="changed while it was read"):
        here.install(version_1, demands())
    assert here.versions.current is None


# --- older versions ---


def test_an_older_version_is_refused_unless_it_is_asked_for(
    root: Path, version_1: Path, version_2: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:

    def flash(*words: object) -> int:
        flags = ["--rootfs", str(root), "--signers", str(release() / "signers")]
        return main(["flash", *flags, *map(str, words)])

    put(root, version_2)
    before = snapshot(root)
    for words in ((), ("--unsigned",)):
        assert flash(*words, version_1) == 73
        (line,) = capfd.readouterr().err.splitlines()
        assert "version 1.0, and 2.0 is installed" in line
        assert "give --downgrade" in line
    assert snapshot(root) == before
    same = tiny_bundle(tmp_path / "same", version="2.0", marker="# another build")
    assert flash(same) == 0
    assert flash("--downgrade", version_1) == 0
    assert current(root) == "1.0"
    assert flash("--rollback") == 0
    assert current(root) == "2.0"
    assert flash("--rollback") == 0  # no downgrade either
    assert current(root) == "1.0"


def test_what_has_no_place_among_the_versions_may_be_older(
    root: Path, version_1: Path, tmp_path: Path
) -> None:
    """And so may be what replaces it."""
    odd = tiny_bundle(tmp_path / "odd", version="3.0.abc")
    for there, comes in ((version_1, odd), (odd, version_1)):
        put(root, there, downgrade=True)
        before = snapshot(root)
        with pytest.raises(InstallError, match="give --downgrade"):
            put(root, comes)
        assert snapshot(root) == before


@pytest.mark.parametrize("faster", ["newer", "the same", "older"])
def test_another_installation_may_have_been_faster(
    root: Path, version_1: Path, version_2: Path, tmp_path: Path, faster: str
) -> None:
    """While a bundle was being checked a newer version came: it is looked at again, under lock."""
    wanted = tiny_bundle(tmp_path / "wanted", version="1.5")
    versions = {"newer": version_2, "the same": wanted, "older": version_1}
    there: list[dict[str, object]] = []

    def overtake(what: str, done: int, total: int) -> None:
        if (what, there) == ("checking the bundle", []):
            put(root, versions[faster])
            there.append(snapshot(root))

    here, _ = installation(root)
    here.progress = overtake
    if faster == "newer":
        with pytest.raises(InstallError, match=r"version 1\.5, and 2\.0 is installed"):
            here.install(wanted, demands())
        assert [snapshot(root)] == there
    else:
        here.install(wanted, demands())
        assert current(root) == "1.5"
