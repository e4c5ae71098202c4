"""The edge's package as a file; what it does on a system is in tests/booted/test_package.py."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pilotfish.deploy import deb, wheelhouse
from pilotfish.deploy.errors import BundleError

PYTHON, MACHINE = "3.11", "x86_64"
EPOCH_S = 1_700_000_000


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pilotfish alone, without what it needs."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is missing")
    folder = tmp_path_factory.mktemp("wheels")
    wheelhouse.pack(folder)
    return folder


@pytest.fixture
def package(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(EPOCH_S))
    return deb.build(tmp_path / "one", PYTHON, MACHINE, "1", lambda *_: None, wheels)


def dpkg_deb(*arguments: object) -> bytes:
    return subprocess.run(
        ["dpkg-deb", *map(str, arguments)], capture_output=True, check=True
    ).stdout


def members(package: Path, option: str) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(dpkg_deb(option, package))) as tar:
        return {member.name: member for member in tar}


def test_same_input_gives_the_same_bytes(package: Path, wheels: Path, tmp_path: Path) -> None:
    again = deb.build(tmp_path / "two", PYTHON, MACHINE, "1", lambda *_: None, wheels)
    assert again.name == package.name
    assert again.read_bytes() == package.read_bytes()


def test_fields_say_for_what_it_is(package: Path) -> None:
    fields = dpkg_deb("--field", package).decode()
    assert "Package: pilotfish-edge\n" in fields
    assert "Architecture: amd64\n" in fields
    assert f"python{PYTHON}," in fields
    assert "@" not in fields.replace("pilotfish@localhost", "")


def test_files_are_where_a_package_may_put_them(package: Path) -> None:
    files = members(package, "--fsys-tarfile")
    assert {name.split("/")[1] for name in files if name.count("/")} <= {"", "usr", "etc"}
    for name in (
        "usr/bin/pilotfish",
        "usr/lib/pilotfish-edge/bin/pilotfish",
        "usr/lib/pilotfish-edge/site/pilotfish/cli/__init__.py",
        "usr/lib/systemd/system/pilotfish-edge.service",
        "usr/lib/systemd/system/pilotfish-edge.socket",
        "usr/lib/systemd/system/pilotfish-worker.service",
        "usr/lib/sysusers.d/pilotfish-edge.conf",
        "usr/lib/tmpfiles.d/pilotfish-edge.conf",
        "etc/pilotfish/edge.toml",
        "etc/pilotfish/worker.toml",
    ):
        assert f"./{name}" in files
    assert not any("device" in name for name in files if "/site/" not in name)
    for member in files.values():
        assert (member.uid, member.gid) == (0, 0)
        assert member.mtime <= EPOCH_S
        assert member.issym() or member.mode in (0o755, 0o644), member.name


def test_unit_starts_the_packages_own_program(package: Path, tmp_path: Path) -> None:
    dpkg_deb("--extract", package, tmp_path / "root")
    for name, action in (("edge", "serve"), ("worker", "worker")):
        unit = (tmp_path / f"root/usr/lib/systemd/system/pilotfish-{name}.service").read_text()
        assert f"ExecStart=/usr/lib/pilotfish-edge/bin/pilotfish edge {action}" in unit
        assert "/opt/" not in unit
    launcher = tmp_path / "root/usr/bin/pilotfish"
    assert launcher.resolve().read_text().startswith(f"#!/usr/bin/python{PYTHON} -s\n")


def test_scripts_are_whole_and_checksums_fit(package: Path, tmp_path: Path) -> None:
    dpkg_deb("--raw-extract", package, tmp_path / "root")
    control = tmp_path / "root/DEBIAN"
    conffiles = "/etc/pilotfish/edge.toml\n/etc/pilotfish/worker.toml\n"
    assert (control / "conffiles").read_text() == conffiles
    for name in ("postinst", "prerm", "postrm"):
        assert "@" not in (control / name).read_text()
        subprocess.run(["sh", "-n", str(control / name)], check=True)
    sums = ["md5sum", "--check", "--strict", "--quiet", str(control / "md5sums")]
    subprocess.run(sums, cwd=tmp_path / "root", check=True)


def test_wheels_for_another_machine_are_refused(wheels: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    shutil.copytree(wheels, folder)
    (folder / "thing-1.0-cp310-cp310-manylinux_2_28_aarch64.whl").write_bytes(b"")
    with pytest.raises(BundleError, match=r"thing-1.0.*Python 3.11 on x86_64"):
        deb.build(tmp_path, PYTHON, MACHINE, "1", lambda *_: None, folder)
    assert not list(tmp_path.glob("*.deb"))


def test_a_fault_is_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pilotfish.deploy.deb",
        "--out",
        str(tmp_path),
        "--wheels",
        str(tmp_path),
    ]
    (tmp_path / "no-wheel").touch()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == BundleError.exit_code
    assert done.stderr.splitlines()[-1].startswith("pilotfish: no-wheel is not named like a wheel")
