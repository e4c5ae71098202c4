"""Who is let in at a listening socket, who is shown out when, and what a key may leave unread."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import zmq
from zmq.utils import z85

from pilotfish.wire import access
from pilotfish.wire.access import BAN_S, DOMAIN, Gate
from pilotfish.wire.connections import Bounds
from pilotfish.wire.keys import DeviceKeys, EdgeKeys
from pilotfish.wire.messages import Ping, Pong
from pilotfish.wire.peer_connection import CROWD, PER_KEY, REVOKED
from pilotfish.wire.transport import Envelope, Listener
from tests.support.hostile import RawClient
from tests.support.relay import Relay

WAIT_S = 30.0
MEBIBYTE = 2**20


@pytest.fixture
def listener(key_folders: dict[str, Path]) -> Iterator[Listener]:
    """One that lets Alice and Bob in."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    bounds = Bounds(16, 16, MEBIBYTE)
    listening = Listener(context, "tcp://127.0.0.1:0", EdgeKeys.load(key_folders["edge"]), bounds)
    yield listening
    listening.close()
    context.destroy(linger=0)


def received(listener: Listener, count: int) -> list[Envelope]:
    """Take in so many messages, and let in those who send them."""
    deadline, result = time.monotonic() + WAIT_S, []
    while len(result) < count:
        assert time.monotonic() < deadline, f"{len(result)} of {count} messages came"
        assert listener.gate is not None
        listener.gate.answer_requests()
        listener.connections.read_events()
        if (envelope := listener.receive()) is not None:
            result.append(envelope)
        else:
            time.sleep(0.001)
    return result


KEY = bytes(range(32))
ASKED = [b"1.0", b"7", DOMAIN, b"127.0.0.1", b"", b"CURVE", KEY]
LET_IN = {
    "as it asks": (ASKED, b"200"),
    "another domain": ([*ASKED[:2], b"global", *ASKED[3:]], b"400"),
    "no domain": ([*ASKED[:2], b"", *ASKED[3:]], b"400"),
    "another version": ([b"2.0", *ASKED[1:]], b"400"),
    "another key": ([*ASKED[:-1], bytes(32)], b"400"),
    "a password": ([*ASKED[:5], b"PLAIN", b"name", KEY], b"400"),
    "no mechanism": ([*ASKED[:5], b"NULL"], b"400"),
}


@pytest.mark.parametrize("case", LET_IN)
def test_who_is_let_in(case: str) -> None:
    """A socket of another domain in this process is none of the gate's, whoever comes to it."""
    wanted, status = LET_IN[case]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Gate(context, {z85.encode(KEY)})
    with context.socket(zmq.REQ) as asking:
        asking.linger = 0
        asking.connect("inproc://zeromq.zap.01")
        asking.send_multipart(wanted)
        gate.answer_requests()
        version, request, answer, *_ = asking.recv_multipart()
    assert (version, request, answer) == (b"1.0", b"7", status)
    assert gate.refused.total == (status != b"200")
    gate.close()
    context.term()


