"""Peers that are never admitted: no key, a wrong one, another's handshake, or silence."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pilotfish import EdgeServer
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.wire import messages as m
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.link.liveness import HANDSHAKE_STEP_S
from tests.conftest import Pair
from tests.edge_runtime.strangers.conftest import Fort
from tests.support.daemons import await_sample, running, scrape
from tests.support.hostile import PROMPT, RawClient, RawSession, resident_mib

BROKEN = 'handshakes_refused_total{reason="broken"}'
OTHER_KEY = 'handshakes_refused_total{reason="edge-key"}'
BY_KEY = 'handshakes_refused_total{reason="key"}'
CROWD = 'connections_cut_total{reason="crowd"}'
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" * 32


def knock(endpoint: str) -> socket.socket:
    at = urlsplit(endpoint)
    connection = socket.create_connection((at.hostname, at.port))
    connection.settimeout(30)
    return connection


def is_over(connection: socket.socket) -> bool:
    """The edge has hung up."""
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_no_key(fort: Fort) -> None:
    before = fort.counted(BROKEN)
    with RawClient(fort.endpoint) as stranger:
        stranger.say(m.Ping(nonce=1))
        await_sample(fort.metrics, BROKEN, before + 1)
        assert not stranger.socket.poll(0)


def test_an_unlisted_key(fort: Fort, key_folders: dict[str, Path]) -> None:
    before = fort.counted(BY_KEY)
    with RawClient(fort.endpoint, DeviceKeys.load(key_folders["eve"])) as stranger:
        stranger.say(m.Ping(nonce=1))
        await_sample(fort.metrics, BY_KEY, before + 1)
        assert not stranger.socket.poll(0)


class Recorder:
    """A relay to the edge that keeps what a client has sent."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.sent: list[bytes] = []
        threading.Thread(target=self._relay, daemon=True).start()

    def _relay(self) -> None:
        near, _ = self._listening.accept()
        far = knock(self._endpoint)
        threading.Thread(target=self._back, args=(far, near), daemon=True).start()
        with suppress(OSError):
            while data := near.recv(65536):
                self.sent.append(data)
                far.sendall(data)
        far.close()

    @staticmethod
    def _back(far: socket.socket, near: socket.socket) -> None:
        with suppress(OSError):
            while data := far.recv(65536):
                near.sendall(data)

    def close(self) -> None:
        self._listening.close()


def test_a_replayed_handshake(fort: Fort, bob: DeviceKeys) -> None:
    """Every byte of a good conversation, again: its cookie is of another connection."""
    recorder = Recorder(fort.endpoint)
    session = RawSession()
    with RawClient(recorder.endpoint, bob) as client:
        client.send(*session.begin(PROMPT))
        session.go_on(client, 2)
        client.say(m.Close(session=session.id))
        client.settle()
    assert sum(map(len, recorder.sent)) > 500
    recorder.close()
    before = scrape(fort.metrics)
    with knock(fort.endpoint) as replay:
        with suppress(OSError):  # it may be over before all has been said
            for data in recorder.sent:
                replay.sendall(data)
                time.sleep(0.05)
        assert is_over(replay)
    # an edge cannot tell it from a handshake with another edge.pub: what it cannot decrypt
    await_sample(fort.metrics, OTHER_KEY, before[OTHER_KEY] + 1)
    after = scrape(fort.metrics)
    served = 'device_jobs_total{device="bob"}'
    assert after[served] == before[served]


def test_slow_ones_are_shown_out(fort: Fort) -> None:
    """Nothing, a byte, half a greeting, a greeting and no more: gone after some seconds."""
    before = fort.counted(BROKEN)
    openings = [b"", b"\xff", GREETING[:20], GREETING] * 5
    slow = [knock(fort.endpoint) for _ in openings]
    for connection, opening in zip(slow, openings, strict=True):
        connection.sendall(opening)
    began = time.monotonic()
    assert all(is_over(connection) for connection in slow)
    assert time.monotonic() - began > 0.5 * HANDSHAKE_STEP_S
    await_sample(fort.metrics, BROKEN, before + len(slow))


def test_a_crowd_gives_way(fort: Fort, bob: DeviceKeys) -> None:
    """Far more connections than there is room for: the first of them yield, the known stay."""
    before = fort.counted(CROWD)
    crowd = [knock(fort.endpoint) for _ in range(200)]
    await_sample(fort.metrics, CROWD, before + 100)
    deadline = time.monotonic() + 10
    while scrape(fort.metrics)["connections"] > 64:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with RawClient(fort.endpoint, bob) as late:  # and there is room for a friend
        # the rest of the crowd is still coming, so a newcomer may be shown out with what it said
        deadline = time.monotonic() + 10
        while not late.socket.poll(500):
            assert time.monotonic() < deadline
            late.say(m.Ping(nonce=1))
        assert isinstance(late.receive(), m.Pong)
    for connection in crowd:
        connection.close()


def test_a_fleet_that_comes_at_once_comes_in(
    pair: Pair, key_folders: dict[str, Path], bob: DeviceKeys
) -> None:
    """More devices behind one address, far away, than may shake hands at a time: in turns."""
    flags = {"threads": 1, "connections": 16, "connections_per_client": 16}
    with (
        EdgeServer(pair.target, keys=key_folders["edge"], **flags) as edge,
        Emulator(edge.endpoint, Conditions(rtt_s=0.2)) as link,
        ExitStack() as stack,
    ):
        fleet = [stack.enter_context(RawClient(link.endpoint, bob)) for _ in range(14)]
        for device in fleet:
            device.say(m.Ping(nonce=1))
        for device in fleet:
            assert isinstance(device.receive(30), m.Pong)


@pytest.mark.parametrize("descriptors", [150, 100])
def test_an_edge_with_few_descriptors(pair, descriptors: int) -> None:
    """It knows that it has few, says so, and serves as many devices as fit."""
    flags = ("--target", pair.target, "--threads", 1)
    with running(*flags, descriptors=descriptors) as daemon, RawClient(daemon.endpoint) as friend:
        session = RawSession()
        friend.send(*session.begin(PROMPT))
        session.go_on(friend, 1)
        before = resident_mib(daemon.pid)
        crowd = [knock(daemon.endpoint) for _ in range(300)]
        session.go_on(friend, 20)
        for connection in crowd:
            connection.close()
        with RawClient(daemon.endpoint) as late:
            deadline = time.monotonic() + 30
            while not late.socket.poll(200):  # what it says in the crowd may be lost with it
                assert time.monotonic() < deadline
                late.say(m.Ping(nonce=1))
        daemon.await_line("raise LimitNOFILE")
        assert resident_mib(daemon.pid) - before < 32
