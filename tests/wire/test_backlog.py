"""What ended connections left behind counts until it is taken in, and only for who left it."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from pilotfish.wire import messages as m
from pilotfish.wire.keys import DeviceKeys, EdgeKeys
from pilotfish.wire.link.tcp import borrow_socket, read_volume
from pilotfish.wire.memory_watch import MEMORY_WATCH, MemorySample
from pilotfish.wire.peer_connection import UNFINISHED
from pilotfish.wire.transport import Envelope, Listener
from tests.support.bare_peer import part, ping, shake_hands
from tests.support.hostile import RawClient
from tests.support.listening import listening

MESSAGE = 1 << 20
FILLER = bytes(8192)
PART = part(180_000)
FLOOD_S = 3.0
MOST_LEFT = 4  # connections of the flood
PACE_S = 0.002  # for a message: a twentieth of what the flood brings


def turn(listener: Listener) -> Envelope | None:
    """What a serving loop does in a turn."""
    listener.connections.read_events()
    if listener.gate is not None:
        listener.gate.answer_requests()
    return listener.receive()


def await_(listener: Listener, happened: Callable[[], object], within_s: float = 60.0) -> None:
    end_s = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < end_s
        turn(listener)
        time.sleep(0.005)


@contextmanager
def flooding(endpoint: str, keys: DeviceKeys | None) -> Iterator[None]:
    """A ZeroMQ client sends all that it can, and connects again by itself."""
    over = threading.Event()

    def flood() -> None:
        with RawClient(endpoint, keys) as client:
            client.socket.sndhwm = 100
            while not over.is_set():
                with suppress(zmq.Again):
                    client.socket.send_multipart([b"flood", FILLER], zmq.NOBLOCK)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keys"])
def test_a_flood_that_is_taken_in_slowly(keyed: bool, key_folders: dict[str, Path]) -> None:
    """However often it comes again, few of its connections left messages; another is served.

    How much a single one leaves is not bounded here: that is what a sender brings between two looks
    at the memory, and it depends on the machine.
    """
    names = ("alice", "bob") if keyed else ()
    alice, bob = (DeviceKeys.load(key_folders[name]) for name in names) if keyed else (None, None)
    keys = EdgeKeys.load(key_folders["edge"]) if keyed else None
    with listening(keys, MESSAGE) as listener, RawClient(listener.endpoint, alice) as friend:
        friend.say(m.Ping(nonce=0))
        served: list[Envelope] = []
        await_(listener, lambda: (got := turn(listener)) and served.append(got) is None)
        name, pings = served[0].client, 0
        with flooding(listener.endpoint, bob):
            end_s = time.monotonic() + FLOOD_S
            while time.monotonic() < end_s or pings <= 50:
                assert time.monotonic() < end_s + 60.0
                got = turn(listener)
                if got is not None and got.client == name:
                    pings += 1
                if not pings or got is None or got.client == name:
                    friend.say(m.Ping(nonce=1))
                time.sleep(PACE_S)
                assert listener.connections.is_connected(name)
        assert listener.connections.cuts.total() >= 1
        left, end_s = Counter[bytes](), time.monotonic() + 1.0
        while time.monotonic() < end_s:  # what is in the queue, dropped or not
            with suppress(zmq.Again):
                client, *parts = listener.socket.recv_multipart(zmq.NOBLOCK)
                left[client] += sum(map(len, parts))
        # without the backlog's count it is each of them: 17 and more
        assert sum(size > MESSAGE / 8 for size in left.values()) <= MOST_LEFT, left.values()


def test_a_peer_that_ends_its_connection_is_served() -> None:
    """Even though more than a message's bytes wait, and it is gone before they are looked at."""
    with listening(message_bytes=MESSAGE) as listener:
        client = RawClient(listener.endpoint)
        client.socket.linger = 5000
        for _ in range(80):
            client.send(b"last", FILLER)
        client.socket.close()  # RawClient's own `close` would drop what is not sent yet
        served = 0
        end_s = time.monotonic() + 60.0
        while served < 80:
            assert time.monotonic() < end_s
            served += turn(listener) is not None
        assert not listener.connections.cuts


