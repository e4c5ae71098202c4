"""Enrolment is attacked, over real sockets: who gets on the list, and what others see.

Each test is a threat of docs/keys.md. `python -m tests.system.test_enrolment_attacked` prints what
an eavesdropper sees.
"""

from __future__ import annotations

import os
import resource
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import AccessDeniedError, EdgeUnreachableError, InvitationError
from pilotfish.device_runtime.enrolment import enrol
from pilotfish.wire import invitation_socket, keys
from pilotfish.wire import messages as m
from pilotfish.wire.invitation import (
    EnrolRequest,
    Invitation,
    decode_enrol_reply,
    decode_enrol_request,
    parse_line,
)
from pilotfish.wire.invitation_socket import EdgeIdentity, OneTimeKey, Relayed
from pilotfish.wire.inviter import MOST_WRONG
from pilotfish.wire.keys import DeviceKeys
from tests.conftest import Pair
from tests.support.commands import start
from tests.support.enrolling import (
    WAIT_S,
    Invited,
    Recorder,
    allowed,
    inviting,
    outcome,
)
from tests.support.hostile import PROMPT, RawClient
from tests.support.tcp import connected
from tests.support.tiny import tiny_pair

GENERATION = {
    "protocol": "dsd", "temperature": 1.0, "seed": 0, "window": 3, "max_tokens": 60,
}  # fmt: skip
REFUSED = AccessDeniedError.code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The edge's keys."""
    folder = tmp_path_factory.mktemp("edge-keys")
    keys.create(folder, keys.EDGE)
    return folder


@pytest.fixture(scope="module")
def keyed_edge(pair: Pair, folder: Path) -> Iterator[EdgeServer]:
    with EdgeServer(pair.target, keys=folder, threads=1, connections=64) as server:
        yield server


def request(key: bytes, name: str = "eve") -> EnrolRequest:
    return EnrolRequest(key=z85.decode(key), name=name)


@contextmanager
def holder(invited: Invited, endpoint: str) -> Iterator[RawClient]:
    """A client that has the line, and may send anything."""
    with RawClient(endpoint, invited.keys()) as client:
        yield client


def reply_to(client: RawClient, *frames: bytes) -> str:
    """Send frames; return the name that the edge chose, or the code of its refusal."""
    client.send(*frames)
    assert client.socket.poll(int(WAIT_S * 1000)), "no answer"
    answer = decode_enrol_reply(client.socket.recv_multipart()[0])
    return answer.code if isinstance(answer, m.Failure) else answer.name


# Replayed, by another device


def test_a_used_line_enrols_nobody_else(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path
) -> None:
    with inviting(folder, keyed_edge.endpoint) as invited:
        assert outcome(invited.invitation, tmp_path / "first", "used") == "used"
    before = allowed(folder)
    assert outcome(invited.invitation, tmp_path / "second") == REFUSED
    assert allowed(folder) == before
    assert not (tmp_path / "second" / "edge.pub").exists()


def test_of_two_devices_that_race_with_one_line_one_is_enrolled(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path
) -> None:
    before = len(allowed(folder))
    with inviting(folder, keyed_edge.endpoint) as invited, ThreadPoolExecutor(4) as pool:
        tries = [
            pool.submit(outcome, invited.invitation, tmp_path / str(number), f"racer-{number}")
            for number in range(4)
        ]
        got = sorted(each.result(WAIT_S) for each in tries)
    assert got[:3] == [REFUSED] * 3
    assert got[3].startswith("racer-")
    assert len(allowed(folder)) == before + 1


