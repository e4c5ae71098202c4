"""Sessions of a key that was taken off the list are closed: their places, their ids, their work."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotfish.edge_runtime.edge_config import EdgeLimits
from pilotfish.wire import keys
from pilotfish.wire import messages as m
from pilotfish.wire.keys import DeviceKeys
from tests.conftest import Pair
from tests.support.daemons import Systemd, running
from tests.support.hostile import PROMPT, RawClient, RawSession
from tests.support.socketless import SocketlessEdge

ALICE, BOB = b"alice", b"bob"
LIMITS = EdgeLimits(messages_per_s=1e9, sessions=2, sessions_per_client=2)
BOTH = {ALICE: "alice", BOB: "bob"}


@pytest.fixture
def edge(pair: Pair) -> Iterator[SocketlessEdge]:
    """An edge with two places, which one client may take; alice and bob are on its list."""
    with SocketlessEdge(pair.target, sessions=2, sessions_per_client=2) as edge:
        edge.service.apply_config(LIMITS, BOTH)
        yield edge


@pytest.fixture
def systemd(tmp_path: Path) -> Systemd:
    return Systemd(tmp_path)


def begun(edge: SocketlessEdge, owner: bytes) -> RawSession:
    session = RawSession()
    edge.deliver(session.begin(PROMPT), owner)
    return session


def requests(edge: SocketlessEdge, owner: bytes) -> list[m.Reply]:
    """What an owner is told once all that it asked for is done."""
    edge.start()
    edge.deliver([m.encode(m.Ping(nonce=1))], owner)
    for _ in range(20):
        edge.turn()
    return [reply for to, reply, _ in edge.replies if to == owner]


def test_the_places_of_a_revoked_key_are_free_at_once(edge: SocketlessEdge) -> None:
    for _ in range(2):
        begun(edge, BOB)
    edge.service.apply_config(LIMITS, {ALICE: "alice"})
    assert edge.service.sessions_by_device() == {}
    for _ in range(2):  # none of them has idled for long
        begun(edge, ALICE)
    assert [type(reply) for reply in requests(edge, ALICE)] == [m.Pong]
    assert edge.service.sessions_by_device() == {"alice": 2}
    assert edge.metrics.sessions_ended["revoked"] == 2
    assert edge.metrics.sessions_ended["displaced"] == 0


def test_a_session_of_a_revoked_key_is_unknown_even_to_the_key_that_comes_back(
    edge: SocketlessEdge,
) -> None:
    session = begun(edge, BOB)
    edge.start()
    edge.deliver(session.window(), BOB)
    assert isinstance(edge.reply(BOB), m.Verdict)
    edge.service.apply_config(LIMITS, {ALICE: "alice"})
    edge.deliver(session.window(), BOB)
    refused = edge.reply(BOB)
    assert isinstance(refused, m.Failure)
    assert refused.code == "access-denied"
    edge.service.apply_config(LIMITS, BOTH)
    edge.deliver(session.window(), BOB)
    unknown = edge.reply(BOB)
    assert isinstance(unknown, m.Failure)
    assert unknown.code == "unknown-session"


def test_work_under_way_for_a_revoked_key_is_dropped_and_others_go_on(
    edge: SocketlessEdge,
) -> None:
    mine, other = begun(edge, BOB), begun(edge, ALICE)
    edge.deliver(mine.window(), BOB)
    edge.deliver(other.window(), ALICE)
    edge.service.apply_config(LIMITS, {ALICE: "alice"})
    assert m.Verdict in [type(reply) for reply in requests(edge, ALICE)]
    assert m.Verdict not in [type(reply) for to, reply, _ in edge.replies if to == BOB]
    assert edge.metrics.windows["greedy"] == 1
    assert edge.service.sessions_by_device() == {"alice": 1}


def test_a_revoked_key_is_told_and_its_places_are_taken(
    pair: Pair, key_folders: dict[str, Path], systemd: Systemd, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(key_folders["edge"], tmp_path / "keys"))
    keys.allow(folder, key_folders["eve"] / "device.pub", "eve")
    bob, eve = (DeviceKeys.load(key_folders[name]) for name in ("bob", "eve"))
    flags = ("--target", pair.target, "--keys", folder, "--threads", 1, "--sessions", 2)
    with (
        running(*flags, systemd=systemd) as daemon,
        RawClient(daemon.endpoint, bob) as revoked,
        RawClient(daemon.endpoint, eve) as other,
    ):
        held = [RawSession() for _ in range(2)]
        for session in held:
            revoked.send(*session.begin(PROMPT))
            session.go_on(revoked, 1)
        (folder / "allowed" / "bob.pub").unlink()
        before = len(systemd.received)
        daemon.signal(signal.SIGHUP)
        systemd.await_("READY", "1", before)
        revoked.send(*held[0].window())
        revoked.fails("access-denied")
        for _ in range(2):
            session = RawSession()
            other.send(*session.begin(PROMPT))
            session.go_on(other, 2)
