"""Two machines by one line: an edge invites, a device enrols itself, and both go on without it."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zmq

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import EdgeUnreachableError, InvitationError, KeysError, UnsupportedError
from pilotfish.cli.enrolment import device_address
from pilotfish.device_runtime.enrolment import ADDRESS_FILE, enrol, stored_address
from pilotfish.wire import invitation_socket, keys
from pilotfish.wire.address import outgoing_address
from pilotfish.wire.invitation import PREFIX, Invitation, parse_line
from pilotfish.wire.inviter import Inviter
from pilotfish.wire.messages import encode
from tests.conftest import Pair
from tests.support.commands import command, start
from tests.support.enrolling import allowed, inviting, new_device, outcome
from tests.support.hostile import PROMPT

START_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The edge's keys."""
    folder = tmp_path_factory.mktemp("edge-keys")
    keys.create(folder, keys.EDGE)
    return folder


@pytest.fixture(scope="module")
def keyed_edge(pair: Pair, folder: Path) -> Iterator[EdgeServer]:
    with EdgeServer(pair.target, keys=folder, threads=1) as server:
        yield server


def test_a_line_enrols_a_device_which_the_edge_admits_at_once(
    keyed_edge: EdgeServer, folder: Path, pair: Pair, tmp_path: Path
) -> None:
    with inviting(folder, keyed_edge.endpoint) as invited:
        line = invited.invitation.line
        assert re.fullmatch(r"pf1_[A-Za-z0-9_-]+", line)
        done = enrol(parse_line(f"pilotfish device up {line}\n"), tmp_path, "Küche 1")
        assert (done.address, done.name) == (keyed_edge.endpoint, "K-che-1")
        device = invited.device()
    assert (device.name, device.peer) == ("K-che-1", "127.0.0.1")
    assert allowed(folder)["K-che-1"] == device.key == keys.read_public(tmp_path / "device.pub")
    assert stored_address(tmp_path) == keyed_edge.endpoint
    assert (tmp_path / "device.key").stat().st_mode & 0o777 == 0o600
    with Device(pair.draft, keyed_edge.endpoint, tmp_path, threads=1) as opened:
        assert opened.generate(PROMPT, max_tokens=4).tokens
    # again with the same line, long after it ended: the device's own key already connects
    assert enrol(parse_line(line), tmp_path, "other").name == ""
    assert list(allowed(folder).values()).count(device.key) == 1
    assert not list((folder / "invitations").iterdir())


def test_a_device_that_is_enrolled_keeps_its_name(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path
) -> None:
    for wish in ("hall", "attic"):
        with inviting(folder, keyed_edge.endpoint) as invited:
            assert outcome(invited.invitation, tmp_path, wish) == "hall"
            assert invited.device().name == "hall"
    assert "attic" not in allowed(folder)


def test_two_devices_of_one_name(keyed_edge: EdgeServer, folder: Path, tmp_path: Path) -> None:
    with inviting(folder, keyed_edge.endpoint) as invited:
        assert outcome(invited.invitation, tmp_path / "first", "ubuntu") == "ubuntu"
    before = (folder / "allowed" / "ubuntu.pub").read_bytes()
    with inviting(folder, keyed_edge.endpoint) as invited:
        assert outcome(invited.invitation, tmp_path / "second", "ubuntu") == "ubuntu-2"
    assert (folder / "allowed" / "ubuntu.pub").read_bytes() == before


def test_the_operator_may_name_the_device(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path
) -> None:
    with inviting(folder, keyed_edge.endpoint, name="gate") as invited:
        assert outcome(invited.invitation, tmp_path / "first", "admin") == "gate"
    problems: list[str] = []
    with inviting(folder, keyed_edge.endpoint, name="gate", problem=problems.append) as invited:
        assert outcome(invited.invitation, tmp_path / "second", "gate") == "internal"
        assert invited.is_open
    assert "another key" in problems[0]


def test_several_invitations_at_a_time(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path
) -> None:
    with (
        inviting(folder, keyed_edge.endpoint) as first,
        inviting(folder, keyed_edge.endpoint) as other,
    ):
        assert outcome(other.invitation, tmp_path / "b", "desk-b") == "desk-b"
        assert first.is_open
        assert outcome(first.invitation, tmp_path / "a", "desk-a") == "desk-a"


