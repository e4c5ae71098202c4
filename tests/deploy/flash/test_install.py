"""Installing bundles into a root file system: what is refused, what stays, what a kill leaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pilotfish.base.errors import PilotfishError, UnsupportedError
from pilotfish.cli import flash, main
from pilotfish.deploy import errors, manifest
from pilotfish.deploy.errors import BundleError, InstallError
from pilotfish.deploy.rootfs import Rootfs
from pilotfish.deploy.wheelhouse import pack
from tests.support.bundles import (
    HOME,
    MACHINE,
    PYTHON,
    UNIT,
    can_install,
    current,
    installation,
    put,
    release,
    seal,
    snapshot,
    tiny_bundle,
    tiny_rootfs,
    write_wheel,
)

pytestmark = can_install


def check(root: Path) -> list[str]:
    return installation(root)[0].check()


def test_what_is_installed_runs_and_a_second_run_changes_nothing(
    root: Path, version_1: Path
) -> None:
    info = put(root, version_1)
    assert "pilotfish-device.service enabled" in info
    launcher = root / HOME / "current/bin/pilotfish"
    assert launcher.read_text().startswith(f"#!/usr/bin/python{PYTHON} ")
    done = subprocess.run([sys.executable, launcher], capture_output=True, text=True, check=True)
    assert done.stdout == "1.0\n"
    assert (root / "etc/pilotfish/keys/device.key").stat().st_mode & 0o777 == 0o600
    assert "pilotfish" in (root / "etc/passwd").read_text()
    assert (root / HOME / "current/draft/manifest.json").is_file()
    script = root / HOME / "current/bin/odd"
    assert script.read_text().startswith(f"#!/usr/bin/python{PYTHON}\n")
    assert script.stat().st_mode & 0o777 == 0o755
    before, times = snapshot(root), _changes(root)
    assert put(root, version_1) == []
    assert snapshot(root) == before
    assert _changes(root) == times
    assert check(root) == []


def _changes(root: Path) -> dict[str, int]:
    """When each file was last changed; passwd's lock is systemd's own."""
    return {
        str(path): path.lstat().st_mtime_ns
        for path in root.rglob("*")
        if not path.is_dir() and path.name != ".pwd.lock"
    }


def test_upgrade_keeps_one_version_to_go_back_to(
    root: Path, version_1: Path, version_2: Path, tmp_path: Path
) -> None:
    put(root, version_1)
    put(root, version_2)
    assert current(root) == "2.0"
    three = tiny_bundle(tmp_path / "three", version="3.0")
    put(root, three)
    assert sorted(path.name[:3] for path in (root / HOME / "versions").iterdir()) == ["2.0", "3.0"]
    unit = root / "usr/lib/systemd/system/pilotfish-device.service"
    settings = root / "etc/pilotfish/device.toml"
    for expected, draft in (("2.0", "y"), ("3.0", "x"), ("2.0", "y")):
        here, info = installation(root)
        here.roll_back()
        assert current(root) == expected
        assert any(expected in line for line in info)
        assert unit.read_text() == UNIT.format(expected)
        assert settings.read_text() == f"draft = '{draft}'\n"
        assert check(root) == []


def test_there_is_nothing_to_go_back_to_after_the_first_version(
    root: Path, version_1: Path
) -> None:
    put(root, version_1)
    with pytest.raises(InstallError, match="no previous version"):
        installation(root)[0].roll_back()
    assert current(root) == "1.0"


def test_edited_settings_and_keys_stay(root: Path, version_1: Path, version_2: Path) -> None:
    put(root, version_1)
    settings, secret = root / "etc/pilotfish/device.toml", root / "etc/pilotfish/keys/device.key"
    settings.write_text("draft = 'mine'\n")
    settings.chmod(0o600)
    (version_2 / "keys/device.key").write_text("another\n")
    info = put(root, seal(version_2))
    assert settings.read_text() == "draft = 'mine'\n"
    assert settings.with_name("device.toml.new").read_text() == "draft = 'y'\n"
    assert secret.read_text() == "secret\n"
    assert any("was edited and stays" in line for line in info)
    assert any("is not the bundle's key" in line for line in info)
    assert "another" not in "".join(info)
    # adopting the new one asks no more
    settings.write_text("draft = 'y'\n")
    put(root, version_2)
    assert not settings.with_name("device.toml.new").exists()


def test_a_unit_that_was_disabled_stays_so_and_one_that_is_gone_goes(
    root: Path, version_1: Path, tmp_path: Path
) -> None:
    device, build = "pilotfish-device.service", "pilotfish-engine-build.service"
    put(root, version_1)
    subprocess.run(["systemctl", f"--root={root}", "disable", "-q", device], check=True)
    more = tiny_bundle(
        tmp_path / "more", version="2.0", units={device: UNIT.format(2), build: UNIT.format("b")}
    )
    assert f"{build} enabled" in put(root, more)
    wants = root / "etc/systemd/system/basic.target.wants"
    assert os.listdir(wants) == [build]
    assert check(root) == [f"{device} is not enabled."]
    installation(root)[0].roll_back()
    assert not wants.exists() or os.listdir(wants) == []
    assert not (root / "usr/lib/systemd/system" / build).exists()


def test_check_names_what_was_changed(root: Path, version_1: Path) -> None:
    put(root, version_1)
    site = root / HOME / "current/site"
    (site / "pilotfish/cli.py").write_text("evil")
    (site / "odd/__init__.py").unlink()
    (site / "more.py").write_text("")
    (root / HOME / "current/bin/pilotfish").chmod(0o777)
    (root / "usr/lib/systemd/system/pilotfish-device.service").write_text("x")
    faults = "\n".join(check(root))
    for words in (
        "cli.py was changed",
        "odd/__init__.py is missing",
        "more.py is not a file of this version",
        "bin/pilotfish was changed",
        "device.service is missing or was changed",
    ):
        assert words in faults
    put(root, version_1)  # mends it
    assert check(root) == []


def test_uninstall_leaves_settings_and_purge_nothing(root: Path, version_1: Path) -> None:
    before = set(snapshot(root))
    put(root, version_1)
    installation(root)[0].uninstall(purge=False)
    left = {path for path in set(snapshot(root)) - before if not (root / path).is_dir()}
    users = {"etc/passwd", "etc/shadow", "etc/group", "etc/gshadow", "etc/.pwd.lock"}
    settings = {"device.toml", "keys/device.key", "keys/edge.pub", "signers/signer.pub"}
    assert left - users == {f"etc/pilotfish/{name}" for name in settings}
    with pytest.raises(InstallError, match="Nothing is installed"):
        installation(root)[0].uninstall(purge=False)
    assert check(root) == [f"Nothing is installed in {root}."]
    installation(root)[0].uninstall(purge=True)
    assert not (root / "etc/pilotfish").exists()
    assert not (root / "var/lib/pilotfish").exists()


# --- what is refused ---


def _edit(bundle: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change the manifest, with a digest that does not fit."""
    path = bundle / "manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def _rename(bundle: Path, path: str) -> None:
    """Name a file in the manifest by another path, with the right digest."""
    held = manifest.read(bundle)
    files = {path: held.files["keys/edge.pub"], **held.files}
    made = manifest.BundleManifest(held.version, held.role, held.python, held.machine, files)
    (bundle / "manifest.json").write_bytes(made.encode())


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _swap(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _link(bundle: Path, path: str) -> None:
    """Move something out of the bundle and put a link to it in its place."""
    moved = bundle.with_name("moved")
    (bundle / path).rename(moved)
    (bundle / path).symlink_to(moved)


def _other_wheel(bundle: Path, **options: object) -> None:
    (bundle / "wheels/odd-1.0-py3-none-any.whl").unlink()
    write_wheel(bundle / "wheels", "odd", **{"files": {"odd.py": b"1"}, **options})
    seal(bundle)


WHEEL = "wheels/pilotfish-1.0-py3-none-any.whl"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "swapped bit": (lambda b: _swap(b / WHEEL), "differs from the bundle's manifest"),
    "truncated file": (lambda b: _truncate(b / WHEEL), "differs from the bundle's manifest"),
    "other artifact": (
        lambda b: (b / "artifacts/draft/manifest.json").write_text("{}"),
        "differs from the bundle's manifest",
    ),
    "missing file": (lambda b: (b / WHEEL).unlink(), "is missing"),
    "missing manifest": (lambda b: (b / "manifest.json").unlink(), "is not a bundle"),
    "truncated manifest": (lambda b: _truncate(b / "manifest.json"), "damaged|changed"),
    "manifest of rubbish": (lambda b: (b / "manifest.json").write_bytes(b"\xff[1"), "damaged"),
    "manifest is a list": (lambda b: (b / "manifest.json").write_text("[]"), "damaged"),
    "deep manifest": (lambda b: (b / "manifest.json").write_text("[" * 10**5), "damaged"),
    "other version": (lambda b: _edit(b, lambda m: m.update(version="9")), "digest does not match"),
    "version with a path": (lambda b: _edit(b, lambda m: m.update(version="../9")), "damaged"),
    "other role": (lambda b: _edit(b, lambda m: m.update(role="root")), "damaged"),
    "later format": (lambda b: _edit(b, lambda m: m.update(format=2)), "format 2"),
    "setuid": (
        lambda b: _edit(b, lambda m: m["files"][WHEEL].update(mode=0o4755)),
        "damaged: its entry",
    ),
    "key twice": (
        lambda b: (b / "manifest.json").write_text(
            (b / "manifest.json").read_text().replace("{", '{"format": 1,', 1)
        ),
        "damaged",
    ),
    "extra file": (lambda b: (b / "wheels/extra.py").write_text(""), "does not name"),
    "extra room": (lambda b: (b / "extra").write_text(""), "does not name"),
    "empty folder": (lambda b: (b / "wheels/extra").mkdir(), "the empty folder"),
    "link to a file": (
        lambda b: _link(b, WHEEL),
        "neither a file nor a folder",
    ),
    "link to a folder": (
        lambda b: _link(b, "keys"),
        "neither a file nor a folder",
    ),
    "pipe": (lambda b: os.mkfifo(b / "wheels/p"), "neither a file nor a folder"),
    "path upwards": (lambda b: _rename(b, "keys/../../x"), "which no bundle may contain"),
    "absolute path": (lambda b: _rename(b, "/etc/passwd"), "which no bundle may contain"),
    "hidden path": (lambda b: _rename(b, "keys/.x"), "which no bundle may contain"),
    "foreign room": (lambda b: _rename(b, "bin/sh"), "which no bundle may contain"),
    "signers that are no keys": (
        lambda b: _rename(b, "signers/x.revoked"),
        "which no bundle may contain",
    ),
    "a folder of settings": (lambda b: _rename(b, "config/a/b"), "which no bundle may contain"),
    "settings in place of signers": (
        lambda b: _rename(b, "config/signers"),
        "which no bundle may contain",
    ),
    "path of a shell": (lambda b: _rename(b, "keys/a;b"), "which no bundle may contain"),
    "wheel for another Python": (
        lambda b: _other_wheel(b, tag="cp39-cp39-manylinux_2_17_x86_64"),
        "is not for Python",
    ),
    "a name that a terminal obeys": (
        lambda b: (b / "systemd/\x1b[31m\nred").write_text(""),
        r"contains systemd/\\x1b\[31m red,",
    ),
    "wheel upwards": (
        lambda b: _other_wheel(b, files={"../../../../evil.py": b""}),
        "no wheel may contain",
    ),
    "absolute wheel": (lambda b: _other_wheel(b, files={"/evil.py": b""}), "no wheel may contain"),
    "wheel's data upwards": (
        lambda b: _other_wheel(b, files={"odd-1.0.data/etc/evil": b""}),
        "has no target folder",
    ),
    "wheel without RECORD": (lambda b: _other_wheel(b, record=b""), "does not name"),
    "wheel with another RECORD": (
        lambda b: _other_wheel(b, record=b"odd.py,sha256=AAAA,1\n"),
        "RECORD",
    ),
    "two wheels, one file": (
        lambda b: _other_wheel(b, files={"pilotfish/cli.py": b"evil"}),
        "in another wheel too",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_bundle_is_refused_and_changes_nothing(
    root: Path, version_1: Path, version_2: Path, damage: str
) -> None:
    put(root, version_2)
    before = snapshot(root)
    spoil, words = DAMAGES[damage]
    spoil(version_1)
    for unsigned in (True, False):
        with pytest.raises(BundleError, match=words if unsigned else None) as caught:
            put(root, version_1, unsigned=unsigned, downgrade=True)
        assert "\n" not in str(caught.value)
    assert not list(root.parent.rglob("evil*"))
    assert snapshot(root) == before


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"python": "3.9"}, f"is for Python 3.9, but .* has {PYTHON}"),
        ({"machine": "aarch64" if MACHINE == "x86_64" else "x86_64"}, f"is for {MACHINE}"),
    ],
)
def test_a_bundle_for_another_board_is_refused(
    root: Path, tmp_path: Path, fields: dict[str, str], words: str
) -> None:
    before = snapshot(root)
    with pytest.raises(InstallError, match=words):
        put(root, tiny_bundle(tmp_path / "other", **fields))
    assert snapshot(root) == before


