"""Root file systems in use: links, packages, disks that are full, a chroot."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pilotfish.deploy.errors import InstallError
from pilotfish.deploy.rootfs import Rootfs
from tests.support.bundles import (
    HOME,
    UNIT,
    can_install,
    current,
    install_over_this_machine,
    installation,
    put,
    release,
    snapshot,
    tiny_bundle,
    tiny_rootfs,
)

pytestmark = can_install


def test_links_of_a_root_file_system_do_not_lead_out_of_it(root: Path, version_1: Path) -> None:
    (root / "data").mkdir()
    (root / "opt").symlink_to("/data")  # what the board sees as /data
    put(root, version_1)
    assert (root / "data/pilotfish/current/bin/pilotfish").is_file()
    (root / "srv").symlink_to("../" * 30 + "etc")
    (root / "loop").symlink_to("loop")
    result = Rootfs.inspect(root)
    assert result.path("srv/x") == root / "etc/x"
    assert result.path("../../x") == root / "x"
    with pytest.raises(InstallError, match="broken link"):
        result.path("loop/x")


def test_an_installation_that_is_a_link_to_another_disk_stays_within(
    root: Path, version_1: Path
) -> None:
    outside = root.parent / "data"
    outside.mkdir()
    (root / "opt").mkdir()
    (root / HOME).symlink_to(outside)  # the board's own /data is elsewhere
    put(root, version_1)
    assert list(outside.iterdir()) == []
    there = root / str(outside).lstrip("/")
    assert (there / "current/bin/pilotfish").is_file()
    assert installation(root)[0].check() == []
    installation(root)[0].uninstall(purge=False)
    assert not there.exists()


def test_settings_and_keys_that_are_links_stay(root: Path, version_1: Path) -> None:
    """They lead to where the board has them, which this machine does not know."""
    (root / "etc/pilotfish/keys").mkdir(parents=True)
    links = [root / "etc/pilotfish" / name for name in ("device.toml", "keys/device.key")]
    for link in links:
        link.symlink_to("/data/pilotfish")
    info = put(root, version_1)
    for link in links:
        assert os.readlink(link) == "/data/pilotfish"
        assert f"{link} is a link and stays" in info
    assert installation(root)[0].check() == []


def test_what_the_package_brought_is_the_packages(root: Path, tmp_path: Path) -> None:
    edge, device = "pilotfish-edge.service", "pilotfish-device.service"
    place = "usr/lib/systemd/system"
    (root / place).mkdir(parents=True)
    (root / place / edge).write_text("the package's\n")
    listed = root / "var/lib/dpkg/info/pilotfish-edge.list"
    listed.parent.mkdir(parents=True)
    listed.write_text(f"/.\n/usr\n/{place}\n/{place}/{edge}\n/etc/pilotfish/edge.toml\n")
    bundle = tiny_bundle(tmp_path / "both", units={device: UNIT.format(1), edge: UNIT.format(2)})
    assert f"/{place}/{edge} belongs to a Debian package and stays as it is" in put(root, bundle)
    assert installation(root)[0].check() == []
    with pytest.raises(InstallError, match="purge it first"):
        installation(root)[0].uninstall(purge=True)
    assert current(root) == "1.0"
    installation(root)[0].uninstall(purge=False)
    assert (root / place / edge).read_text() == "the package's\n"
    assert not (root / place / device).exists()


def test_a_disk_that_is_full_keeps_the_version_that_it_has(root: Path, version_1: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", root], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        tiny_rootfs(root)
        put(root, version_1)
        before = snapshot(root)
        large = {"odd/__init__.py": os.urandom(3 << 20)}
        two = tiny_bundle(version_1.with_name("two"), version="2.0", wheels=large)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            put(root, two)
        assert snapshot(root) == before
    finally:
        subprocess.run(["umount", root], check=True)


def test_a_file_system_that_cannot_be_written_is_an_error_in_one_line(
    root: Path, version_1: Path
) -> None:
    command = f'mount --bind {root} {root} && mount -o remount,ro,bind {root} && exec "$@"'
    flags = ["--root", str(root), "--signers", str(release() / "signers")]
    install = [sys.executable, "-m", "pilotfish.deploy.install", *flags, str(version_1)]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, "sh", *install],
        capture_output=True,
        text=True,
        check=False,
    )
    if "Read-only" not in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()[-80:]}")
    assert done.returncode == 74
    assert len(done.stderr.splitlines()) == 1


def test_a_manifest_that_is_damaged_is_a_fault_that_check_names(
    root: Path, version_1: Path
) -> None:
    put(root, version_1)
    (root / HOME / "current/manifest.json").write_text("x")
    (fault,) = installation(root)[0].check()
    assert "manifest.json was changed" in fault
    put(root, version_1)
    assert installation(root)[0].check() == []


def test_running_it_as_root_leaves_the_installation_as_it_was(root: Path, version_1: Path) -> None:
    """A BSP on a machine without the board's Python has modules that are not compiled."""
    put(root, version_1)
    here = root / HOME / "current"
    listed = json.loads((here / "installed.json").read_text())
    for path in [path for path in listed if path.endswith(".pyc")]:
        (here / path).unlink()
        del listed[path]
    (here / "installed.json").write_text(json.dumps(listed))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, here / "bin/pilotfish"], env=environment, check=True)
    assert installation(root)[0].check() == []


def test_in_a_chroot_everything_is_installed_and_nothing_started(
    root: Path, version_1: Path
) -> None:
    """The whole machine under an overlay, so that ``/`` can be installed into."""
    done = install_over_this_machine(root, version_1)
    assert done.returncode == 0, done.stderr
    assert "pilotfish-device.service enabled" in done.stderr
    assert not Path("/", HOME).exists()