def test_no_edge_uses_the_folder(tmp_path: Path) -> None:
    keys.create(tmp_path, keys.EDGE)
    with Inviter(tmp_path, valid_s=60.0) as inviter:
        assert inviter.await_edge(0.1) is None
    assert not list((tmp_path / "invitations").iterdir())


def test_a_killed_inviter_leaves_a_socket_that_the_next_removes(tmp_path: Path) -> None:
    keys.create(tmp_path, keys.EDGE)
    inviter = Inviter(tmp_path, valid_s=60.0)
    inviter._listening.close()  # as a kill does
    with Inviter(tmp_path, valid_s=60.0):
        assert len(list((tmp_path / "invitations").iterdir())) == 1


def test_a_folder_with_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    keys.create(folder, keys.EDGE)
    with Inviter(folder, valid_s=60.0):
        assert len(list((folder / "invitations").iterdir())) == 1


def test_every_cut_and_every_changed_character_is_noticed(tmp_path: Path) -> None:
    public = keys.read_public(keys.create(tmp_path, "edge"))
    secret = keys.edge_secret(tmp_path)
    whole = Invitation("tcp://edge.example:7077", public, secret)
    line = whole.line
    assert parse_line(line) == whole
    assert parse_line(f"$ pilotfish device up {line[:60]}\n  {line[60:]}\n") == whole  # wrapped
    assert secret.decode() not in repr(whole)
    for at in range(len(PREFIX), len(line)):
        for bad in (line[:at], line[:at] + line[at + 1 :], line[:at] + "é" + line[at + 1 :]):
            with pytest.raises(InvitationError, match="cut or garbled"):
                parse_line(bad)
        with pytest.raises(InvitationError):
            parse_line(line[:at] + ("A" if line[at] != "A" else "B") + line[at + 1 :])
    with pytest.raises(InvitationError, match="begins with pf1_"):
        parse_line("tcp://edge.example:7077")


def test_the_address_in_the_line() -> None:
    assert device_address("tcp://10.0.0.1:7077", None) == "tcp://10.0.0.1:7077"
    assert device_address("tcp://0.0.0.0:7077", "edge.example") == "tcp://edge.example:7077"
    assert device_address("tcp://0.0.0.0:7077", "edge.example:99") == "tcp://edge.example:99"
    assert device_address("tcp://0.0.0.0:7077", "tcp://edge.example:99") == "tcp://edge.example:99"
    assert device_address("tcp://[::]:7077", "2001:db8::7") == "tcp://[2001:db8::7]:7077"
    assert device_address("tcp://[::]:7077", "[2001:db8::7]:99") == "tcp://[2001:db8::7]:99"
    assert device_address("ipc:///run/edge", None) == "ipc:///run/edge"
    if outgoing_address(ipv6=False) is None:  # without a default route
        with pytest.raises(UnsupportedError, match="--address"):
            device_address("tcp://0.0.0.0:7077", None)
    else:
        assert (
            device_address("tcp://0.0.0.0:7077", None)
            == f"tcp://{outgoing_address(ipv6=False)}:7077"
        )


def test_nobody_answers(tmp_path: Path) -> None:
    public, secret = (keys.read_public(keys.create(tmp_path / "x", "edge")),) * 2
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    invitation = Invitation(f"tcp://127.0.0.1:{port}", public, secret)
    with pytest.raises(EdgeUnreachableError, match="firewall"):
        enrol(invitation, tmp_path, within_s=0.5)
    assert not (tmp_path / "edge.pub").exists()
    with pytest.raises(KeysError, match="edge up"):
        stored_address(tmp_path)