def test_a_recorded_exchange_does_nothing_when_it_is_replayed(
    keyed_edge: EdgeServer, folder: Path
) -> None:
    """The invitation stays open: an inviter that does not answer counts what the edge relays."""
    recorder = Recorder(keyed_edge.endpoint)
    with closing(recorder), bare_inviter(folder) as (relay, once):
        with RawClient(recorder.endpoint, once) as client:
            client.say(request(zmq.curve_keypair()[0]))
            assert isinstance(invitation_socket.read_from_edge(relay), Relayed)
            for recorded in [*recorder.up] * 2:
                with connected(keyed_edge.endpoint) as replay:
                    replay.sendall(recorded)
                    replay.settimeout(2.0)
                    with suppress(OSError):
                        while replay.recv(65536):
                            pass
        relay.settimeout(1.0)
        with pytest.raises(TimeoutError):  # nothing else was relayed
            invitation_socket.read_from_edge(relay)


@contextmanager
def bare_inviter(folder: Path) -> Iterator[tuple[socket.socket, DeviceKeys]]:
    """Open an invitation by hand: its connection to the edge, and the keys in its line."""
    public, secret = zmq.curve_keypair()
    listening, path = invitation_socket.listen(folder, secrets.token_hex(8))
    try:
        with listening:
            listening.settimeout(WAIT_S)
            relay, _ = listening.accept()
        with relay:
            relay.settimeout(WAIT_S)
            relay.send(m.encode(OneTimeKey(public=public.decode())))
            identity = invitation_socket.read_from_edge(relay)
            assert isinstance(identity, EdgeIdentity)
            yield relay, DeviceKeys(secret, public, identity.public.encode())
    finally:
        path.unlink()


# Guessed


def test_guessed_lines_pass_no_handshake_and_do_not_end_the_invitation(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path
) -> None:
    with inviting(folder, keyed_edge.endpoint) as invited:
        for number in range(3 * MOST_WRONG):
            public, secret = zmq.curve_keypair()
            guess = Invitation(keyed_edge.endpoint, invited.invitation.edge, secret)
            assert guess.public == public
            with RawClient(keyed_edge.endpoint, DeviceKeys(secret, public, guess.edge)) as client:
                client.say(request(public))
                if not number:  # nothing comes back, not even a refusal
                    assert not client.socket.poll(500)
        assert outcome(guess, tmp_path / "eve") == REFUSED
        assert invited.is_open
        assert outcome(invited.invitation, tmp_path / "board", "guessed") == "guessed"


def test_the_public_half_alone_does_not_pass(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path
) -> None:
    """Whoever reads the memory or the messages of an inviter has no line."""
    with inviting(folder, keyed_edge.endpoint) as invited:
        _, other = zmq.curve_keypair()
        forged = DeviceKeys(other, invited.invitation.public, invited.invitation.edge)
        with RawClient(keyed_edge.endpoint, forged) as client:
            client.say(request(zmq.curve_keypair()[0]))
            assert not client.socket.poll(1000)
        assert invited.is_open


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"garbage"],
        [m.encode(m.Ping(nonce=1))],  # an ordinary message of a device
        [m.encode(request(b"0" * 40)), b"a frame"],
        [b"\x00" * 100_000],
        [m.encode(request(b"0" * 40))[:-1]],
        [m.encode(request(b"0" * 40)).replace(b"eve", b"e\nv")],
    ],
)
def test_the_holder_of_a_line_can_send_nothing_but_a_request(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path, frames: list[bytes]
) -> None:
    before = allowed(folder)
    with inviting(folder, keyed_edge.endpoint) as invited:
        with holder(invited, keyed_edge.endpoint) as client:
            for _ in range(MOST_WRONG):
                assert reply_to(client, *frames) == "malformed"
            with pytest.raises(InvitationError, match="wrong requests"):
                invited.device()
        assert outcome(invited.invitation, tmp_path) == REFUSED
    assert allowed(folder) == before


def test_the_line_itself_does_not_become_a_devices_key(
    keyed_edge: EdgeServer, folder: Path
) -> None:
    with inviting(folder, keyed_edge.endpoint) as invited:
        with holder(invited, keyed_edge.endpoint) as client:
            wish = m.encode(request(invited.invitation.public))
            assert reply_to(client, wish) == "malformed"
        assert invited.invitation.public not in allowed(folder).values()


