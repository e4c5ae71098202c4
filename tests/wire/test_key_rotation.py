"""`pilotfish keys rotate` in the folder: what each step writes, and what a kill leaves to mend."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
import zmq

from pilotfish.base.errors import KeysError
from pilotfish.base.files import write_whole
from pilotfish.wire import keys, rotation
from pilotfish.wire.keys import EDGE, FORMER, EdgeKeys, read_public


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.create(tmp_path / "keys", keys.EDGE)
    return tmp_path / "keys"


def test_a_rotation_from_begin_to_end(folder: Path) -> None:
    before = EdgeKeys.load(folder)
    assert before.former is None
    assert rotation.begin(folder) == folder / "edge.pub"
    within = EdgeKeys.load(folder)
    assert within.former == before.secret != within.secret
    assert zmq.curve_public(within.secret) == read_public(folder / "edge.pub")
    assert zmq.curve_public(before.secret) == read_public(folder / "edge.old.pub")
    modes = [stat.S_IMODE((folder / f"{name}.key").stat().st_mode) for name in (EDGE, FORMER)]
    assert modes == [0o600, 0o600]
    with pytest.raises(KeysError, match="--finish"):
        rotation.begin(folder)
    assert EdgeKeys.load(folder) == within
    rotation.finish(folder)
    assert EdgeKeys.load(folder).secret == within.secret
    assert EdgeKeys.load(folder).former is None
    assert sorted(path.name for path in folder.iterdir()) == ["edge.key", "edge.pub"]
    with pytest.raises(KeysError, match="not in a key rotation"):
        rotation.finish(folder)


def test_there_must_be_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    with pytest.raises(KeysError, match="keys new edge"):
        rotation.begin(tmp_path / "keys")


@pytest.mark.parametrize("writes", range(5))
def test_a_kill_in_between_is_mended_by_the_same_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """At each moment there are keys to serve with, and no secret in use is lost."""
    before = EdgeKeys.load(folder)
    done = 0

    def dies(path: Path, content: bytes, mode: int, **more: int) -> None:
        nonlocal done
        if done == writes:
            raise KeyboardInterrupt
        done += 1
        write_whole(path, content, mode, **more)

    with monkeypatch.context() as patch:
        patch.setattr(rotation, "write_whole", dies)
        if writes < 4:
            with pytest.raises(KeyboardInterrupt):
                rotation.begin(folder)
        else:
            rotation.begin(folder)
    left = EdgeKeys.load(folder)
    assert before.secret in (left.secret, left.former)
    if writes < 4:
        with pytest.raises(KeysError):
            rotation.finish(folder)
        rotation.begin(folder)
    within = EdgeKeys.load(folder)
    assert within.former == before.secret
    assert left.secret in (before.secret, within.secret)
    assert zmq.curve_public(within.secret) == read_public(folder / "edge.pub")
    rotation.finish(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to a group")
def test_in_a_services_folder_its_group_reads_both_keys(folder: Path) -> None:
    """Else a service that runs could not take them up: it has its key as a credential."""
    os.chown(folder, 0, 12345)
    rotation.begin(folder)
    for name in (EDGE, FORMER):
        status = (folder / f"{name}.key").stat()
        assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (0, 12345, 0o640)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to a group")
def test_no_kill_leaves_a_key_that_a_services_group_cannot_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would mend it: a second `keys rotate` writes no key that is there."""
    os.chown(folder, 0, 12345)
    seen = []

    def look(path: Path, content: bytes, mode: int, **more: int) -> None:
        write_whole(path, content, mode, **more)
        status = path.stat()
        if path.suffix == ".key":
            seen.append((status.st_gid, stat.S_IMODE(status.st_mode)))

    monkeypatch.setattr(rotation, "write_whole", look)
    rotation.begin(folder)
    assert seen == [(12345, 0o640)] * 2


def test_a_file_of_no_group_is_given_to_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under our units' system call filter every chown fails, whatever it asks for."""

    def filtered(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fchown", filtered)
    write_whole(tmp_path / "reload", b"1\n", 0o644)
    assert (tmp_path / "reload").read_bytes() == b"1\n"


def test_a_former_key_that_cannot_be_read_stops_no_edge(folder: Path) -> None:
    rotation.begin(folder)
    present = EdgeKeys.load(folder).secret
    (folder / "edge.old.key").write_text("nonsense")
    loaded = EdgeKeys.load(folder)
    assert (loaded.secret, loaded.former) == (present, None)
    assert "edge.old.key" in loaded.fault
    rotation.finish(folder)
    assert EdgeKeys.load(folder).fault == ""


def test_what_systemd_handed_over_is_older_than_the_folders_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = Path(shutil.copytree(folder, tmp_path / "credentials"))
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    rotation_key = zmq.curve_keypair()[1]
    (folder / "edge.key").write_bytes(rotation_key)
    (folder / "edge.key").chmod(0o640)
    assert keys.edge_secret(folder) != rotation_key
    assert keys.reread_secret(folder, EDGE) == rotation_key
    (folder / "edge.key").unlink()  # or root's alone
    assert keys.reread_secret(folder, EDGE) is None
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    with pytest.raises(KeysError, match="is missing"):
        keys.reread_secret(folder, EDGE)
