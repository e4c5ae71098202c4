"""Hostile peers with a key: others' sessions, floods, bombs, and messages without an end."""

from __future__ import annotations

import struct
import time
from contextlib import ExitStack, suppress

import msgspec
import pytest

from pilotfish import EdgeServer
from pilotfish.wire import messages as m
from pilotfish.wire.access import BAN_S
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.peer_connection import BACKLOG, UNFINISHED
from tests.conftest import Pair
from tests.edge_runtime.strangers.conftest import Fort
from tests.support.bare_peer import part, ping, shake_hands
from tests.support.daemons import await_sample, free_port, scrape
from tests.support.hostile import PROMPT, RawClient, RawSession, peak_mib, resident_mib


def refused(fort: Fort, code: str) -> float:
    return fort.counted(f'refusals_total{{code="{code}"}}')


def test_a_session_of_another_owner(fort: Fort, bob: DeviceKeys, key_folders) -> None:
    alice = DeviceKeys.load(key_folders["alice"])
    before = refused(fort, "unknown-session")
    with RawClient(fort.endpoint, alice) as owner, RawClient(fort.endpoint, bob) as thief:
        session = RawSession()
        owner.send(*session.begin(PROMPT))
        session.go_on(owner, 2)
        thief.send(*session.window([1]))
        thief.fails("unknown-session")
        thief.send(*RawSession(session.id).begin([9, 9], generation=9))
        thief.fails("unknown-session")
        session.go_on(owner, 2)
        owner.say(m.Close(session=session.id))
        owner.settle()
    assert refused(fort, "unknown-session") == before + 2


def test_a_flood_of_opens(fort: Fort, bob: DeviceKeys) -> None:
    before = refused(fort, "too-many-sessions")
    with RawClient(fort.endpoint, bob) as flood:
        opened = []
        for _ in range(20):  # in bursts, or the edge drops unread replies
            for _ in range(20):
                opened.append(RawSession())
                flood.send(*opened[-1].begin([3] * 200))
            flood.settle()
        assert fort.counted("sessions") <= 8
        assert fort.counted('device_sessions{device="bob"}') == 4
        for session in opened[:4]:
            flood.say(m.Close(session=session.id))
        flood.settle()
    assert refused(fort, "too-many-sessions") == before + 396


def test_bombs(fort: Fort, bob: DeviceKeys) -> None:
    """Counts far beyond the bytes that follow, at every place where there is one."""
    huge = 2**32 - 1
    headers = [
        b"\xdd" + struct.pack(">I", huge),  # an array of so many
        b"\xdf" + struct.pack(">I", huge),  # a map
        b"\xdb" + struct.pack(">I", huge),  # a text
        b"\xc6" + struct.pack(">I", huge),  # bytes
        b"\x91" * 16_000,  # arrays in arrays
        msgspec.msgpack.encode(["window", b"\0" * 16, huge, huge, b"\0" * 8]),
        msgspec.msgpack.encode(["begin", b"\0" * 16, 0, huge, b"\0" * 8, "greedy", 0, 0.0, 0, 1.0]),
    ]
    # tslt: 64 rows of 65,535 tokens each in four bytes; dssd: sixteen million counts
    rows = [bytes([2 << 3 | 1 << 5]) + b"\xff\xff", bytes([3 << 3]) + b"\xff" * 192]
    counts = [b"\0" + b"\xff" * 3, b"\0" + b"\x40\0\0" + b"\xff" * 64]
    with RawClient(fort.endpoint, bob) as bomber:
        bomber.settle()
        peak_mib(fort.pid)
        before = resident_mib(fort.pid)
        for header in headers:
            bomber.send(header, b"\0\0")
            bomber.fails("malformed")
        for protocol, frames in (("tslt", rows), ("tree", rows), ("dssd", counts)):
            session = RawSession()
            bomber.send(*session.begin(PROMPT, protocol))
            for frame in frames:
                bomber.send(*session.window([1] * 64, frame, frame))
                bomber.fails("malformed")
            bomber.say(m.Close(session=session.id))
        bomber.settle()
        assert peak_mib(fort.pid) - before < 16
    assert refused(fort, "malformed") >= 13


