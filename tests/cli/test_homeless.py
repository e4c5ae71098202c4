"""A user without HOME and without a passwd entry, as in containers and under `env -i`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pilotfish.base.errors import KeysError
from pilotfish.engines import cache
from pilotfish.wire import keys

UNKNOWN_UID = 12345


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Have no home; returns the folder for temporary files."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "PILOTFISH_CACHE", "PILOTFISH_KEYS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    cache._temporary_folder.cache_clear()
    return tmp_path


@pytest.mark.parametrize(
    "use",
    [
        keys.DeviceKeys.load,
        keys.EdgeKeys.load,
        keys.listing,
        keys.AllowList.load,
        lambda folder: keys.create(folder, "device"),
    ],
)
def test_keys_without_a_home_are_refused_with_what_to_do(
    homeless: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], object]
) -> None:
    monkeypatch.chdir(homeless)
    with pytest.raises(KeysError, match="name a folder with --keys or PILOTFISH_KEYS"):
        use(keys.default_directory())
    assert list(homeless.iterdir()) == []


def test_caches_without_a_home_are_private_temporary_files(
    homeless: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = cache.cache_directory()
    assert folder == homeless / f"pilotfish-{os.getuid()}" == cache.cache_directory()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "set HOME, or set PILOTFISH_CACHE" in caplog.text


def test_a_cache_that_others_could_have_filled_is_not_taken(homeless: Path) -> None:
    planted = homeless / f"pilotfish-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    result = cache.cache_directory()
    assert result != planted
    assert result.stat().st_mode & 0o777 == 0o700
    result.rmdir()


def test_a_home_named_by_nothing_is_the_passwd_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative/paths/are/to/be/ignored")
    monkeypatch.delenv("PILOTFISH_KEYS", raising=False)
    at_home = os.path.expanduser(f"~{os.environ.get('USER', 'root')}")
    assert keys.default_directory() == Path(at_home) / ".config/pilotfish/keys"


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root and setpriv, to become a user without a passwd entry",
)
def test_commands_of_a_user_without_a_home(tmp_path: Path) -> None:
    """A stranger who may read all files, so that the interpreter may lie in root's home."""
    capability = "-all,+dac_read_search"
    stranger = ["setpriv", f"--reuid={UNKNOWN_UID}", f"--regid={UNKNOWN_UID}", "--clear-groups"]
    stranger += [f"--inh-caps={capability}", f"--ambient-caps={capability}"]
    for arguments, code, reply in (
        (("--version",), 0, "pilotfish"),
        (("edge", "serve", "--help"), 0, "~/.config/pilotfish/keys"),
        (("probe", "tcp://127.0.0.1:1", "--keys"), 77, "This user has no home folder"),
    ):
        done = subprocess.run(
            [*stranger, sys.executable, "-m", "pilotfish", *arguments],
            check=False,
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"]},
            cwd="/",
        )
        assert done.returncode == code, done.stderr
        assert reply in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