def test_another_digest_than_was_noted_is_refused(root: Path, version_1: Path) -> None:
    held = manifest.read(version_1)
    with pytest.raises(BundleError, match="digest is"):
        put(root, version_1, digest="0" * 64)
    for text in ("", held.digest[:12], held.digest + "0", held.digest[:-1] + "g"):
        with pytest.raises(UnsupportedError, match="64 hex digits"):
            put(root, version_1, digest=text)
    put(root, version_1, digest=held.digest.upper())


def test_a_bsp_is_told_from_its_root_file_system(tmp_path: Path) -> None:
    bsp = tmp_path / "Linux_for_Tegra"
    root = tiny_rootfs(bsp / "rootfs", machine="aarch64", python="3.10")
    (bsp / "apply_binaries.sh").touch()
    with pytest.raises(InstallError, match=re.escape(f"name {root}")):
        Rootfs.inspect(bsp)
    (root / "etc/nv_tegra_release").write_text("# R36 (release), REVISION: 4.3, BOARD: generic\n")
    result = Rootfs.inspect(root)
    assert result.pythons == {"3.10": "aarch64"}
    assert result.release == "R36 (release), REVISION: 4.3, BOARD: generic"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InstallError, match=r"run apply_binaries\.sh first"):
        Rootfs.inspect(empty)


