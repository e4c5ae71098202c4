"""Clients that do not play at all: deaf, mute, or gone in the middle."""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.wire import messages as m
from tests.support.hostile import PROMPT, RawClient, RawSession, await_idle, packed, resident_mib


def test_a_client_that_never_reads(pair) -> None:
    """What it does not take is dropped, not kept."""
    sent = 8000
    with (
        EdgeServer(pair.target, rate=1e9, threads=1) as edge,
        RawClient(edge.endpoint, queue=1, receive_bytes=4096) as deaf,
    ):
        session = RawSession()
        deaf.send(*session.begin(PROMPT, "stream"))
        deaf.send(*session.pull(2**31 - 1))
        before = resident_mib(edge.pid)
        for _ in range(sent):
            deaf.send(packed(["x" * 2000]))  # is refused at some length: 1 kB
        with RawClient(edge.endpoint) as client:
            other = RawSession()
            client.send(*other.begin(PROMPT))
            other.go_on(client, 3)
        await_idle(edge.pid)  # or the replies counted are those to messages still being read
        assert resident_mib(edge.pid) - before < 20
        received = 0
        while deaf.socket.poll(300):
            deaf.socket.recv_multipart()
            received += 1
        assert received < sent


def test_connections_that_never_shake_hands(pair, edge: EdgeServer) -> None:
    """A newcomer may be shown out with what it just said; a device says it again."""
    at = urlsplit(edge.endpoint)
    idle = [socket.create_connection((at.hostname, at.port)) for _ in range(200)]
    openings = (b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(100))
    for i, connection in enumerate(idle):
        with suppress(OSError):  # so many that some have been shown out by now
            connection.sendall(openings[i % len(openings)])
    began = time.monotonic()
    with Device(pair.draft, edge.endpoint, threads=1) as device:
        crowded = device.generate(PROMPT, protocol="greedy", max_tokens=8)
    assert time.monotonic() - began < 10
    for connection in idle:
        connection.close()
    with Device(pair.draft, edge.endpoint, threads=1) as device:
        assert device.generate(PROMPT, protocol="greedy", max_tokens=8).tokens == crowded.tokens


@pytest.mark.parametrize("data", [b"", b"x", m.encode(m.Ping(nonce=1))])
def test_a_peer_of_the_oldest_kind(pair, data: bytes) -> None:
    """ZMTP 1.0 has no greeting, so random bytes may be a message; ZeroMQ cannot say from where."""
    identity = b"\x01\x00"
    with EdgeServer(pair.target, threads=1) as edge:
        at = urlsplit(edge.endpoint)
        with socket.create_connection((at.hostname, at.port)) as old:
            old.sendall(identity + bytes([1 + len(data), 0]) + data)
            old.settimeout(10)
            assert old.recv(100)
            with RawClient(edge.endpoint) as client:
                assert client.settle() == []


def test_clients_that_hang_up_in_mid_pass(edge: EdgeServer) -> None:
    for _ in range(20):
        with RawClient(edge.endpoint) as client:
            session = RawSession()
            client.send(*session.begin([2] * 200, "stream"))
            client.send(*session.pull(50))
            client.socket.close(100)
    with RawClient(edge.endpoint) as client:
        assert client.settle() == []


def test_a_slot_that_is_reused_in_mid_pass_serves_the_next_session_well(edge: EdgeServer) -> None:
    """Close, or begin again, while the target works: the next text on that slot is untouched."""
    with RawClient(edge.endpoint) as client:
        session = RawSession()
        client.send(*session.begin(PROMPT))
        wanted = session.go_on(client, 5)
        client.say(m.Close(session=session.id))
        for turn in range(60):
            same_id = turn % 3 == 0
            victim = RawSession()
            client.send(*victim.begin([2 + turn % 7] * (20 + 3 * turn)))
            client.send(*victim.window([3] * (turn % 5)))
            time.sleep(0.0005 * (turn % 8))
            client.say(m.Close(session=victim.id))
            session = RawSession(victim.id if same_id else None)
            session_frames = session.begin(PROMPT)
            client.send(*session_frames)
            replies = client.settle()
            assert all(isinstance(reply, m.Verdict) for reply in replies)
            late_start = 20 + 3 * turn
            for _ in range(5):
                client.send(*session.window())
                reply = client.receive()
                while isinstance(reply, m.Verdict) and reply.start == late_start:
                    reply = client.receive()
                session.settle([], reply)
            assert session.committed.ids.tolist() == wanted
            client.say(m.Close(session=session.id))
