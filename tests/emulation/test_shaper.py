"""The arithmetic of an emulated link, on a clock that the test turns."""

from __future__ import annotations

import math
from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.emulation.emulator import Conditions
from pilotfish.emulation.shaper import (
    FIN,
    MAX_HELD_BYTES,
    SEGMENT_BYTES,
    MAX_WAITING_BYTES,
    Flow,
    LinkShaper,
    split_conditions,
)
from pilotfish.emulation.traces import Trace
from tests.support.examples import examples


def shaper(trace=None, now=0.0, **conditions):
    """The upward direction of such a link."""
    up, _ = split_conditions(Conditions(**conditions))
    return LinkShaper(up._replace(trace=trace), now)


def arrivals(line, flow, until=math.inf):
    """(time, bytes) of all that arrives until then, as a proxy that wakes on time sees it."""
    seen = []
    while True:
        now = min(line.wake_s(), flow.due_s())
        if now > until or math.isinf(now):
            return seen
        line.advance(now)
        while flow.due_s() <= now:
            seen.append((now, flow.take()))


@given(
    sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=30),
    gaps=st.lists(st.floats(0, 0.02), min_size=30, max_size=30),
    rate=st.sampled_from([1e5, 5e6, 1e9]),
)
@examples(60)
def test_every_byte_arrives_when_the_rate_and_the_delay_say(sizes, gaps, rate):
    line, flow = shaper(rtt_s=0.04, up_bps=rate), Flow()
    now, left, expected = 0.0, 0.0, []
    for size, gap in zip(sizes, gaps, strict=False):
        now += gap
        line.advance(now)
        line.put(flow, bytes(size), now)
        while size:
            segment = min(size, SEGMENT_BYTES)
            left = max(left, now) + segment * 8 / rate
            expected.append((left + 0.02, segment))
            size -= segment
    seen = arrivals(line, flow)
    assert [len(data) for _, data in seen] == [size for _, size in expected]
    # a departure is looked at up to 1 ms late, and that delays nothing
    assert [at for at, _ in seen] == pytest.approx([at for at, _ in expected], abs=1e-9)


def test_waking_late_does_not_add_up():
    line, flow = shaper(up_bps=12e6), Flow()  # 1 ms a segment
    line.put(flow, bytes(100 * SEGMENT_BYTES), 0.0)
    for late in (0.0005, 0.0301, 0.0309, 0.0901):
        line.advance(late)
        assert len(flow.in_transit) == int(late * 1000)
    assert [round(segment.due_s, 9) for segment in flow.in_transit] == [
        round((i + 1) / 1000, 9) for i in range(90)
    ]