def test_files_belong_to_root_so_only_root_installs() -> None:
    code = (
        "import os; from pathlib import Path; from pilotfish.deploy.rootfs import Rootfs\n"
        "from pilotfish.deploy.install import Installation; os.setgid(65534); os.setuid(65534)\n"
        "Installation(Rootfs(Path('/nowhere'), {}, None), print)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "run this command with sudo" in done.stderr.splitlines()[-1]


def test_two_installations_at_once_are_one_too_many(root: Path, version_1: Path) -> None:
    here, _ = installation(root)
    with here.versions.locked(), pytest.raises(InstallError, match="Another installation"):
        put(root, version_1)


# --- the command ---


def run(*arguments: object) -> int:
    signers = release() / "signers"
    return main(["flash", "--signers", str(signers), *map(str, arguments)])


def test_the_command_installs_checks_goes_back_and_uninstalls(
    root: Path, version_1: Path, version_2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        (version_1,),
        (version_2,),
        ("--check",),
        ("--rollback",),
        ("--uninstall", "--purge"),
    ):
        assert run("--rootfs", root, *arguments) == 0, capsys.readouterr().err
    assert run("--rootfs", root, "--check") == 1
    assert "Nothing is installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Name a bundle, or give one of"),
        (("--check", "bundle"), "Name a bundle, or give one of"),
        (("--check", "--purge"), "--purge goes with --uninstall"),
        (("--check", "--port", "22"), "go with --ssh"),
        (("/nowhere",), "is not a bundle"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    root: Path, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--rootfs", root, *arguments) in (64, 65)
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_the_installer_runs_from_the_wheel_with_nothing_but_python(
    tmp_path: Path, root: Path, version_1: Path
) -> None:
    wheel = pack(tmp_path).path
    done = subprocess.run(
        [
            *(os.path.realpath(sys.executable), "-S", "-s", "-B", "-m", "pilotfish.deploy.install"),
            *("--root", str(root), "--signers", str(release() / "signers"), str(version_1)),
        ],
        env={"PYTHONPATH": str(wheel), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert current(root) == "1.0"


def test_errors_have_the_exit_codes_that_the_help_names() -> None:
    for kind in (errors.BundleError, errors.InstallError, errors.ServiceError):
        assert issubclass(kind, PilotfishError)
        assert re.search(rf"\b{kind.exit_code} ", flash._EXAMPLE)
