"""`pilotfish keys` from the command line: what is written, what is refused, what is left alone."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import KeysError
from pilotfish.cli import main
from pilotfish.wire import keys
from pilotfish.wire.keys import DeviceKeys, EdgeKeys, read_public


def run(*arguments: object) -> int:
    return main(["keys", *map(str, arguments)])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that ends with the exit code for keys."""
    assert run(*arguments) == 77
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("pilotfish: ")
    return line


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "keys"


def test_a_real_command_line(folder: Path) -> None:
    command = [sys.executable, "-m", "pilotfish", "keys", "new", "edge", "--keys", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert Path(done.stdout.strip()) == folder / "edge.pub"
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert again.returncode == 77
    assert again.stdout == ""
    assert len(again.stderr.splitlines()) == 1


def test_new_list_and_allow(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("edge", "device"):
        assert run("new", name, "--keys", folder) == 0
    assert run("allow", "device", "--keys", folder) == 0
    assert run("allow", "device", "--keys", folder) == 0  # again is no harm
    keys.create(folder / "other", keys.DEVICE)
    other = folder / "other" / "device.pub"
    assert run("allow", other, "--name", "kitchen", "--keys", folder) == 0
    capsys.readouterr()
    assert run("list", "--json", "--keys", folder) == 0
    rows = json.loads(capsys.readouterr().out)
    public = read_public(folder / "device.pub").decode()
    assert [(row["name"], row["kind"]) for row in rows] == [
        ("device", "pair"), ("edge", "pair"), ("device", "allowed"), ("kitchen", "allowed"),
    ]  # fmt: skip
    assert [row["public"] == public for row in rows] == [True, False, True, False]
    assert run("list", "--keys", folder) == 0
    assert "kitchen" in capsys.readouterr().out
    assert EdgeKeys.load(folder).allowed.keys() == {public.encode(), read_public(other)}
    loaded = DeviceKeys.load(folder)
    assert zmq.curve_public(loaded.secret) == loaded.public == public.encode()


def test_signers_are_listed_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("new", "signer", "--keys", folder) == 0
    public = Path(capsys.readouterr().out.strip())
    assert run("list", "--json", "--keys", folder) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"name": "signer", "kind": "signer", "public": public.read_text().strip()}
    ]


def test_a_key_that_looks_like_markup_is_listed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "allowed").mkdir(parents=True)
    key = "[/]" + "a" * 37
    (folder / "allowed" / "odd.pub").write_text(f"{key}\n")
    assert run("list", "--keys", folder) == 0
    assert "[/]" in capsys.readouterr().out


def test_secrets_are_their_owners_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        assert run("new", "edge", "--keys", folder) == 0
    finally:
        os.umask(before)
    assert mode(folder / "edge.key") == 0o600
    assert mode(folder) == 0o700


@pytest.mark.parametrize("opened", [0o604, 0o602, 0o644, 0o666, 0o601])
def test_a_secret_that_others_can_read_is_refused(folder: Path, opened: int) -> None:
    keys.create(folder, keys.EDGE)
    (folder / "edge.key").chmod(opened)
    with pytest.raises(KeysError, match="chmod 600"):
        EdgeKeys.load(folder)
    (folder / "edge.key").chmod(0o640)  # a service's group may read it
    EdgeKeys.load(folder)


@pytest.mark.parametrize("existing", ["edge.key", "edge.pub"])
def test_new_overwrites_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], existing: str
) -> None:
    folder.mkdir(parents=True)
    (folder / existing).write_text("precious")
    assert existing in refused(capsys, "new", "edge", "--keys", folder)
    assert [path.name for path in folder.iterdir()] == [existing]
    assert (folder / existing).read_text() == "precious"