def test_a_message_of_a_hundred_thousand_parts(fort: Fort, bob: DeviceKeys) -> None:
    """It is answered, costs the connection, and the key some time; others go on meanwhile."""
    cut = 'connections_cut_total{reason="too-many-frames"}'
    before, keys_before = fort.counted(cut), fort.counted('handshakes_refused_total{reason="key"}')
    with RawClient(fort.endpoint, bob) as shredder:
        shredder.say(m.Ping(nonce=1))
        shredder.receive()
        shredder.say(m.Ping(nonce=2), *[b""] * 100_000)
        await_sample(fort.metrics, cut, before + 1)
        await_sample(fort.metrics, 'handshakes_refused_total{reason="key"}', keys_before + 1)
    assert BAN_S >= 10


@pytest.mark.parametrize("size", [0, 200])
def test_a_message_that_never_ends(pair: Pair, size: int) -> None:
    """ZeroMQ keeps it until its end; the edge cuts it off where no message of ours can be."""
    port = free_port()
    frames = (b"\x01" + bytes([size]) + b"x" * size) * (65536 // (size + 2))
    with (
        EdgeServer(pair.target, threads=1, message_mib=1, metrics=port) as edge,
        RawClient(edge.endpoint) as friend,
        shake_hands(edge.endpoint) as endless,
    ):
        session = RawSession()
        friend.send(*session.begin(PROMPT))
        session.go_on(friend, 1)
        before, sent = resident_mib(edge.pid), 0
        try:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                endless.sendall(frames)
                sent += len(frames)
                session.go_on(friend, 1)
                if len(session.committed) > 200:
                    friend.send(*session.begin(PROMPT))
        except OSError:
            pass
        else:
            pytest.fail(f"{sent} bytes and no end")
        await_sample(port, 'connections_cut_total{reason="unfinished-message"}', 1)
        session.go_on(friend, 3)
        # it is cut a tick after its first megabyte, however much came within the tick; of the
        # smallest frames ZeroMQ keeps 64 bytes each, which had two on the wire
        assert sent < 64 * 2**20
        assert resident_mib(edge.pid) - before < 16 + 40 * sent / 2**20


@pytest.mark.parametrize("apart_s", [0.0, 0.05])
def test_strangers_messages_do_not_cost_a_known_peer_its_own(pair: Pair, apart_s: float) -> None:
    """Strangers together hold too much: all but one are cut, a peer that sent a message is not.

    The reason of a cut depends on how much has come by a check: more than all peers may hold, or
    more than all strangers.
    """
    port = free_port()
    cuts = [f'connections_cut_total{{reason="{reason}"}}' for reason in (UNFINISHED, BACKLOG)]
    with ExitStack() as stack:
        edge = stack.enter_context(EdgeServer(pair.target, threads=1, message_mib=1, metrics=port))
        friend, *strangers = (stack.enter_context(shake_hands(edge.endpoint)) for _ in range(9))
        friend.sendall(ping())
        await_sample(port, "pings_total", 1)  # on a busy machine it may be heard of late
        friend.sendall(ping(more=True) + 15 * part(60_000))
        for stranger in strangers:
            stranger.sendall(12 * part(60_000))
            time.sleep(apart_s)
        deadline = time.monotonic() + 30
        while sum(scrape(port).get(cut, 0) for cut in cuts) < 7:
            assert time.monotonic() < deadline
            for peer in (friend, *strangers):
                with suppress(OSError):
                    peer.sendall(b"\x01\x00")  # or it would be cut for its silence
            time.sleep(0.1)
        friend.sendall(b"\x00\x00")
        await_sample(port, 'refusals_total{code="malformed"}', 1)  # it has come, if to no avail


def test_replies_that_are_not_read(pair: Pair) -> None:
    """They are dropped and counted, and delay no other client."""
    port = free_port()
    with (
        EdgeServer(pair.target, threads=1, rate=1e9, metrics=port) as edge,
        RawClient(edge.endpoint, queue=1, receive_bytes=4096) as deaf,
        RawClient(edge.endpoint) as friend,
    ):
        before = resident_mib(edge.pid)
        probe = b"x" * 50_000
        for _ in range(600):
            deaf.say(m.Ping(nonce=1), probe)
        session = RawSession()
        friend.send(*session.begin(PROMPT))
        session.go_on(friend, 3)
        await_sample(port, "dropped_replies_total", 100)
        assert resident_mib(edge.pid) - before < 32
