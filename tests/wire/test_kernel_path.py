"""The laboratory's path is what was asked for, as the kernel's own TCP sees it."""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernel_path import KernelPath, needs_paths
from tests.support.path_ways import PathConditions, Way
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


def arrivals_of(packets: list[tuple[float, int]], **conditions: Any) -> list[tuple[float, int]]:
    """Send packets (seconds, bytes) up this path; returns when each arrives, in milliseconds."""
    way = Way("up", source=-1, sink=-1)
    way.shape(PathConditions(**conditions), 0.0)
    seen = []
    for at, size in packets:
        while (due := way.due_s()) <= at:
            if (packet := way.take(due)) is not None:
                seen.append((round(due * 1e3, 6), len(packet)))
        way.put(bytes(size), at)
    while not math.isinf(due := way.due_s()):
        if (packet := way.take(due)) is not None:
            seen.append((round(due * 1e3, 6), len(packet)))
    return seen


@pytest.mark.parametrize(
    ("conditions", "packets", "expected"),
    [
        ({"rtt_s": 0.1}, [(0.0, 100), (0.001, 100)], [(50, 100), (51, 100)]),
        (
            {"up_bps": 12e6},
            [(0.0, 1500), (0.0, 750), (0.01, 1500)],
            [(1, 1500), (1.5, 750), (11, 1500)],
        ),
        ({"up_bps": 12e6, "queue_bytes": 3000}, [(0.0, 1500)] * 3, [(1, 1500), (2, 1500)]),
        ({"mtu_up": 600}, [(0.0, 601), (0.0, 600)], [(0, 600)]),
        ({"reorder": 1.0, "reorder_s": 0.01}, [(0.0, 100)], [(10, 100)]),
    ],
)
def test_packets_arrive_when_the_path_says(
    conditions: dict[str, Any], packets: list[tuple[float, int]], expected: list[tuple[float, int]]
) -> None:
    assert arrivals_of(packets, **conditions) == expected


def test_jitter_delays_each_packet_by_up_to_half_of_it_and_none_overtakes_another() -> None:
    spaced = [(0.1 * at, 100 + at) for at in range(200)]
    apart = arrivals_of(spaced, rtt_s=0.02, jitter_s=0.04)
    delays_ms = [at - 1e3 * sent for (at, _), (sent, _) in zip(apart, spaced, strict=True)]
    assert all(10 <= each <= 30 for each in delays_ms)
    assert min(delays_ms) < 11  # each with a chance of 10⁻⁴ over seeds
    assert max(delays_ms) > 29
    assert 18 < sum(delays_ms) / len(delays_ms) < 22
    burst = arrivals_of([(0.0, 100 + at) for at in range(50)], rtt_s=0.02, jitter_s=0.04)
    assert burst == sorted(burst)  # in time, and by size in the order of sending


def test_packets_leave_with_the_opportunities_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("2\n3\n10\n")
    packets = [(0.0, 1500), (0.0, 1500), (0.0, 1500), (0.0, 1500)]
    expected = [(2, 1500), (3, 1500), (10, 1500), (12, 1500)]
    assert arrivals_of(packets, trace_up=str(trace)) == expected


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
    # TCP slows down after losses, and so leaves some of the rate unused
    rate = sum(size for _, size in seen[1:]) * 8 / (seen[-1][0] - seen[0][0])
    assert 0.5 * 4e6 < rate < 4e6


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


def echoed(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    return connection.recv(len(data))


def test_a_nat_that_forgets_a_connection_has_it_reset_by_the_edge() -> None:
    with KernelPath() as path, listening(path, echo) as port:
        path.rebind()
        with client(path, port) as connection:
            connection.sendall(b"first")
            assert received(connection, 5) == b"first"
            path.rebind()
            with pytest.raises(ConnectionResetError):
                echoed(connection, b"second")  # the reset may come before or after it is sent
        with client(path, port) as connection:
            connection.sendall(bytes(5000))
            assert received(connection, 5000) == bytes(5000)
        assert path.connections()[0].ended_by == "edge RST"


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
