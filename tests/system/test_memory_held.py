"""What peers make a process hold is bounded at every socket: messages without end, and unread."""

from __future__ import annotations

import gc
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.wire import messages as m
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.keys import DeviceKeys
from tests.conftest import Pair
from tests.support.daemons import free_port, running, scrape
from tests.support.federating import cast_in, worker, write_list
from tests.support.hostile import PROMPT, RawClient, RawSession, resident_mib
from tests.support.serving import eventually, serving
from tests.support.tiny import tiny_artifact

GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"ROUTER"
SECONDS = 3.0
MOST_MIB = (
    96  # includes what arrives between two checks of memory, which are late on a busy machine
)


def address_of(listening: socket.socket) -> str:
    return f"tcp://127.0.0.1:{listening.getsockname()[1]}"


class EndlessEdge:
    """Shakes hands as a ROUTER does, and then sends one message that does not end, to everyone."""

    def __init__(self, frame: bytes) -> None:
        self._frames = frame * max(1, 400_000 // len(frame))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = address_of(self._listening)
        self.connections = self.sent = 0
        self._over = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self.connections += 1
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
            got = b""
            while b"READY" not in got:
                new = connection.recv(4096)
                if not new:
                    return
                got += new
            time.sleep(0.2)
            connection.settimeout(5.0)
            while not self._over:
                connection.sendall(self._frames)
                self.sent += len(self._frames)

    def close(self) -> None:
        self._over = True
        self._listening.close()


@pytest.fixture(params=[0, 255], ids=["tiny", "short"])
def endless(request: pytest.FixtureRequest) -> Iterator[EndlessEdge]:
    edge = EndlessEdge(b"\x01" + bytes([request.param]) + b"x" * request.param)
    yield edge
    edge.close()


def most_mib(pid: int, endless: EndlessEdge) -> float:
    """The most that a process holds while it is being sent something endless."""
    most, end_s = 0.0, time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        most = max(most, resident_mib(pid))
        assert most < 1000
        time.sleep(0.01)
    assert endless.connections > 1, "it was not hung up on"
    assert endless.sent > 1_000_000
    return most


def test_a_device_service(pair: Pair, endless: EndlessEdge, tmp_path: Path) -> None:
    """It says once what is wrong, goes on trying, and stays healthy in its own terms."""
    mute = socket.create_server(("127.0.0.1", 0))  # an edge that has nothing to say
    with mute, serving(pair.draft, address_of(mute), "--lanes", 1) as quiet:
        usual = resident_mib(quiet.process.pid)
    with serving(pair.draft, endless.address, "--lanes", 1) as service:
        began_s, before = time.monotonic(), endless.connections  # it connects while it starts, too
        assert most_mib(service.process.pid, endless) - usual < MOST_MIB
        assert service.get("/health").status_code in (200, 503)
        info = [line for line in service.lines if "does not end" in line]
        assert len(info) == 1
        assert endless.connections - before < 12 * (time.monotonic() - began_s)


def test_an_edge_whose_worker_is_hostile(
    endless: EndlessEdge, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cast = cast_in(tmp_path_factory.mktemp("cast"))
    path = write_list(tmp_path_factory.mktemp("list") / "w.toml", [("a", endless.address)])
    flags = ("--target", cast.a, "--threads", 1, "--federate")
    mute = socket.create_server(("127.0.0.1", 0))
    quiet = write_list(path.parent / "quiet.toml", [("a", address_of(mute))])
    with mute, running(*flags, quiet, serves=False) as daemon:
        mute.accept()
        time.sleep(1.5)
        usual = resident_mib(daemon.process.pid)
    with running(*flags, path, serves=False) as daemon:
        eventually(lambda: endless.connections > 0)
        assert most_mib(daemon.process.pid, endless) - usual < MOST_MIB
        assert daemon.process.poll() is None


@pytest.mark.parametrize("size", [0, 255], ids=["tiny", "short"])
def test_a_worker_whose_edge_is_hostile(
    size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    frames = (b"\x01" + bytes([size]) + b"x" * size) * max(1, 400_000 // (size + 2))
    with worker(cast_in(tmp_path_factory.mktemp("cast")).a, message_mib=1) as held:
        port = int(held.endpoint.rpartition(":")[2])
        usual = resident_mib(held.pid)
        with socket.create_connection(("127.0.0.1", port)) as hostile:
            ready = READY.replace(b"ROUTER", b"DEALER")
            hostile.sendall(GREETING + b"\x04" + bytes([len(ready)]) + ready)
            hostile.settimeout(10.0)
            most, cut = usual, False
            for _ in range(5000):
                try:
                    hostile.sendall(frames)
                except OSError:
                    cut = True
                    break
                most = max(most, resident_mib(held.pid))
        assert cut
        assert most - usual < MOST_MIB


CONNECTIONS = 32


@pytest.fixture
def edge(pair: Pair, key_folders: dict[str, Path]) -> Iterator[EdgeServer]:
    with EdgeServer(pair.target, keys=key_folders["edge"], threads=1) as edge:
        yield edge


@pytest.mark.parametrize(
    ("size", "messages"),
    [
        (1_000_000, 20),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(250_000, 40), (10_000_000, 2)]),
    ],
)
def test_a_key_that_sends_and_does_not_read(
    edge: EdgeServer,
    key_folders: dict[str, Path],
    size: int,
    messages: int,
) -> None:
    """Whatever it does the edge holds little of it, and nothing when it has gone."""
    alice, bob = (DeviceKeys.load(key_folders[name]) for name in ("alice", "bob"))
    before, most = resident_mib(edge.pid), 0.0
    with ExitStack() as stack:
        friend = stack.enter_context(RawClient(edge.endpoint, alice))
        deaf = [
            stack.enter_context(RawClient(edge.endpoint, bob, queue=1, receive_bytes=4096))
            for _ in range(CONNECTIONS)
        ]
        session = RawSession()
        friend.send(*session.begin(PROMPT))
        probe = b"x" * size
        for _ in range(messages):
            for client in deaf:
                client.say(m.Ping(nonce=1), probe)
            session.go_on(friend, 1)
            most = max(most, resident_mib(edge.pid))
        end_s = time.monotonic() + 3.0
        while time.monotonic() < end_s:
            session.go_on(friend, 1)
            if len(session.committed) > 200:
                friend.send(*session.begin(PROMPT))
            most = max(most, resident_mib(edge.pid))
            time.sleep(0.01)
        assert most - before < MOST_MIB + size / 2**20  # and what is being served
    end_s = time.monotonic() + 15.0
    while resident_mib(edge.pid) - before > 16:
        assert time.monotonic() < end_s, "it kept what it had taken for them"
        time.sleep(0.1)


def test_strangers_with_large_messages_share_one_limit(pair: Pair) -> None:
    """Thirty-two at once, each near the end of ten megabytes, and not a word said before."""
    size = 10_000_000
    with EdgeServer(pair.target, threads=1) as edge, ExitStack() as stack:
        before = resident_mib(edge.pid)
        host, _, port = edge.endpoint.removeprefix("tcp://").rpartition(":")
        strangers = []
        for _ in range(CONNECTIONS):
            stranger = stack.enter_context(socket.create_connection((host, int(port))))
            ready = READY.replace(b"ROUTER", b"DEALER")
            stranger.sendall(GREETING + b"\x04" + bytes([len(ready)]) + ready)
            stranger.sendall(b"\x02" + struct.pack(">Q", size))
            strangers.append(stranger)
        most = 0.0
        for _ in range(9):  # a megabyte each in turn, no faster than the memory watch looks
            for stranger in strangers:
                with suppress(OSError):
                    stranger.sendall(b"x" * (size // 10))
                most = max(most, resident_mib(edge.pid))
            time.sleep(0.04)
            most = max(most, resident_mib(edge.pid))
    assert most - before < MOST_MIB


def test_large_windows_of_many_devices_of_one_key_pass(
    tmp_path: Path, key_folders: dict[str, Path]
) -> None:
    """Eight at a time, of 3 MB each, over and over: none is lost, none has to come again."""
    vocab, gamma, rounds = 48_000, 16, 6
    tiny_artifact(tmp_path / "target", vocab=vocab, padded_vocab=vocab)
    bob = DeviceKeys.load(key_folders["bob"])
    q = np.full((gamma, vocab), 1 / vocab, "<f4").tobytes()
    ids = list(range(gamma))
    port = free_port()
    flags = {"threads": 1, "metrics": port}
    with (
        EdgeServer(tmp_path / "target", keys=key_folders["edge"], **flags) as edge,
        ExitStack() as stack,
    ):
        clients = [stack.enter_context(RawClient(edge.endpoint, bob)) for _ in range(8)]
        sessions = [RawSession() for _ in clients]
        for client, session in zip(clients, sessions, strict=True):
            client.send(*session.begin(PROMPT, "dsd"))
        for _ in range(rounds):
            for client, session in zip(clients, sessions, strict=True):
                client.send(*session.window(ids, q))
            for client, session in zip(clients, sessions, strict=True):
                session.settle(ids, client.receive(30.0))
        samples = scrape(port)
    assert not [name for name in samples if "connections_cut" in name and samples[name]]
    assert samples["dropped_replies_total"] == 0
    assert not [name for name in samples if "refusals" in name and samples[name]]


def test_answered_windows_are_let_go_of(tmp_path: Path, key_folders: dict[str, Path]) -> None:
    """Of 12 MB each, one in each session of a key; retries are known all the same."""
    vocab, gamma = 48_000, 64
    tiny_artifact(tmp_path / "target", vocab=vocab, padded_vocab=vocab)
    bob = DeviceKeys.load(key_folders["bob"])
    q = np.full((gamma, vocab), 1 / vocab, "<f4").tobytes()
    other = np.roll(np.frombuffer(q, "<f4"), 1).copy()
    other[:2] += (1e-6, -1e-6)
    with (
        EdgeServer(tmp_path / "target", keys=key_folders["edge"], threads=1) as edge,
        RawClient(edge.endpoint, bob) as client,
    ):
        before = resident_mib(edge.pid)
        for _ in range(8):
            session = RawSession()
            client.send(*session.begin(PROMPT, "dsd"))
            window = session.window(list(range(gamma)), q)
            client.send(*window)
            verdict = client.receive(30.0)
            assert isinstance(verdict, m.Verdict), verdict
            client.send(*window)
            assert client.receive(30.0) == verdict
            client.send(*window[:-1], other.tobytes())
            client.fails("conflict")
        eventually(lambda: resident_mib(edge.pid) - before < MOST_MIB, 10.0)


def test_a_fast_stream_over_a_slow_link_loses_nothing(
    pair: Pair, key_folders: dict[str, Path]
) -> None:
    """Far more tokens than the link takes at a time, while ninety replies wait."""
    port = free_port()
    with (
        EdgeServer(pair.target, keys=key_folders["edge"], threads=1, metrics=port) as edge,
        Emulator(edge.endpoint, Conditions(rtt_s=0.2, down_bps=3e5)) as link,
        Device(pair.draft, link.endpoint, key_folders["alice"], threads=1) as device,
    ):
        got = device.generate(PROMPT, protocol="stream", max_tokens=100).tokens
        alone = device.generate(PROMPT, protocol="greedy", max_tokens=100).tokens
        assert got == alone
        assert scrape(port)["dropped_replies_total"] == 0


def test_a_channel_that_is_dropped_hangs_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        channel = EdgeChannel(address, None, 1 << 20)
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(5)
            assert connection.recv(1)  # the beginning of a greeting
            del channel
            gc.collect()
            while connection.recv(4096):
                pass


def test_channels_that_die_in_a_cycle_hang_up() -> None:
    """In a process of its own: the garbage collector would wait for ever, in C."""
    code = """
import gc, socket
from pilotfish.wire.channel import EdgeChannel
gc.disable()
with socket.create_server(("127.0.0.1", 0)) as listening:
    for _ in range(10):
        channel = EdgeChannel(f"tcp://127.0.0.1:{listening.getsockname()[1]}", None, 1 << 20)
        channel.itself = channel
        connection, _ = listening.accept()
        del channel
        gc.collect()
        while connection.recv(4096):
            pass
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_where_the_kernel_does_not_count_replies_go_on(pair: Pair, tmp_path: Path) -> None:
    """A local socket is no TCP: what its client has read is not known, and not held against it."""
    address = f"ipc://{tmp_path}/edge"
    flags = ("--target", pair.target, "--threads", 1, "--listen", address)
    with running(*flags) as edge, RawClient(edge.endpoint) as client:
        for _ in range(60):
            client.say(m.Ping(nonce=1), b"x" * 200_000)
            assert isinstance(client.receive(), m.Pong)