def test_both_commands(pair: Pair, tmp_path: Path) -> None:
    """`edge up` prints the line, `device up -` reads it, and a second start needs none."""
    at_edge = ("--target", pair.target, "--threads", 1, "--listen", "tcp://127.0.0.1:0")
    edge = start("edge", "up", *at_edge, "--keys", tmp_path / "edge")
    at_device = ("--draft", pair.draft, "--listen", "127.0.0.1:0", "--keys", tmp_path / "device")
    try:
        assert edge.stdout is not None
        line = edge.stdout.readline()
        assert line.startswith("pilotfish device up pf1_")
        for words in (["-", "--name", "desk"], []):
            device = start_with(line if words else "", "device", "up", *words, *at_device)
            try:
                assert device.stdout is not None
                output = ""
                while "Ctrl-C" not in output:
                    part = device.stdout.readline()
                    assert part, output
                    output += part
                assert ("enrolled as desk" in output) == bool(words)
                url = re.search(r"http://[0-9.:]+", output)
                assert url is not None
                question = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
                answer = httpx.post(f"{url[0]}/v1/chat/completions", json=question, timeout=30)
                assert answer.status_code == 200, answer.text
            finally:
                device.kill()
                device.wait(START_S)
        assert list(allowed(tmp_path / "edge")) == ["desk"]
        # a further device, beside the running edge
        further = start("keys", "invite", "--keys", tmp_path / "edge", "--device-name", "second")
        assert further.stdout is not None
        line = further.stdout.readline()
        assert outcome(parse_line(line), tmp_path / "two") == "second"
        _, errors = further.communicate(timeout=START_S)
        assert further.returncode == 0
        assert "enrolled: second, key " in errors
        assert new_device(tmp_path / "three") not in allowed(tmp_path / "edge").values()
    finally:
        edge.terminate()
        _, errors = edge.communicate(timeout=START_S)
    assert edge.returncode == 0, errors
    assert "enrolled: desk, key " in errors
    assert not list((tmp_path / "edge" / "invitations").iterdir())


def start_with(text: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a command with this line in its stdin, a pipe that stays open, as `edge up`'s does.

    Its stdout has all that it prints.
    """
    process = subprocess.Popen(
        command(*arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(f"{text.strip()}\n")
    process.stdin.flush()
    return process


def test_an_invitation_without_an_edge_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pilotfish.cli import keys as command_keys
    from pilotfish.cli import main

    monkeypatch.setattr(command_keys, "_EDGE_WITHIN_S", 0.1)
    keys.create(tmp_path, keys.EDGE)
    began_s = time.monotonic()
    assert main(["keys", "invite", "--keys", str(tmp_path)]) == EdgeUnreachableError.exit_code
    assert time.monotonic() - began_s < 5.0
    assert "No edge that uses the keys in" in capsys.readouterr().err
    assert not (tmp_path / ADDRESS_FILE).exists()


@pytest.mark.parametrize("name", ["my board", "board"])
def test_a_name_that_cannot_be_given_is_refused_before_a_line_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    from pilotfish.cli import main

    keys.create(tmp_path, keys.EDGE)
    keys.allow(tmp_path, keys.create(tmp_path / "board", keys.DEVICE), "board")
    words = ["keys", "invite", "--keys", str(tmp_path), "--device-name", name]
    assert main(words) == keys.KeysError.exit_code
    printed = capsys.readouterr()
    assert name in printed.err
    assert not printed.out


def test_a_link_in_place_of_the_sockets_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o711)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "invitations").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(keys.KeysError, match="cannot be made"):
        Inviter(tmp_path / "keys", valid_s=1.0)
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o711
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_folder_with_another_edges_keys_is_left_alone(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path
) -> None:
    public = keys.create(tmp_path, keys.EDGE).read_bytes()
    with inviting(folder, keyed_edge.endpoint) as invited:
        with pytest.raises(KeysError, match="another edge"):
            enrol(invited.invitation, tmp_path, "board")
        assert (tmp_path / "edge.pub").read_bytes() == public
        assert enrol(invited.invitation, tmp_path / "own", "board").name  # the line is still good


def test_who_has_another_key_than_the_folders_is_no_edge(tmp_path: Path) -> None:
    keys.create(tmp_path, keys.EDGE)
    with Inviter(tmp_path, valid_s=60.0) as inviter:
        [path] = invitation_socket.socket_paths(tmp_path)
        with invitation_socket.connect(path) as connection:
            identity = invitation_socket.EdgeIdentity(
                endpoint="tcp://evil.example:7077", public=zmq.curve_keypair()[0].decode()
            )
            connection.send(encode(identity))
            assert inviter.await_edge(0.5) is None
