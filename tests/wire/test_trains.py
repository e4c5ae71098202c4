"""First readings of simulated links, and trains that tell no rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.wire.link.train import FIRST_TRAIN, MAX_PROBE_BYTES, RateProbe, estimate_rate
from tests.channel_grid import Link, SimulatedDevice, score_grid


@pytest.mark.parametrize(("by_message", "window"), [(False, False), (True, True)])
def test_first_readings_are_true_or_unknown(by_message: bool, window: bool) -> None:
    """The goal over RTT, jitter, rate and loss; under the harsher laws, too."""
    scores = score_grid(1, by_message=by_message, window=window)
    assert scores["all"].true_share >= 0.9
    assert scores["easy"].unknown_share <= 0.1
    assert scores["hard"].unknown_share <= 0.4
    assert scores["all"].costly <= 0.02 * scores["all"].all


def test_after_three_answers_rates_are_close() -> None:
    """Whatever the windows of the answers add; lost segments delay many of these."""
    scores = score_grid(1, answers=3)
    assert scores["all"].close_share >= 0.95
    assert scores["easy"].unknown_share <= 0.1
    assert scores["hard"].unknown_share <= 0.4


def test_a_lost_segment_is_no_slow_link() -> None:
    """The train stalls until the segment is sent again: its arrivals are two heaps."""
    arrivals_s = [0.0, 0.006, 0.012, 0.018, 0.249, 0.249, 0.249, 0.249]
    assert estimate_rate(arrivals_s, (1_500,) * 8) is None
    probe = RateProbe()
    probe.on_train([*arrivals_s, 0.249], 0.25, may_repeat=True)
    assert probe.rate_bps is None
    assert sum(probe.sizes) > 2 * sum(FIRST_TRAIN)  # it still has most of its time


# `KernelPath` delivered these trains, sent by the kernel's CUBIC. Each row has the link's rate
# (Mbit/s of payload), its RTT (ms), the size of a message (bytes), and the arrivals (ms).
PAUSED_TRAINS = (
    # a segment is lost: what follows it arrives at once when it was repeated
    (2.21, 53.8, 1464, [0, 5.8, 11.7, 17.6, 23.5, 29.3, 103.7, *[103.8] * 5, *[103.9] * 4]),
    (3.10, 23.7, 2270, [0, 6.1, 12.3, 18.6, 24.6, 30.8, 36.9, 97.3, 97.3, 97.5, *[97.6] * 4]),
    # the edge's machine was busy for 60 ms
    (2.92, 9.6, 3534, [0, 8.7, 16.7, 28.7, 37.6, 49.9, 57.7, 68.8, 124.5, 135.3, 141.8, 154.8]),
    # twice, TCP's window is full
    (31.3, 69.4, 5500, [0, 0, 2.5, 2.8, 64.1, 72.2, 74.2, 75.1, 76.8, 77.3, 79.5, 82, 155.3]),
)


@pytest.mark.parametrize(("mbps", "rtt_ms", "size", "arrivals_ms"), PAUSED_TRAINS)
def test_what_arrives_between_pauses_of_tcp_tells_the_rate(
    mbps: float, rtt_ms: float, size: int, arrivals_ms: list[float]
) -> None:
    arrivals_s = [at * 1e-3 for at in arrivals_ms]
    estimate = estimate_rate(arrivals_s, (size,) * len(arrivals_s), rtt_ms * 1e-3)
    assert estimate is not None
    assert estimate.error < 0.355
    assert estimate.bps == pytest.approx(mbps * 1e6, rel=0.15)


def test_the_link_of_the_paper_is_never_thought_to_be_four_times_as_fast() -> None:
    """172 Mbit/s, RTT 20 to 30 ms: one ping read 4.8 Gbit/s in 39 % of cases."""
    for seed in range(50):
        device = SimulatedDevice(Link(172e6, 0.02, 0.01, 0.0), seed)
        for rate_bps in device.read_by_trains().rates_bps:
            assert rate_bps is None or 172e6 / 4 < rate_bps < 4 * 172e6


@given(st.floats(1e5, 1e9))
def test_a_train_at_a_steady_pace_tells_its_rate(rate_bps: float) -> None:
    sizes = (50_000,) * 16
    arrivals_s = [8 * 50_000 * at / rate_bps for at in range(1, 17)]
    estimate = estimate_rate(arrivals_s, sizes)
    assert estimate is not None
    assert estimate.bps == pytest.approx(rate_bps, rel=0.01)


@given(
    st.lists(st.integers(0, 2**63 - 1), min_size=8, max_size=8),
    st.floats(-1e9, 1e9),
    st.floats(0.0, math.inf),
)
def test_times_without_sense_are_no_fault(times_ns: list[int], took_s: float, rtt_s: float) -> None:
    """An edge may report any times."""
    probe, spent = RateProbe(), 0
    for _ in range(2):
        sizes = probe.sizes
        spent += sum(sizes)
        if sizes:
            arrivals_s = [times_ns[at % 8] * 1e-9 for at in range(len(sizes))]
            probe.on_train(arrivals_s, took_s, may_repeat=True, rtt_s=rtt_s)
    assert probe.sizes == ()
    assert spent <= MAX_PROBE_BYTES
    assert probe.rate_bps is None or probe.rate_bps > 0


def test_the_first_train_fits_the_first_window() -> None:
    """TCP begins with 10 segments of 1,448 bytes; framing takes about 100 bytes of a message."""
    assert 1 + len(FIRST_TRAIN) <= 10  # with the request before it
    assert max(FIRST_TRAIN) + 100 <= 1448


def test_messages_that_arrive_at_once_are_no_rate() -> None:
    probe = RateProbe()
    probe.on_train([5.0] * len(FIRST_TRAIN), 0.0, may_repeat=True)
    assert sum(probe.sizes) <= MAX_PROBE_BYTES - sum(FIRST_TRAIN)
    probe.on_train([6.0] * len(probe.sizes), 0.0, may_repeat=True)
    assert probe.rate_bps is None
