"""The loss of a connection, from the segments that the kernels of both ends have counted."""

from __future__ import annotations

import socket

import pytest

from pilotfish.wire.link.meter import LinkMeter
from pilotfish.wire.link.tcp import Segments, read_segments


def test_a_connection_knows_its_segments() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as near, server.accept()[0] as far:
            near.sendall(b"x" * 100)
            far.recv(100)
            segments = read_segments(near.fileno(), port)
            assert segments is not None
            assert segments.sent >= 1
            assert segments.retransmitted == 0
            near.sendall(b"the borrowed descriptor is still open")
            assert read_segments(near.fileno(), port + 1) is None  # another peer: not ours any more
            assert read_segments(server.fileno(), port) is None
    assert read_segments(10_000, port) is None


def test_loss_is_that_of_the_last_seconds() -> None:
    now_ns = [10**12]
    meter = LinkMeter(lambda: now_ns[0])

    def loss(sent: int, again: int) -> float:
        reading = meter.state(Segments(sent, again)).retransmitted
        assert reading is not None
        now_ns[0] += 10**9
        return reading.value

    assert loss(1000, 100) == 0.1  # since the connection began: nothing else is known
    shares = [loss(1000 + 100 * second, 100) for second in range(1, 12)]
    assert shares[-1] == 0.0  # the link has recovered
    assert all(share < 0.1 for share in shares)
    assert loss(2200, 200) == pytest.approx(100 / 500)  # 5 s
    assert loss(10, 1) == 0.1  # another connection


def test_the_loss_down_is_what_the_edge_told_last() -> None:
    now_ns = [10**12]
    meter = LinkMeter(lambda: now_ns[0])
    assert meter.state().retransmitted_down is None
    for sent, again in ((100, 10), (200, 10)):
        now_ns[0] += 6 * 10**9
        meter.record_segments_down(Segments(sent, again))
    now_ns[0] += 2 * 10**9
    reading = meter.state(Segments(10, 5)).retransmitted_down
    assert reading is not None
    assert (reading.value, reading.age_s, reading.samples) == (0.0, pytest.approx(2.0), 100)


def test_few_segments_tell_the_loss_of_a_longer_time() -> None:
    now_ns = [10**12]
    meter = LinkMeter(lambda: now_ns[0])
    for second in range(20):
        now_ns[0] += 10**9
        reading = meter.state(Segments(100 + 2 * second, 10)).retransmitted
    assert reading is not None
    assert reading.samples >= 50
