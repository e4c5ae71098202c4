"""Ownership: to any key but the one that began it, a session does not exist."""

from __future__ import annotations

import time

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import AccessDeniedError
from pilotfish.wire import messages as m
from pilotfish.wire.keys import DeviceKeys
from tests.support.hostile import PROMPT, RawClient, RawSession
from tests.support.socketless import SocketlessEdge


def test_unknown_session(client: RawClient) -> None:
    session = RawSession()
    session.begin(PROMPT)
    client.send(*session.window([1]))
    failure = client.fails("unknown-session")
    assert failure.session == session.id
    client.send(*session.pull(1))
    client.fails("unknown-session")
    client.say(m.Cancel(session=session.id, generation=0))
    client.say(m.Close(session=session.id))
    assert client.settle() == []


def test_a_closed_session_is_unknown(client: RawClient, session: RawSession) -> None:
    client.say(m.Close(session=session.id))
    client.say(m.Close(session=session.id))
    client.send(*session.window([1]))
    client.fails("unknown-session")


def test_a_session_of_another_owner(locked_edge: EdgeServer, key_folders) -> None:
    alice_keys, bob_keys = (DeviceKeys.load(key_folders[name]) for name in ("alice", "bob"))
    with (
        RawClient(locked_edge.endpoint, alice_keys) as alice,
        RawClient(locked_edge.endpoint, bob_keys) as bob,
        RawClient(locked_edge.endpoint, alice_keys) as alice_again,
    ):
        session = RawSession()
        alice.send(*session.begin(PROMPT))
        wanted = session.go_on(alice, 6)
        alice.send(*session.begin(PROMPT))
        session.go_on(alice, 2)

        bob.send(*session.window([1]))
        bob.fails("unknown-session")
        bob.send(*session.pull(1))
        bob.fails("unknown-session")
        bob.send(*RawSession(session.id).begin([9, 9], generation=9))
        bob.fails("unknown-session")
        bob.send(*RawSession(session.id).begin([9], keep=len(PROMPT), hash=session.committed.hash))
        bob.fails("unknown-session")
        bob.say(m.Cancel(session=session.id, generation=session.generation))
        bob.say(m.Close(session=session.id))
        assert bob.settle() == []

        session.go_on(alice, 2)
        assert session.go_on(alice_again, 2) == wanted  # the key's, on any connection


@pytest.mark.parametrize("kind", ["window", "states", "pull", "hint"])
def test_a_session_of_another_owner_grows_idle_all_the_same(pair, kind: str) -> None:
    """Whoever has learnt its id cannot hold its place, either."""
    with SocketlessEdge(pair.target) as edge:
        session = RawSession()
        edge.deliver(session.begin(PROMPT), client=b"alice")
        value = edge.service.sessions.find(session.id, b"alice")
        before_s = value.touched_s
        message = {
            "window": session.window([1]),
            "states": [m.encode(m.States(session=session.id, generation=0, start=len(PROMPT)))],
            "pull": session.pull(1),
            "hint": session.hint([1]),
        }[kind]
        edge.deliver(message, client=b"bob")
        assert value.touched_s == before_s


def test_unlisted_key(locked_edge: EdgeServer, key_folders, pair) -> None:
    began = time.monotonic()
    with pytest.raises(AccessDeniedError, match="keys allow"):
        Device(pair.draft, locked_edge.endpoint, key_folders["eve"])
    assert time.monotonic() - began < 3
    with Device(pair.draft, locked_edge.endpoint, key_folders["alice"]) as device:
        assert device.generate(PROMPT, protocol="greedy", max_tokens=2).tokens
