"""`pilotfish keys` on a machine with an installed service; who is denied; keys listed twice."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from pilotfish.base.errors import KeysError
from pilotfish.cli import keys as command
from pilotfish.cli import main
from pilotfish.wire import keys
from pilotfish.wire.keys import AllowList, EdgeKeys, read_public


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where services' settings are; HOME is elsewhere, and this is root."""
    folder = tmp_path / "etc"
    folder.mkdir()
    monkeypatch.setattr(command, "SETTINGS", folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PILOTFISH_KEYS", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return folder


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A device's public key."""
    return keys.create(tmp_path / "device", keys.DEVICE)


def install(etc: Path, service: str, line: str | None = None) -> Path:
    """An installed service; its folder of keys."""
    folder = etc / "keys"
    (etc / f"{service}.toml").write_text(f'keys = "{folder}"\n' if line is None else line)
    return folder


def run(*words: object) -> int:
    return main(["keys", *map(str, words)])


def output_of(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    captured = capsys.readouterr()
    return captured.out.strip(), captured.err.strip()


@pytest.mark.parametrize("service", ["edge", "worker"])
def test_root_finds_the_folder_that_the_service_reads(
    etc: Path, device: Path, capsys: pytest.CaptureFixture[str], service: str
) -> None:
    folder = install(etc, service)
    assert run("allow", device, "--name", "kitchen") == 0
    out, advice = output_of(capsys)
    assert out == str(folder / "allowed" / "kitchen.pub")
    assert f"sudo systemctl reload pilotfish-{service}" in advice
    assert run("new", "edge") == 0
    assert output_of(capsys)[0] == str(folder / "edge.pub")
    assert run("rotate") == 0
    out, advice = output_of(capsys)
    assert out == str(folder / "edge.pub")
    assert f"sudo systemctl reload pilotfish-{service}" in advice
    assert "--finish" in advice
    assert run("rotate", "--finish") == 0
    assert output_of(capsys)[0].splitlines() == [f"{folder}/edge.old.key", f"{folder}/edge.old.pub"]
    assert run("deny", "kitchen") == 0
    out, advice = output_of(capsys)
    assert out == str(folder / "allowed" / "kitchen.pub")
    assert f"sudo systemctl reload pilotfish-{service}" in advice
    assert EdgeKeys.load(folder).allowed == {}
    assert not (etc.parent / "home").exists()


def test_a_devices_pair_is_made_where_its_service_reads(
    etc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = install(etc, "device")
    assert run("new", "device") == 0
    assert output_of(capsys)[0] == str(folder / "device.pub")
    assert run("list") == 0
    assert str(folder)[-20:] in output_of(capsys)[0].replace("\n", "").replace(" ", "")
    # an edge of root's own on a machine that has a device only
    assert run("new", "edge") == 0
    assert output_of(capsys)[0] == str(tmp_path / "home/pilotfish/keys/edge.pub")


@pytest.mark.parametrize(
    "line", ["", "keys = true\n", "sessions = [[\n"], ids=["no keys", "bare", "broken"]
)
def test_a_service_whose_folder_is_not_known_is_no_reason_to_write_elsewhere(
    etc: Path, device: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    install(etc, "edge", line)
    assert run("allow", device) == 77
    out, error = output_of(capsys)
    assert out == ""
    assert str(etc / "edge.toml") in error
    assert "--keys" in error
    assert not (etc.parent / "home").exists()
    assert run("allow", device, "--keys", etc / "keys") == 0  # whatever the file holds


def test_a_folder_that_is_named_comes_first(
    etc: Path, device: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(etc, "edge")
    assert run("allow", device, "--keys", etc / "flag") == 0
    out, advice = output_of(capsys)
    assert out == str(etc / "flag" / "allowed" / "device.pub")
    assert "SIGHUP" in advice
    monkeypatch.setenv("PILOTFISH_KEYS", str(etc / "variable"))
    assert run("allow", device) == 0
    assert output_of(capsys)[0] == str(etc / "variable" / "allowed" / "device.pub")


def test_another_user_keeps_to_their_own_and_is_told_of_the_services(
    etc: Path, device: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(etc, "edge")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run("allow", device) == 0
    out, advice = output_of(capsys)
    assert out == str(etc.parent / "home/pilotfish/keys/allowed/device.pub")
    assert "sudo" in advice


def test_a_key_has_one_name(tmp_path: Path, device: Path) -> None:
    folder = tmp_path / "edge"
    keys.allow(folder, device, "kitchen")
    keys.allow(folder, device, "kitchen")  # the same again
    with pytest.raises(KeysError, match=r"kitchen\.pub allows this key already.*deny kitchen"):
        keys.allow(folder, device, "hall")
    assert not (folder / "allowed" / "hall.pub").exists()


def test_what_an_error_says_of_a_file_of_any_name_can_be_copied(
    tmp_path: Path, device: Path
) -> None:
    folder = tmp_path / "edge"
    by_hand = keys.allow(folder, device, "kitchen").rename(folder / "allowed" / "Bob's; board.pub")
    with pytest.raises(KeysError, match="allows this key already") as refused:
        keys.allow(folder, device, "hall")
    command = shlex.split(re.findall("`([^`]*)`", str(refused.value))[0])
    assert command[:3] == ["pilotfish", "keys", "deny"]
    assert keys.deny(folder, command[3]) == [by_hand]


def test_of_two_services_with_folders_of_their_own_the_other_is_named(
    etc: Path, device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key in the wrong list lets in a machine that nobody meant."""
    folder = install(etc, "edge")
    install(etc, "worker", f'keys = "{etc}/worker-keys"\n')
    assert run("allow", device) == 0
    out, advice = output_of(capsys)
    assert out == str(folder / "allowed/device.pub")
    assert f"The keys of pilotfish-worker are in {etc}/worker-keys" in advice
    assert "reload pilotfish-edge`" in advice
    assert run("allow", device, "--keys", etc / "worker-keys") == 0
    assert "reload pilotfish-worker`" in output_of(capsys)[1]


def test_a_service_without_keys_and_another_that_is_broken_are_no_matter(
    etc: Path, device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(etc, "edge", "")
    folder = install(etc, "worker")
    install(etc, "device", "sessions = [[\n")
    assert run("allow", device) == 0
    assert output_of(capsys)[0] == str(folder / "allowed/device.pub")
    assert run("list") == 0


def test_two_services_of_one_folder_are_both_reloaded(
    etc: Path, device: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for service in ("edge", "worker", "device"):
        folder = install(etc, service)
    assert run("allow", device) == 0
    out, advice = output_of(capsys)
    assert out == str(folder / "allowed/device.pub")
    assert "`sudo systemctl reload pilotfish-edge`, and pilotfish-worker, too" in advice
    monkeypatch.chdir(etc)
    assert run("deny", "device", "--keys", "keys") == 0
    assert "`sudo systemctl reload pilotfish-edge`, and pilotfish-worker" in output_of(capsys)[1]


def test_a_key_under_two_names_counts_once_and_both_are_named(tmp_path: Path, device: Path) -> None:
    """Of an older release, or copied by hand: whoever takes off one of them means the key."""
    folder = tmp_path / "edge"
    listed = keys.allow(folder, device, "kitchen")
    (folder / "allowed" / "hall.pub").write_bytes(listed.read_bytes())
    payload = AllowList.load(folder)
    assert payload.names == {read_public(device): "hall"}
    [fault] = payload.broken
    assert "kitchen.pub" in fault
    assert "hall.pub" in fault
    assert [path.stem for path in keys.deny(folder, "kitchen")] == ["hall", "kitchen"]
    assert AllowList.load(folder) == AllowList({})


def test_only_who_is_on_the_list_can_be_denied(tmp_path: Path, device: Path) -> None:
    folder = tmp_path / "edge"
    with pytest.raises(KeysError, match="allows nobody"):
        keys.deny(folder, "kitchen")
    keys.allow(folder, device, "kitchen")
    for name in ("hall", "../../device/device", "", "."):
        with pytest.raises(KeysError, match="allows kitchen"):
            keys.deny(folder, name)
    (folder / "allowed" / "broken.pub").write_text("")
    assert keys.deny(folder, "broken") == [folder / "allowed" / "broken.pub"]
    assert AllowList.load(folder).names == {read_public(device): "kitchen"}
