"""When a socket connects anew after a handshake that failed, and what it takes for the reason."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import zmq

from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.link import attempts as module
from pilotfish.wire.link.attempts import CERTAIN_HANG_UPS, ConnectAttempts, ConnectFailure
from pilotfish.wire.link.diagnosis import AddressState, Diagnosis, diagnose

Serve = Callable[[socket.socket], None]
CRYPTOGRAPHIC, MISMATCH = 0x11000001, 0x11000002


class Clock:
    """Stands in for `time`, and for chance: every pause has its mean."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def uniform(self, low: float, high: float) -> float:
        return (low + high) / 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "random", clock)
    return clock


def fail(attempts: ConnectAttempts, event: zmq.Event, value: int = 0) -> float:
    """Have an attempt fail, and wait for the next one; seconds until it was due."""
    attempts.note(zmq.Event.CONNECTED, 9)
    attempts.note(event, value)
    attempts.note(zmq.Event.DISCONNECTED, 9)
    assert attempts.stopped
    left_s = attempts.wait_s
    assert attempts.due == (left_s == 0.0)
    return left_s


REASONS = {
    ConnectFailure.KEY: (zmq.Event.HANDSHAKE_FAILED_AUTH, 400),
    ConnectFailure.MECHANISM: (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, MISMATCH),
    ConnectFailure.OTHER: (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, CRYPTOGRAPHIC),
    ConnectFailure.CLOSED: (zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, errno.EPIPE),
    ConnectFailure.TIMEOUT: (zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, errno.EAGAIN),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_is_told_by_the_event(reason: ConnectFailure) -> None:
    attempts = ConnectAttempts()
    fail(attempts, *REASONS[reason])
    assert attempts.failure is reason
    attempts.note(zmq.Event.HANDSHAKE_SUCCEEDED, 9)
    assert attempts.failure is None


def test_a_refused_key_is_tried_ever_later_up_to_half_a_minute(clock: Clock) -> None:
    attempts, waits = ConnectAttempts(), []
    for _ in range(12):
        waits.append(fail(attempts, *REASONS[ConnectFailure.KEY]))
        clock.now_s += waits[-1]
        assert attempts.due
        attempts.note_started()
        assert not attempts.stopped
    assert waits[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert waits[-2:] == pytest.approx([30.0, 30.0])


def test_what_may_be_an_edge_that_is_starting_is_tried_each_second(clock: Clock) -> None:
    attempts = ConnectAttempts()
    waits = [fail(attempts, *REASONS[ConnectFailure.CLOSED]) for _ in range(40)]
    assert waits[: CERTAIN_HANG_UPS - 1] == pytest.approx([0.1] * (CERTAIN_HANG_UPS - 1))
    assert max(waits) == pytest.approx(1.0)


def test_a_wrong_edge_pub_is_told_only_after_many_handshakes(clock: Clock) -> None:
    """Half of those with an edge that answers to two keys by turns fail, too."""
    attempts = ConnectAttempts()
    for _ in range(CERTAIN_HANG_UPS - 1):
        fail(attempts, *REASONS[ConnectFailure.CLOSED])
        attempts.wrong_key = True
        assert not attempts.surely_wrong_key
    fail(attempts, *REASONS[ConnectFailure.CLOSED])
    assert attempts.surely_wrong_key
    waits = [fail(attempts, *REASONS[ConnectFailure.CLOSED]) for _ in range(12)]
    assert waits[-1] == pytest.approx(30.0)


def test_an_edge_that_was_away_has_not_broken_off_any_handshake(clock: Clock) -> None:
    """It is back in the middle of a rotation: its first handshake may meet the other key."""
    attempts = ConnectAttempts()
    for _ in range(5 * CERTAIN_HANG_UPS):
        for event in (zmq.Event.CONNECT_DELAYED, zmq.Event.CLOSED, zmq.Event.CONNECT_RETRIED):
            attempts.note(event, 9)
    for _ in range(CERTAIN_HANG_UPS):
        fail(attempts, *REASONS[ConnectFailure.TIMEOUT])
    attempts.wrong_key = True
    fail(attempts, *REASONS[ConnectFailure.CLOSED])
    assert not attempts.surely_wrong_key


def test_whoever_waits_has_an_attempt_of_his_own_but_not_more_than_four_a_second(
    clock: Clock,
) -> None:
    attempts = ConnectAttempts()
    for _ in range(10):
        fail(attempts, *REASONS[ConnectFailure.KEY])
    assert attempts.wait_s > 10.0
    since_s = clock.now_s
    attempts.retry_now()
    assert not attempts.due
    clock.now_s += 0.25
    assert attempts.due
    assert not attempts.failed_since(since_s)  # what was refused before says nothing of now
    attempts.note_started()
    fail(attempts, *REASONS[ConnectFailure.KEY])
    assert attempts.failed_since(since_s)


def test_no_attempt_is_made_beside_those_of_zeromq(clock: Clock) -> None:
    """It tries again by itself after a lost connection, and where nobody takes one."""
    attempts = ConnectAttempts()
    for event in (zmq.Event.CONNECT_DELAYED, zmq.Event.CLOSED, zmq.Event.CONNECT_RETRIED):
        attempts.note(event, 9)
        clock.now_s += 100.0
        assert not attempts.due
    assert attempts.failure is ConnectFailure.CONNECT
    attempts.note(zmq.Event.DISCONNECTED, 9)
    assert not attempts.due
    attempts.note(zmq.Event.CONNECT_RETRIED, 100)
    clock.now_s += 100.0
    assert not attempts.due


@contextmanager
def listening(serve: Serve) -> Iterator[int]:
    """A port on which ``serve`` has each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        serve(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def web(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + b"x" * 100)


def mute(connection: socket.socket) -> None:
    connection.recv(100)
    time.sleep(0.5)


def full(sent: int) -> Serve:
    """An edge with keys that hangs up after so many bytes of its greeting."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)

    def hang_up(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(greeting[:sent])
        if sent == 64:
            time.sleep(0.1)

    return hang_up


def resets_first(serve: Serve) -> Serve:
    """A peer that ends its first connections with FIN and RST, before a byte was sent."""
    ended = []

    def hang_up(connection: socket.socket) -> None:
        if len(ended) == 2:
            return serve(connection)
        ended.append(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
        return None

    return hang_up


def drip(connection: socket.socket) -> None:
    """What would hold a look for minutes."""
    for _ in range(20):
        connection.sendall(b"H")
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("serve", "finding"),
    [
        (lambda _: None, AddressState.NO_EDGE),
        (web, AddressState.NO_EDGE),
        (mute, AddressState.MUTE),
        (drip, AddressState.NO_EDGE),
        (full(10), AddressState.HANGS_UP),
        (full(64), AddressState.HANGS_UP),
        (resets_first(full(64)), AddressState.HANGS_UP),
    ],
    ids=["hangs-up", "web", "mute", "drip", "full-early", "full-late", "full-resets"],
)
def test_what_is_no_edge_is_not_taken_for_one(serve: Serve, finding: AddressState) -> None:
    with listening(serve) as port:
        begun_s = time.monotonic()
        assert diagnose("127.0.0.1", port, 0.3) is finding
        assert time.monotonic() - begun_s < 1.5


def banner(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
    connection.recv(100)


def ends_at_once(connection: socket.socket) -> None:
    connection.recv(1)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize("curve", [False, True])
@pytest.mark.parametrize("serve", [banner, ends_at_once, web])
def test_what_speaks_another_protocol_is_a_failure_and_tried_ever_later(
    serve: Serve, curve: bool
) -> None:
    """ZeroMQ names no failed handshake where a socket with keys hears ZMTP 1.0, as it thinks."""
    public, secret = zmq.curve_keypair()
    held = DeviceKeys(secret, public, public) if curve else None
    with listening(serve) as port:
        channel = EdgeChannel(f"tcp://127.0.0.1:{port}", held, 1000)
        try:
            end_s = time.monotonic() + 2.5
            while time.monotonic() < end_s:
                channel.receive_raw(0.02)
            assert channel.attempts.failure in (ConnectFailure.OTHER, ConnectFailure.CLOSED)
            assert 2 <= channel.attempts.handshakes_failed <= 13
            assert not channel.connected
        finally:
            channel.close()


def test_a_machine_without_descriptors_blames_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "create_connection", none)
    with pytest.raises(OSError, match="Too many open files"):
        diagnose("127.0.0.1", 7)
    diagnosis = Diagnosis("tcp://127.0.0.1:7")
    diagnosis._probe()
    assert diagnosis.state is None


def test_an_address_without_anybody() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert diagnose("127.0.0.1", bound.getsockname()[1]) is AddressState.REFUSED
    assert diagnose("no-such-machine.invalid", 7) is AddressState.NO_NAME
    assert diagnose("." * 70, 7) is AddressState.NO_NAME


@pytest.mark.parametrize("curve", [False, True])
def test_edges_with_keys_and_without(curve: bool) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    edge = context.socket(zmq.ROUTER)
    if curve:
        edge.curve_server, edge.curve_secretkey = True, zmq.curve_keypair()[1]
    port = edge.bind_to_random_port("tcp://127.0.0.1")
    try:
        wanted = AddressState.CURVE if curve else AddressState.PLAIN
        assert diagnose("127.0.0.1", port, 0.3) is wanted
        diagnosis = Diagnosis(f"tcp://127.0.0.1:{port}")
        diagnosis.poll()
        deadline_s = time.monotonic() + 20.0
        while diagnosis.state is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert diagnosis.state is wanted
        diagnosis.clear()
        assert diagnosis.state is None
    finally:
        context.destroy(linger=0)


def test_a_channel_comes_again_by_itself_after_a_broken_handshake() -> None:
    """ZeroMQ would do it ten times a second; the channel's owner does it when it is due."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    public, secret = zmq.curve_keypair()
    edge = context.socket(zmq.ROUTER)
    edge.curve_server, edge.curve_secretkey = True, zmq.curve_keypair()[1]
    port = edge.bind_to_random_port("tcp://127.0.0.1")
    channel = EdgeChannel(f"tcp://127.0.0.1:{port}", DeviceKeys(secret, public, public), 1000)
    try:
        channel.attempts.wrong_key = True
        deadline_s = time.monotonic() + 30.0
        while (
            channel.attempts.handshakes_failed <= CERTAIN_HANG_UPS and time.monotonic() < deadline_s
        ):
            channel.receive_raw(0.05)
            channel.attempts.wrong_key = True
        failed = channel.attempts.handshakes_failed
        assert failed > CERTAIN_HANG_UPS
        assert channel.attempts.surely_wrong_key
        time.sleep(0.5)
        channel.read_events()
        assert channel.attempts.handshakes_failed <= failed + 1
    finally:
        channel.close()
        context.destroy(linger=0)


@pytest.mark.parametrize("number", [errno.ECONNRESET, errno.EPIPE])
def test_who_hangs_up_while_we_connect_is_there(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A proxy without an edge resets so quickly that `connect` itself may report it.

    After a FIN and a reset, Linux reports EPIPE.
    """

    def reset(*_: object) -> socket.socket:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "create_connection", reset)
    assert diagnose("127.0.0.1", 7) is AddressState.NO_EDGE