def test_a_key_is_shut_out_as_often_as_there_is_reason_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time for the whole while, also before the former one is over."""
    now_s = 1000.0
    monkeypatch.setattr(access, "time", SimpleNamespace(monotonic=lambda: now_s))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Gate(context, {z85.encode(KEY)})
    with context.socket(zmq.REQ) as asking:
        asking.linger = 0
        asking.connect("inproc://zeromq.zap.01")

        def welcome() -> bool:
            asking.send_multipart(ASKED)
            gate.answer_requests()
            return asking.recv_multipart()[2] == b"200"

        for later_s in (0.0, 2 * BAN_S, BAN_S / 20):
            now_s += later_s
            gate.ban(z85.encode(KEY))
            now_s += 0.9 * BAN_S
            assert not welcome()
        now_s += 0.2 * BAN_S
        assert welcome()
    gate.close()
    context.term()


def test_the_holder_of_a_revoked_key_has_time_to_be_told(
    listener: Listener, key_folders: dict[str, Path]
) -> None:
    alice, bob = (DeviceKeys.load(key_folders[name]) for name in ("alice", "bob"))
    with RawClient(listener.endpoint, alice) as stays, RawClient(listener.endpoint, bob) as goes:
        for client in (stays, goes):
            client.say(Ping(nonce=1))
        clients = {envelope.owner: envelope.client for envelope in received(listener, 2)}
        began_s = time.monotonic()
        listener.connections.cut_revoked({alice.public: "alice"})
        listener.connections.read_events()
        assert listener.connections.is_connected(clients[bob.public])
        assert listener.connections.cuts[REVOKED] == 0
        listener.send(clients[bob.public], Pong(nonce=1, received_ns=0, sent_ns=0))
        assert isinstance(goes.receive(), Pong)
        while listener.connections.is_connected(
            clients[bob.public]
        ):  # and is cut when it has passed
            assert time.monotonic() < began_s + WAIT_S
            time.sleep(0.01)
            listener.connections.cut_revoked({alice.public: "alice"})
            listener.connections.read_events()
        assert time.monotonic() - began_s >= 1.0
        assert listener.connections.cuts[REVOKED] == 1
        assert listener.connections.is_connected(clients[alice.public])


def test_whoever_has_said_nothing_yet_is_cut_as_soon_as_a_key_is_revoked(
    listener: Listener, key_folders: dict[str, Path]
) -> None:
    """Nobody knows whose the connection is; whoever is still allowed comes again."""
    alice, bob = (DeviceKeys.load(key_folders[name]) for name in ("alice", "bob"))
    connections = listener.connections
    with RawClient(listener.endpoint, alice) as stays:
        stays.say(Ping(nonce=1))
        [envelope] = received(listener, 1)
        connections.cut_revoked({alice.public: "alice", bob.public: "bob"})
        with RawClient(listener.endpoint, bob):
            began_s = time.monotonic()
            while len(connections) < 2:
                assert time.monotonic() < began_s + WAIT_S
                time.sleep(0.001)
                connections.read_events()
            connections.cut_revoked({alice.public: "alice"})
            assert connections.cuts[REVOKED] == 1
            assert connections.is_connected(envelope.client)


def test_of_a_keys_connections_a_quiet_one_makes_room(
    listener: Listener, key_folders: dict[str, Path]
) -> None:
    """Its device has replaced it, most likely; the oldest one may be that of another lane."""
    connections, alice = listener.connections, DeviceKeys.load(key_folders["alice"])
    connections.bounds = connections.bounds._replace(per_owner=2)
    relay, clients = Relay(listener.endpoint), []
    with ExitStack() as stack:
        stack.callback(relay.close)
        for endpoint in (listener.endpoint, relay.endpoint, listener.endpoint):
            stack.enter_context(RawClient(endpoint, alice)).say(Ping(nonce=1))
            clients += [envelope.client for envelope in received(listener, 1)]
            if endpoint == relay.endpoint:
                relay.pause_s = WAIT_S
                time.sleep(2.0)
        began_s = time.monotonic()
        while len(connections) > 2:
            assert time.monotonic() < began_s + WAIT_S
            time.sleep(0.001)
            connections.read_events()
        assert connections.cuts == {PER_KEY: 1}
        assert [connections.is_connected(client) for client in clients] == [True, False, True]


def is_open(connection: socket.socket) -> bool:
    """Read all that came; whether the other end has not ended the connection."""
    try:
        while connection.recv(4096, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return True
    return False


def test_a_crowd_of_one_address_drives_out_its_own_alone(listener: Listener) -> None:
    """Half of all places are for those that have said nothing; another address has one of them."""
    connections, place = listener.connections, urlsplit(listener.endpoint)
    places = connections.bounds.connections // 2

    def come(address: str, counted: Callable[[], int]) -> socket.socket:
        before, began_s = counted(), time.monotonic()
        came = socket.create_connection((place.hostname, place.port), source_address=(address, 0))
        while counted() == before:
            assert time.monotonic() < began_s + WAIT_S
            time.sleep(0.001)
            connections.read_events()
        return stack.enter_context(came)

    with ExitStack() as stack:
        for _ in range(places - 1):
            come("127.0.0.1", connections.__len__)
        alone = come("127.0.0.2", connections.__len__)
        crowd = [come("127.0.0.1", lambda: connections.cuts[CROWD]) for _ in range(5)]
        assert is_open(alone)
        assert is_open(crowd[-1])  # whoever comes may still shake hands


def sent(listener: Listener, clients: Sequence[bytes], size: int, most: int) -> int:
    """Send replies of this size to these clients in turn until one has no room; the bytes sent."""
    total, reply = 0, Pong(nonce=1, received_ns=0, sent_ns=0)
    while total < most:
        for client in clients:
            try:
                total += listener.send(client, reply, (bytes(size),))
            except zmq.Again:
                return total
    return total


def test_what_a_key_leaves_unread_is_bounded_over_its_connections(
    listener: Listener, key_folders: dict[str, Path]
) -> None:
    """On several it has the room of one, and each has a little of its own; so have other keys."""
    alice, bob = (DeviceKeys.load(key_folders[name]) for name in ("alice", "bob"))
    deaf = [
        RawClient(listener.endpoint, keys, queue=1, receive_bytes=4096)
        for keys in (alice, alice, alice, bob)
    ]
    try:
        clients: dict[bytes, list[bytes]] = {alice.public: [], bob.public: []}
        for client in deaf:
            client.say(Ping(nonce=1))
        for envelope in received(listener, len(deaf)):
            clients[envelope.owner].append(envelope.client)
        first, second, third = clients[alice.public]
        size, most = 60_000, 32 * MEBIBYTE
        alone = sent(listener, [first, second], size, most)
        assert 8 * MEBIBYTE - size <= alone < 12 * MEBIBYTE  # and what the kernel took
        neighbour = sent(listener, [third], size, most)
        assert size <= neighbour < MEBIBYTE
        assert sent(listener, clients[bob.public], size, most) > 4 * MEBIBYTE
    finally:
        for client in deaf:
            client.close()