@pytest.mark.parametrize("name", ["../../edge", "..", "/etc/passwd", "-rf", "", "a/b", "é" * 30])
def test_no_name_leaves_the_folder(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path, name: str
) -> None:
    before = {path.name for path in folder.iterdir()}
    with inviting(folder, keyed_edge.endpoint) as invited:
        with holder(invited, keyed_edge.endpoint) as client:
            public = zmq.curve_keypair()[0]
            got = reply_to(client, m.encode(request(public, name)))
        if got == "malformed":  # not printable ASCII
            return
        assert (folder / "allowed" / f"{got}.pub").read_bytes().strip() == public
    assert {path.name for path in folder.iterdir()} == before | {"allowed"}


# Late


def test_a_late_device_is_refused_whatever_the_clock_says(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inviting(folder, keyed_edge.endpoint, valid_s=1.0) as invited:
        set_back_s = time.time() - 86_400
        monkeypatch.setattr(time, "time", lambda: set_back_s)
        with pytest.raises(InvitationError, match="in time"):
            invited.device()
        assert outcome(invited.invitation, tmp_path) == REFUSED


def test_a_suspended_inviter_enrols_nobody_after_its_time(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path
) -> None:
    """Ctrl-Z: the edge still admits the key and relays, but the request is judged too late."""
    before = allowed(folder)
    words = ("--keys", folder, "--valid", 3)
    inviter = start("keys", "invite", *words)
    assert inviter.stdout is not None
    line = inviter.stdout.readline()
    inviter.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            trying = pool.submit(outcome, parse_line(line), tmp_path)
            time.sleep(3.5)
            inviter.send_signal(signal.SIGCONT)
            assert trying.result(WAIT_S) == REFUSED
    finally:
        inviter.send_signal(signal.SIGCONT)
        _, errors = inviter.communicate(timeout=WAIT_S)
    assert inviter.returncode == InvitationError.exit_code, errors
    assert allowed(folder) == before


# In the middle


def test_a_proxy_with_a_key_of_its_own_learns_nothing(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as proxy:
        proxy.linger = 0
        proxy.curve_server = True
        proxy.curve_publickey, proxy.curve_secretkey = zmq.curve_keypair()
        port = proxy.bind_to_random_port("tcp://127.0.0.1")
        recorder = Recorder(f"tcp://127.0.0.1:{port}")
        with closing(recorder), inviting(folder, keyed_edge.endpoint) as invited:
            with pytest.raises(EdgeUnreachableError, match="does not have the key"):
                enrol(invited.by(recorder.endpoint), tmp_path, "board", WAIT_S)
            assert not proxy.poll(0)
            assert invited.is_open
        assert_hidden(recorder.seen, invited, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"device.key", "device.pub"}


def test_a_proxy_without_encryption_learns_nothing(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as proxy:
        proxy.linger = 0
        port = proxy.bind_to_random_port("tcp://127.0.0.1")
        recorder = Recorder(f"tcp://127.0.0.1:{port}")
        with (
            closing(recorder),
            inviting(folder, keyed_edge.endpoint) as invited,
            pytest.raises(
                EdgeUnreachableError, match=r"^What answers at .* (is not|does not have) "
            ),
        ):
            enrol(invited.by(recorder.endpoint), tmp_path, "board", WAIT_S)
        assert_hidden(recorder.seen, invited, tmp_path)


def test_a_proxy_that_forwards_sees_ciphertext(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path, pair: Pair
) -> None:
    recorder = Recorder(keyed_edge.endpoint)
    with closing(recorder):
        seen, invited, texts = exchange(recorder, keyed_edge, folder, tmp_path, pair.draft)
    assert len(seen) > 1000
    assert_hidden(seen, invited, tmp_path)
    for text in texts:
        assert text not in seen
    # what it does see: that this is ZeroMQ with CURVE
    assert b"CURVE" in seen


def exchange(
    recorder: Recorder, edge: EdgeServer, folder: Path, device: Path, draft: Path
) -> tuple[bytes, Invited, list[bytes]]:
    """Enrol a device and let it answer, through a recorder.

    Returns the bytes on the link, the invitation, and what must not be among these bytes.
    """
    with inviting(folder, edge.endpoint) as invited:
        enrol(invited.by(recorder.endpoint), device, "in-the-middle", WAIT_S)
    prompt = b"a secret question of the user"
    ids = [*prompt]
    with Device(draft, recorder.endpoint, device, threads=1) as opened:
        tokens = opened.generate([each % 60 for each in ids], **GENERATION).tokens
    as_frames = [
        b"".join(each.to_bytes(width, "little") for each in some)
        for some in ([each % 60 for each in ids], tokens[:8])
        for width in (1, 2, 4)
    ]
    return recorder.seen, invited, [b"in-the-middle", *as_frames]


def assert_hidden(seen: bytes, invited: Invited, device: Path) -> None:
    """Assert that no key is among these bytes, in any form."""
    line = invited.invitation
    device_keys = [(device / name).read_bytes().strip() for name in ("device.key", "device.pub")]
    for key in (line.secret, line.public, line.edge, *device_keys):
        assert key not in seen
        assert z85.decode(key) not in seen
    assert line.line.encode() not in seen


# Flooded


def test_a_flood_of_strangers_and_of_garbage_disturbs_no_answer(
    keyed_edge: EdgeServer, folder: Path, pair: Pair, tmp_path: Path
) -> None:
    with inviting(folder, keyed_edge.endpoint) as invited:
        assert outcome(invited.invitation, tmp_path / "resident", "resident") == "resident"
    with Device(pair.draft, keyed_edge.endpoint, tmp_path / "resident", threads=1) as device:
        expected = device.generate(PROMPT, **GENERATION).tokens
        with inviting(folder, keyed_edge.endpoint) as invited, flooding(keyed_edge, invited):
            for _ in range(5):
                assert device.generate(PROMPT, **GENERATION).tokens == expected
            assert invited.is_open  # strangers cannot end it
            assert outcome(invited.invitation, tmp_path / "board", "flooded") == "flooded"
        with (
            inviting(folder, keyed_edge.endpoint) as invited,
            holder(invited, keyed_edge.endpoint) as client,
        ):
            for _ in range(20_000):
                client.send(b"x" * 600)
            assert device.generate(PROMPT, **GENERATION).tokens == expected
            with pytest.raises(InvitationError, match="wrong requests"):
                invited.device()
        assert device.generate(PROMPT, **GENERATION).tokens == expected


@contextmanager
def flooding(edge: EdgeServer, invited: Invited) -> Iterator[None]:
    """Flood with handshakes of unknown keys, and with bytes that are no handshake."""
    ended = threading.Event()

    def strangers() -> None:
        while not ended.is_set():
            public, secret = zmq.curve_keypair()
            with RawClient(edge.endpoint, DeviceKeys(secret, public, invited.invitation.edge)):
                time.sleep(0.01)

    def noise() -> None:
        while not ended.is_set():
            with suppress(OSError), connected(edge.endpoint) as client:
                client.sendall(os.urandom(4096))

    threads = [threading.Thread(target=each) for each in (strangers, noise)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:  # or a test that fails would leave threads for which Python waits at its exit
        ended.set()
        for thread in threads:
            thread.join()


# Killed, and a full disk


def test_an_edge_killed_between_request_and_answer(pair: Pair, tmp_path: Path) -> None:
    """The list has the device, which did not learn it: the same line succeeds at the next edge."""
    folder = tmp_path / "edge"
    keys.create(folder, keys.EDGE)
    with EdgeServer(pair.target, keys=folder, threads=1) as server:
        with inviting(folder, server.endpoint) as invited, ThreadPoolExecutor(1) as pool:
            trying = pool.submit(enrol, invited.invitation, tmp_path / "board", "board", 3.0)
            while "board" not in (allowed(folder) if (folder / "allowed").exists() else {}):
                time.sleep(0.001)
            os.kill(server.pid, signal.SIGKILL)
            with suppress(EdgeUnreachableError):  # or the answer was quicker
                trying.result(WAIT_S)
        line = invited.invitation
    with EdgeServer(pair.target, keys=folder, threads=1) as server:
        again = Invitation(server.endpoint, line.edge, line.secret)
        assert enrol(again, tmp_path / "board", "board").name == ""
        assert outcome(again, tmp_path / "eve") == REFUSED
    assert list(allowed(folder)) == ["board"]


def test_a_killed_inviter_ends_its_invitation(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path
) -> None:
    inviter = start("keys", "invite", "--keys", folder)
    assert inviter.stdout is not None
    line = parse_line(inviter.stdout.readline())
    inviter.kill()
    inviter.communicate(timeout=WAIT_S)
    before = allowed(folder)
    time.sleep(1.0)
    assert outcome(line, tmp_path) == REFUSED
    assert allowed(folder) == before


def test_an_inviter_killed_between_the_list_and_its_answer(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path
) -> None:
    """The device is on the list, in force at once, and learns so by its own key."""
    with ThreadPoolExecutor(1) as pool:
        with bare_inviter(folder) as (relay, once):
            line = Invitation(keyed_edge.endpoint, once.edge, once.secret)
            trying = pool.submit(outcome, line, tmp_path, "board")
            relayed = invitation_socket.read_from_edge(relay)
            assert isinstance(relayed, Relayed)
            wish = decode_enrol_request(relayed.header)
            keys.enrol(folder, z85.encode(wish.key), "killed")
        assert trying.result(WAIT_S) == ""
    assert allowed(folder)["killed"] == keys.read_public(tmp_path / "device.pub")


def test_a_device_is_enrolled_whole_or_not_at_all(
    keyed_edge: EdgeServer, folder: Path, tmp_path: Path
) -> None:
    """The inviter cannot write a byte, as on a full disk, and then it can."""
    public = zmq.curve_keypair()[0]
    before = allowed(folder)
    inviter = start("keys", "invite", "--keys", folder)
    assert inviter.stdout is not None
    line = parse_line(inviter.stdout.readline())
    resource.prlimit(inviter.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    once = DeviceKeys(line.secret, line.public, line.edge)
    with RawClient(keyed_edge.endpoint, once) as client:
        for _ in range(MOST_WRONG + 1):  # not the device's fault, so not counted
            assert reply_to(client, m.encode(request(public, "full"))) == "internal"
        assert allowed(folder) == before
        assert not [*(folder / "allowed").glob(".*")]
        resource.prlimit(inviter.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert reply_to(client, m.encode(request(public, "full"))) == "full"
    _, errors = inviter.communicate(timeout=WAIT_S)
    assert "full.pub cannot be written" in errors
    assert allowed(folder) == before | {"full": public}


def main() -> None:
    """Print what somebody between device and edge sees of an enrolment and an answer."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        draft, target = tiny_pair(root)
        keys.create(root / "edge", keys.EDGE)
        with EdgeServer(target, keys=root / "edge", threads=1) as edge:
            recorder = Recorder(edge.endpoint)
            with closing(recorder):
                seen, invited, texts = exchange(
                    recorder, edge, root / "edge", root / "board", draft
                )
        assert_hidden(seen, invited, root / "board")
        rows = zip(recorder.up, recorder.down, strict=True)
        print(f"connections: {len(recorder.up)}; bytes up, down of each:")
        for up, down in rows:
            print(f"  {len(up):6} {len(down):6}   begins {bytes(up[:12])!r}")
        print("in clear:", [word for word in (b"CURVE", b"READY", b"INITIATE") if word in seen])
        hidden = [text for text in texts if text not in seen]
        print(f"keys seen: none of 5; names, prompts and tokens seen: {len(texts) - len(hidden)}")


if __name__ == "__main__":
    main()