def test_what_was_left_is_forgotten_once_all_was_taken_in() -> None:
    """Then newcomers are let in again, whom the kernel turned away before."""
    with listening(message_bytes=MESSAGE) as listener:
        with flooding(listener.endpoint, None):
            end_s = time.monotonic() + 60.0
            while not listener.connections.backlog.is_full():
                assert time.monotonic() < end_s
                time.sleep(0.01)
        backlog = listener.connections.backlog
        await_(listener, lambda: not backlog.is_full() and not len(backlog))
        with RawClient(listener.endpoint) as newcomer:
            newcomer.say(m.Ping(nonce=1))
            await_(listener, lambda: listener.connections.devices)


class Peers:
    """Peers without keys of a listener that waits; its memory is checked when a test says so."""

    def __init__(self, listener: Listener, stack: ExitStack) -> None:
        self.listener, self._stack = listener, stack
        self.connections = listener.connections
        self.connections.waiting = True
        MEMORY_WATCH.remove(self.connections)
        self.other: socket.socket

    def stranger(self) -> socket.socket:
        return self._stack.enter_context(shake_hands(self.listener.endpoint))

    def known(self) -> socket.socket:
        peer = self.stranger()
        peer.sendall(ping())
        assert self.listener.socket.poll(30_000)
        assert turn(self.listener)
        return peer

    def hold(self, peer: socket.socket, parts: int) -> None:
        """Send so many parts (180 kB each) of an unfinished message; return once they are read."""
        before = self.read_bytes()
        peer.sendall(ping(more=True) + parts * PART)
        self.until(lambda: self.read_bytes() - before > parts * len(PART))

    def check(self, grown: int = 0) -> int:
        """Check the memory; return how many connections have been cut."""
        self.connections.check_memory(MemorySample(time.monotonic(), True, grown))
        return self.connections.cuts.total()

    def read_bytes(self) -> int:
        """Return the bytes that ZeroMQ has read of the peers that are connected."""
        self.connections.read_events()
        total = 0
        for each in self.connections._open.values():
            with borrow_socket(each.descriptor, self.connections._is_ours) as lent:
                counts = read_volume(lent)
            assert counts is not None
            total += counts.read
        return total

    def end_message(self, peer: socket.socket, parts: int) -> None:
        """End the peer's message, and serve it."""
        peer.sendall(b"\x00\x00")
        await_(self.listener, lambda: (got := turn(self.listener)) and got.size > parts * 180_000)

    @staticmethod
    def until(happened: Callable[[], object]) -> None:
        end_s = time.monotonic() + 60.0
        while not happened():
            assert time.monotonic() < end_s
            time.sleep(0.005)


@pytest.fixture
def peers() -> Iterator[Peers]:
    with listening(message_bytes=MESSAGE) as listener, ExitStack() as stack:
        yield Peers(listener, stack)


@pytest.fixture
def crowd(peers: Peers) -> Iterator[Peers]:
    """Most of a friend's message has come when one of two strangers is cut for what they hold.

    Its connection has ended, and the memory has not been checked since. The friend's message comes
    in the end, and no other peer is cut.
    """
    friend = peers.known()
    peers.other = peers.known()
    peers.check()  # or what follows would seem to be a part of the messages served
    peers.hold(friend, 5)
    for _ in range(2):
        peers.hold(peers.stranger(), 4)
    assert peers.check() == 1
    peers.until(lambda: not peers.connections.read_events() and len(peers.connections) == 3)
    yield peers
    assert peers.check() == 1
    peers.end_message(friend, 5)


def test_a_stranger_costs_no_known_peer_its_larger_message(peers: Peers) -> None:
    """All hold too much together: the stranger is cut, though each known peer holds more."""
    friends = [peers.known() for _ in range(4)]
    peers.check()
    for friend in friends:
        peers.hold(friend, 6)
    assert peers.check() == 0
    peers.hold(peers.stranger(), 4)
    assert peers.check() == 1
    assert peers.connections.cuts[UNFINISHED] == 1
    for friend in friends:
        peers.end_message(friend, 6)
    assert peers.check() == 1


def test_an_edge_that_waits_knows_that_nothing_is_left(crowd: Peers) -> None:
    """While no message comes it takes no turn, so no turn notes that the queue is empty."""
    assert crowd.check() == 1


def test_what_connected_peers_send_is_not_what_another_left(crowd: Peers) -> None:
    """Until the first check after a cut, the process grows by what another peer sends."""
    crowd.hold(crowd.other, 6)
    assert crowd.check(grown=6 * len(PART)) == 1


def test_a_first_message_is_not_what_another_left(crowd: Peers) -> None:
    assert crowd.check() == 1
    crowd.connections.waiting = False
    crowd.known()