@given(st.lists(st.integers(0, 400), min_size=2, max_size=40), st.integers(100, 1600))
@examples(60)
def test_a_busy_link_delivers_the_trace_as_it_is(steps, size):
    times = [sum(steps[: i + 1]) for i in range(len(steps))]
    times[-1] += 1  # no trace is of length 0
    period, cycles = times[-1], 3
    opportunities = [cycle * period + time for cycle in range(cycles + 1) for time in times]
    line, flow = shaper(Trace(array("Q", times))), Flow()
    for _ in range(len(opportunities) * SEGMENT_BYTES // size + 1):
        line.put(flow, bytes(size), 0.0)
    total, seen = 0, {}
    for at, data in arrivals(line, flow, until=(cycles * period + 0.5) / 1e3):
        total += len(data)
        seen[round(at * 1e3)] = total
    for time in {time for time in opportunities if time <= cycles * period}:
        carried = sum(other <= time for other in opportunities) * SEGMENT_BYTES
        # but for a segment that is only partly through
        assert carried - min(size, SEGMENT_BYTES) < seen.get(time, 0) <= carried


def test_an_opportunity_that_finds_nothing_is_lost_and_small_segments_share_one():
    line, flow = shaper(Trace(array("Q", [1, 2, 3, 10]))), Flow()
    line.put(flow, bytes(100), 0.0025)  # 1 and 2 are gone
    line.put(flow, bytes(200), 0.0026)
    line.put(flow, bytes(1300), 0.0027)  # 1200 of them still go at 3, the others at 10
    line.put(flow, bytes(1400), 0.0028)  # which leaves exactly room for these
    line.put(flow, bytes(1), 0.0029)  # the trace begins again
    seen = [(round(at * 1e3, 6), len(data)) for at, data in arrivals(line, flow)]
    assert seen == [(3, 100), (3, 200), (10, 1300), (10, 1400), (11, 1)]


def test_an_opportunity_does_not_serve_later_segments():
    line, flow = shaper(Trace(array("Q", [1, 5]))), Flow()
    line.put(flow, bytes(100), 0.0005)
    line.advance(0.002)
    line.put(flow, bytes(100), 0.002)
    assert [round(at * 1e3, 6) for at, _ in arrivals(line, flow)] == [1, 5]


def test_jitter_stays_in_its_bounds_and_keeps_the_order():
    line, flow = shaper(rtt_s=0.02, jitter_s=0.01), Flow()
    due = []
    for i in range(2000):
        line.put(flow, i.to_bytes(2, "big"), i * 1e-3)
        due.append(flow.in_transit[-1].due_s - i * 1e-3 - 0.01)
    assert -1e-12 <= min(due) < 0.0002
    assert 0.0048 < max(due) <= 0.005 + 1e-12
    assert sum(due) / 2000 == pytest.approx(0.0025, abs=2e-4)
    seen = [int.from_bytes(data, "big") for _, data in arrivals(line, flow)]
    assert seen == list(range(2000))


def test_a_lost_segment_is_held_a_round_trip_when_three_follow_it():
    line, flow = shaper(rtt_s=0.05, up_bps=12e6), Flow()
    line._shape = line._shape._replace(loss=0.5, random=Losing(1))  # the second
    line.put(flow, bytes(6 * SEGMENT_BYTES), 0.0)
    at = [round(at * 1e3, 6) for at, _ in arrivals(line, flow)]
    # left at 1, 2, … ms; the third after the second leaves at 5: noticed 3 ms later, then an RTT
    assert at == [26, *[27 + 3 + 50] * 5]
    assert line.lost == 1


@pytest.mark.parametrize("followers", [0, 1, 2])
def test_a_lost_segment_with_nothing_behind_it_waits_for_the_time_out(followers):
    line, flow = shaper(rtt_s=0.05, up_bps=12e6), Flow()
    line._shape = line._shape._replace(loss=0.5, random=Losing(0))
    line.put(flow, bytes((1 + followers) * SEGMENT_BYTES), 0.0)
    at = [round(at * 1e3, 6) for at, _ in arrivals(line, flow)]
    assert at == [26 + 50 + 200] * (1 + followers)


def test_a_stall_holds_up_one_connection_only():
    line, stalled, other = shaper(rtt_s=0.05), Flow(), Flow()
    line._shape = line._shape._replace(loss=0.5, random=Losing(0))
    line.put(stalled, b"a", 0.0)
    line.put(other, b"b", 0.0)
    assert stalled.due_s() == pytest.approx(0.275)
    assert other.due_s() == pytest.approx(0.025)


class Losing(Random):
    """Loses one segment: the one of this number."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def random(self):
        self.left -= 1
        return 0.0 if self.left == -1 else 0.99


@pytest.mark.parametrize("loss", [0.01, 0.1])
def test_so_many_segments_are_lost_as_asked_for(loss):
    line, flow = shaper(loss=loss, seed=7), Flow()
    count = 20_000
    for i in range(count // 10):
        line.put(flow, bytes(10 * SEGMENT_BYTES), i * 1e-3)
    deviation = math.sqrt(count * loss * (1 - loss))
    assert abs(line.lost - count * loss) < 4 * deviation
    held = sum(segment.repair_s is not None for segment in flow.in_transit)
    assert held == line.lost


def test_the_same_seed_loses_the_same_segments():
    def lost(seed):
        line, flow = shaper(loss=0.2, jitter_s=0.01, seed=seed), Flow()
        line.put(flow, bytes(50 * SEGMENT_BYTES), 0.0)
        return list(flow.in_transit)

    assert lost(3) == lost(3) != lost(4)


def test_a_new_rate_holds_for_what_still_waits():
    line, flow = shaper(up_bps=12e3, rtt_s=0.02), Flow()  # a second a segment
    line.put(flow, bytes(3 * SEGMENT_BYTES), 0.0)
    line.advance(1.5)
    up, _ = split_conditions(Conditions(up_bps=12e6, rtt_s=0.1))
    line.change(up, 1.5)
    line.advance(2.0)
    assert [round(segment.due_s, 6) for segment in flow.in_transit] == [1.01, 1.551, 1.552]


def test_what_waits_and_what_is_under_way_are_bounded():
    line, flow = shaper(up_bps=1e3), Flow()
    puts = 0
    while not line.full:
        line.put(flow, b"x", 0.0)
        puts += 1
    assert puts <= MAX_WAITING_BYTES / 100  # an object of some 100 bytes each
    free, far = shaper(rtt_s=10.0), Flow()
    puts = 0
    while not far.full:
        free.put(far, b"x", 0.0)
        puts += 1
    assert puts <= MAX_HELD_BYTES / 100
    assert not free.full


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ({}, MAX_WAITING_BYTES),
        ({"up_bps": 1e6}, 31_250),
        ({"up_bps": 64e3}, 2 * SEGMENT_BYTES),
        ({"up_bps": 1e9}, MAX_WAITING_BYTES),
        ({"up_bps": 64e3, "buffer_bytes": 20_000}, 20_000),
    ],
)
def test_a_quarter_of_a_second_may_wait_unless_told_otherwise(link, expected):
    line, flow = shaper(**link), Flow()
    line.put(flow, FIN, 0.0)
    assert line.room == line.buffer_bytes == expected


def test_room_comes_back_as_the_link_takes_what_waits():
    line, flow = shaper(up_bps=12e3, buffer_bytes=4000), Flow()  # a second a segment
    line.put(flow, bytes(3000), 0.0)
    assert line.room == 1000
    assert line.full
    line.advance(1.0)
    assert line.room == 2500
    assert not line.full


def test_a_trace_has_the_buffer_of_its_mean_rate():
    trace = Trace(array("Q", [1, 2, 3, 50]))  # 4 packets in 50 ms
    assert shaper(trace).buffer_bytes == 20 * SEGMENT_BYTES


def test_the_end_comes_after_all_that_was_sent():
    line, flow = shaper(up_bps=12e6, rtt_s=0.02), Flow()
    line.put(flow, bytes(2 * SEGMENT_BYTES), 0.0)
    line.put(flow, FIN, 0.0)
    seen = arrivals(line, flow)
    assert [data for _, data in seen][-1] == FIN
    assert [round(at * 1e3, 6) for at, _ in seen] == [11, 12, 12]
