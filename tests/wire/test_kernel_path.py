"""The laboratory's path is what was asked for, as the kernel's own TCP sees it."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support.kernel_path import KernelPath, needs_paths
from tests.support.tcp import arrivals, echo, received

pytestmark = needs_paths()


@contextmanager
def listening(path: KernelPath, handler: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve at the edge's end, each connection in a thread; yields the port."""
    with path.at_edge():
        listener = socket.create_server((path.address, 0))

    def accept() -> None:
        try:
            while True:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=handler, args=(connection,), daemon=True).start()
        except OSError:
            pass

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def client(path: KernelPath, port: int) -> socket.socket:
    """Connect from the device's end."""
    with path.at_device():
        return socket.create_connection((path.address, port), 20.0)


def retransmissions(connection: socket.socket) -> int:
    """Return the kernel's count for the whole connection."""
    data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("I", data, 100)[0])  # tcpi_total_retrans


@pytest.mark.timing
def test_a_handshake_takes_a_round_trip_and_so_does_an_echo() -> None:
    handshakes, echoes = [], []
    with KernelPath(rtt_s=0.1) as path, listening(path, echo) as port:
        for _ in range(3):
            began = time.monotonic()
            with client(path, port) as connection:
                handshakes.append(time.monotonic() - began)
                began = time.monotonic()
                connection.sendall(b"ping")
                received(connection, 4)
                echoes.append(time.monotonic() - began)
    # a busy machine makes some longer, and none shorter
    assert min(handshakes) == pytest.approx(0.1, abs=0.01)
    assert min(echoes) == pytest.approx(0.1, abs=0.01)


@pytest.mark.timing
def test_a_rate_holds_and_a_full_queue_drops() -> None:
    seen: list[tuple[float, int]] = []
    done = threading.Event()

    def note(connection: socket.socket) -> None:
        seen.extend(arrivals(connection))
        done.set()

    conditions = {"up_bps": 4e6, "rtt_s": 0.02, "queue_bytes": 20_000}
    with KernelPath(**conditions) as path, listening(path, note) as port:
        with client(path, port) as connection:
            connection.sendall(bytes(400_000))  # 0.8 s, and headers
            connection.shutdown(socket.SHUT_WR)
            assert done.wait(20)
            assert retransmissions(connection) > 0
        assert path.up().overflowed > 0
        assert path.up().delivered_bytes == pytest.approx(400_000 * 1500 / 1448, rel=0.03)
    rate = sum(size for _, size in seen[1:]) * 8 / (seen[-1][0] - seen[0][0])
    assert rate == pytest.approx(4e6 * 1448 / 1500, rel=0.1)


def test_large_packets_vanish_and_small_ones_pass() -> None:
    with KernelPath(mtu_up=600) as path, listening(path, echo) as port:
        with client(path, port) as connection:
            connection.sendall(bytes(400))
            assert len(received(connection, 400)) == 400
            connection.sendall(bytes(1400))
            connection.settimeout(0.4)
            with pytest.raises(TimeoutError):
                connection.recv(1)
        assert path.up().too_large > 0


def test_a_cut_path_is_silent_and_a_changed_address_leaves_connections_dead() -> None:
    with KernelPath() as path, listening(path, echo) as port:
        with client(path, port) as connection:
            connection.settimeout(0.3)
            path.cut()
            connection.sendall(b"late")
            with pytest.raises(TimeoutError):
                connection.recv(1)
            path.restore()
            connection.settimeout(10)
            assert received(connection, 4) == b"late"
            path.change_address()
            connection.settimeout(0.3)
            connection.sendall(b"lost")
            with pytest.raises(TimeoutError):
                connection.recv(1)
            with client(path, port) as another:
                another.sendall(b"here")
                assert received(another, 4) == b"here"
        first, second = path.connections()
        assert first.device != second.device
        assert second.edge_port == port