def test_allow_overwrites_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for owner in ("one", "two"):
        keys.create(folder / owner, keys.DEVICE)
    assert run("allow", folder / "one" / "device.pub", "--keys", folder) == 0
    capsys.readouterr()
    assert "--name" in refused(capsys, "allow", folder / "two" / "device.pub", "--keys", folder)
    listed = read_public(folder / "allowed" / "device.pub")
    assert listed == read_public(folder / "one" / "device.pub")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../edge", "a/b", "-x", "a b", "x" * 65, "é", "a\n"]
)
def test_names_that_are_no_names(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert "name" in refused(capsys, "new", "--keys", folder, "--", name)
    keys.create(folder, keys.DEVICE)
    if name:
        refused(capsys, "allow", "device", f"--name={name}", "--keys", folder)
    assert {path.name for path in folder.rglob("*")} == {"device.key", "device.pub"}


BAD_FILES = {
    "empty": b"",
    "short": b"a" * 39,
    "long": b"a" * 45,
    "not Z85": b'"' * 40,
    "too large a number": b"#" * 40,
    "not text": bytes(range(200, 240)),
    "a PEM file": b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
    "two lines": b"a" * 20 + b"\n" + b"a" * 20,
}


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_files_that_hold_no_key(
    folder: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    keys.create(folder, keys.EDGE)
    keys.create(folder, keys.DEVICE)
    (folder / "bad.pub").write_bytes(content)
    assert "bad.pub" in refused(capsys, "allow", "bad", "--keys", folder)
    assert "bad.pub" in refused(capsys, "list", "--keys", folder)
    (folder / "bad.pub").unlink()
    for name, load in (("edge", EdgeKeys.load), ("device", DeviceKeys.load)):
        (folder / f"{name}.key").write_bytes(content)
        with pytest.raises(KeysError, match=r"40 characters"):
            load(folder)


@given(st.binary(max_size=60))
def test_a_file_holds_a_key_or_is_refused(tmp_path_factory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.pub"
    path.write_bytes(content)
    with suppress(KeysError):
        assert len(read_public(path)) == 40


def test_what_is_missing_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeysError, match="keys new edge"):
        EdgeKeys.load(folder)
    with pytest.raises(KeysError, match="keys new device"):
        DeviceKeys.load(folder)
    keys.create(folder, keys.DEVICE)
    with pytest.raises(KeysError, match=r"copy edge\.pub"):
        DeviceKeys.load(folder)
    assert "nowhere.pub" in refused(capsys, "allow", "nowhere.pub", "--keys", folder)
    assert run("list", "--keys", folder / "none") == 0


def test_folders_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public = keys.create(tmp_path, keys.DEVICE)
    file = tmp_path / "file"
    file.write_text("no folder")
    refused(capsys, "new", "edge", "--keys", file)
    refused(capsys, "new", "edge", "--keys", file / "below")
    refused(capsys, "allow", public, "--keys", file)
    (tmp_path / "odd" / "edge.key").mkdir(parents=True)
    with pytest.raises(KeysError):
        EdgeKeys.load(tmp_path / "odd")
    (tmp_path / "odd" / "device.pub").mkdir()
    refused(capsys, "list", "--keys", tmp_path / "odd")


def broken_entries(allowed: Path) -> list[str]:
    """Write files without keys to an allow-list; returns their names."""
    (allowed / "empty.pub").write_bytes(b"")  # what a full disk left of older releases
    (allowed / "half.pub").write_text("half a k")
    (allowed / "dir.pub").mkdir()
    (allowed / "gone.pub").symlink_to(allowed / "nowhere")
    (allowed / "endless.pub").symlink_to("/dev/zero")
    os.mkfifo(allowed / "pipe.pub")  # without a writer
    return ["dir.pub", "empty.pub", "endless.pub", "gone.pub", "half.pub", "pipe.pub"]


def test_broken_entries_of_the_list_are_named_and_block_no_other_key(folder: Path) -> None:
    keys.create(folder, keys.EDGE)
    keys.allow(folder, keys.create(folder, keys.DEVICE), "good")
    names = broken_entries(folder / "allowed")
    listed = EdgeKeys.load(folder).allow_list
    assert [*listed.names.values()] == ["good"]
    assert [Path(sentence.split()[0]).name for sentence in listed.broken] == names


def test_a_broken_entry_is_mended_by_allowing_its_device_again(folder: Path) -> None:
    keys.create(folder, keys.EDGE)
    public = keys.create(folder, keys.DEVICE)
    (folder / "allowed").mkdir()
    (folder / "allowed" / "kitchen.pub").write_bytes(b"")
    assert run("allow", public, "--name", "kitchen", "--keys", folder) == 0
    assert EdgeKeys.load(folder).allowed == {read_public(public): "kitchen"}


def on_a_full_disk(room: int, *arguments: object) -> str:
    """`pilotfish keys` where only so many bytes of a file can be written; what it says."""
    command = ["prlimit", f"--fsize={room}", sys.executable, "-m", "pilotfish", "keys"]
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 77, done.stderr
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("room", [0, 20])
def test_a_full_disk_leaves_nothing_behind(folder: Path, room: int) -> None:
    line = on_a_full_disk(room, "new", "device", "--keys", folder)
    assert "device.key cannot be written: File too large" in line
    assert list(folder.iterdir()) == []
    public = keys.create(folder, keys.DEVICE)
    assert "cannot be written" in on_a_full_disk(room, "allow", public, "--keys", folder)
    assert list((folder / "allowed").iterdir()) == []
    keys.allow(folder, public)
    before = (folder / "allowed" / "device.pub").read_bytes()
    on_a_full_disk(room, "allow", public, "--keys", folder)  # it would write the same again
    assert (folder / "allowed" / "device.pub").read_bytes() == before


def test_modes_do_not_depend_on_the_umask(folder: Path) -> None:
    for umask in (0o000, 0o077):
        before = os.umask(umask)
        try:
            public = keys.create(folder / str(umask), keys.DEVICE)
            listed = keys.allow(folder / str(umask), public)
        finally:
            os.umask(before)
        assert mode(public.with_suffix(".key")) == 0o600
        assert mode(public) == mode(listed) == 0o644  # the edge, another user, reads them
        assert mode(listed.parent) == 0o755
    listed.parent.chmod(0o750)  # somebody's choice stays
    keys.allow(folder / str(umask), public)
    assert mode(listed.parent) == 0o750


def test_leftovers_of_a_kill_do_no_harm(folder: Path) -> None:
    keys.create(folder, keys.EDGE)
    public = keys.create(folder, keys.DEVICE)
    for left in (
        folder / "allowed" / ".x.pub.pilotfish-partial",
        folder / ".new.key.pilotfish-partial",
    ):
        left.parent.mkdir(exist_ok=True)
        left.write_text("ha")
    assert EdgeKeys.load(folder).allow_list.broken == ()
    keys.allow(folder, public, "x")
    keys.create(folder, "new")
    assert not [*folder.rglob("*partial")]


_TWINS = """
import sys
from pathlib import Path
from pilotfish.wire import keys
sys.stdin.readline()
try:
    keys.create(Path(sys.argv[1]), "device")
except keys.KeysError as error:
    print(error)
else:
    print("made")
"""


def test_of_two_that_make_one_pair_at_once_one_does(folder: Path) -> None:
    command = [sys.executable, "-c", _TWINS, str(folder)]
    twins = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for twin in twins:
        assert twin.stdin is not None
        twin.stdin.write("go\n")
        twin.stdin.flush()
    said = [twin.communicate(timeout=60)[0].strip() for twin in twins]
    assert said.count("made") == 1
    assert all("exists already" in each for each in said if each != "made")
    shutil.copy(folder / "device.pub", folder / "edge.pub")
    pair = DeviceKeys.load(folder)
    assert pair.public == read_public(folder / "device.pub")
