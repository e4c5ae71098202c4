"""The share of lost segments that the meter computes from the kernel's counters."""

from __future__ import annotations

import pytest

from pilotfish.wire.link.meter import LinkMeter
from pilotfish.wire.link.tcp import Segments


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


def test_a_counter_that_overflows_is_no_loss() -> None:
    """A pong has 31 bits of the counter, some terabytes; the repeated segments go on counting."""
    now_ns = [10**12]
    meter = LinkMeter(lambda: now_ns[0])
    values = []
    for sent in (2**31 - 2000, 2**31 - 1000, 0, 1000, 2000, 3000, 4000):
        now_ns[0] += 2 * 10**9
        meter.record_segments_down(Segments(sent, 90_000 + sent % 7))
        reading = meter.state().retransmitted_down
        values.append(None if reading is None else reading.value)
    assert all(value is None or value < 0.01 for value in values)
    assert values[-1] is not None


def test_counters_of_an_idle_connection_take_no_memory() -> None:
    """An edge may also tell the same numbers for ever."""
    now_ns = [10**12]
    meter = LinkMeter(lambda: now_ns[0])
    for number in range(1000):
        now_ns[0] += 2 * 10**9
        meter.record_segments_down(Segments(10, 1))
        assert meter.state(Segments(100 + number // 9, 10)).retransmitted is not None
    assert len(meter._loss_down._counts) < 5
    assert len(meter._loss._counts) < 100
