"""What the meter learns of a link from exchanges whose truth is known."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.wire.link import tcp
from pilotfish.wire.link.meter import FRESH_S, LARGE_BYTES, SMALL_BYTES, LinkMeter, Transit
from pilotfish.wire.link.state import signal_dbm
from pilotfish.wire.link.tcp import Segments, is_paced, read_segments

MS = 1_000_000
ENOUGH = 4  # large messages that agree are a rate


class Road:
    """A link with known delays and rates; its exchanges go through a meter."""

    def __init__(self, meter: LinkMeter, rtt_s: float, up_bps: float, down_bps: float) -> None:
        self.meter, self.rtt_s, self.up_bps, self.down_bps = meter, rtt_s, up_bps, down_bps
        self.offset_ns = 987_654_321_000  # the edge's clock, ahead of ours
        # so that the last exchanges have just happened
        self.now_ns = time.monotonic_ns() - int(1e9)

    def exchanges(self, count: int, **options: int) -> None:
        for _ in range(count):
            self.exchange(**options)

    def exchange(
        self,
        up: int = 60,
        down: int = 60,
        ahead: int = 0,
        held_ns: int = 3 * MS,
        learn: bool = True,
    ) -> Transit:
        there = int((self.rtt_s / 2 + 8 * up / self.up_bps) * 1e9)
        back = int((self.rtt_s / 2 + 8 * down / self.down_bps) * 1e9)
        sent, self.now_ns = self.now_ns, self.now_ns + there + held_ns + back
        return self.meter.record_exchange(
            up_bytes=up,
            down_bytes=down,
            ahead_bytes=ahead,
            sent_ns=sent,
            received_ns=self.now_ns,
            edge_received_ns=sent + there + self.offset_ns,
            held_ns=held_ns,
            learn=learn,
        )


@given(
    st.floats(1e-4, 0.3), st.floats(2e5, 1e9), st.floats(2e5, 1e9), st.integers(LARGE_BYTES, 10**6)
)
def test_rtt_and_rates_are_found(rtt_s: float, up: float, down: float, size: int) -> None:
    meter = LinkMeter()
    road = Road(meter, rtt_s, up, down)
    for _ in range(3):
        road.exchange()
    small_s = rtt_s + 8 * 60 / up + 8 * 60 / down
    road.exchanges(ENOUGH, up=size)
    road.exchanges(ENOUGH, down=size)
    state = meter.state()
    assert state.rtt is not None
    assert state.up is not None
    assert state.down is not None
    assert state.rtt.value == pytest.approx(small_s, rel=1e-3)
    # the small messages' own transfer counts as RTT, and clocks resolve 20 µs: that is all that may
    # be off in the time that the large ones took
    for reading, rate in ((state.up, up), (state.down, down)):
        took_s, told_s = 8 * size / rate, 8 * size / reading.value
        assert told_s == pytest.approx(took_s, abs=8 * 120 / min(up, down) + 21e-6)


def test_both_ways_are_told_apart() -> None:
    road = Road(LinkMeter(), 0.02, 10e6, 100e6)
    for _ in range(3):
        road.exchange()
    transit = road.exchange(up=100_000)
    assert transit.up_s == pytest.approx(0.01 + 0.08, rel=0.01)
    assert transit.down_s == pytest.approx(0.01, rel=0.05)


def test_small_messages_say_nothing_about_rates_and_large_ones_nothing_about_rtt() -> None:
    road = Road(LinkMeter(), 0.02, 10e6, 10e6)
    road.exchanges(ENOUGH, up=SMALL_BYTES + 1)
    road.exchanges(ENOUGH, up=LARGE_BYTES)
    assert road.meter.state().rtt is None
    assert road.meter.state().up is None  # how much of it was the RTT?
    road.exchange()
    road.exchanges(ENOUGH, up=LARGE_BYTES - 1)
    state = road.meter.state()
    assert state.rtt is not None
    assert state.up is None


def test_what_was_sent_twice_teaches_nothing() -> None:
    road = Road(LinkMeter(), 0.02, 10e6, 10e6)
    transit = road.exchange(learn=False)
    assert sum(transit) == pytest.approx(0.02, rel=0.01)
    assert road.meter.state().rtt is None


def test_one_stall_changes_nothing_and_three_slower_rounds_do() -> None:
    road = Road(LinkMeter(), 0.005, 1e9, 1e9)
    for _ in range(10):
        road.exchange()
    road.rtt_s = 0.25
    road.exchange()
    state = road.meter.state()
    assert state.rtt is not None
    assert state.rtt.value == pytest.approx(0.005, rel=0.05)
    road.rtt_s = 0.05
    for _ in range(3):
        road.exchange()
    state = road.meter.state()
    assert state.rtt is not None
    assert state.rtt.value == pytest.approx(0.05, rel=0.05)


def test_the_one_sample_of_a_streamed_answer_is_not_outvoted() -> None:
    road = Road(LinkMeter(), 0.005, 1e9, 1e9)
    for _ in range(10):
        road.exchange()
    road.meter.begin_answer()
    road.rtt_s = 0.08
    road.exchange()
    state = road.meter.state()
    assert state.rtt is not None
    assert state.rtt.value == pytest.approx(0.08, rel=0.01)


@pytest.mark.parametrize("drift", [-100e-6, 100e-6])
def test_clocks_drift_apart(drift: float) -> None:
    """At 100 ppm two clocks are 60 ms apart after ten minutes."""
    road = Road(LinkMeter(), 0.020, 10e6, 10e6)
    road.exchange()
    for _ in range(30):
        road.now_ns += int(20e9)
        road.offset_ns += int(20e9 * drift)
        road.rtt_s = 0.0202  # never again as quick as the first
        road.exchange()
    transit = road.exchange(up=12_000, down=12_000)
    assert transit.up_s == pytest.approx(0.0197, abs=0.003)
    assert transit.down_s == pytest.approx(0.0197, abs=0.003)


@pytest.mark.parametrize("jump_ns", [-(10**12), 10**12, 10**8])
def test_a_clock_that_jumps_is_noticed(jump_ns: int) -> None:
    road = Road(LinkMeter(), 0.020, 10e6, 10e6)
    for _ in range(3):
        road.exchange()
    road.offset_ns += jump_ns
    road.rtt_s = 0.030
    road.exchange()
    transit = road.exchange(up=100_000)
    assert transit.up_s == pytest.approx(0.095, rel=0.02)


def test_a_rate_that_jitter_hides_is_not_taken_for_a_high_one() -> None:
    for seed in range(20):
        road, random = Road(LinkMeter(), 0.03, 10e6, 10e6), Random(seed)
        for _ in range(16):
            road.rtt_s = 0.03 + 0.04 * random.random()
            road.exchange()
        road.rtt_s = 0.02  # quicker than any so far: the way there takes no time beyond
        road.exchange(up=12_000)
        assert road.meter.state().up is None


def test_only_large_messages_that_agree_are_a_rate() -> None:
    """Jitter of some milliseconds hides 12 kB at 172 Mbit/s, and not 12 kB at 4 Mbit/s."""
    for up_bps, known in ((172e6, False), (4e6, True)):
        for seed in range(10):
            road, random = Road(LinkMeter(), 0.02, up_bps, 10e6), Random(seed)
            road.exchange()
            for count in range(1, 20):
                road.rtt_s = 0.02 + 0.005 * random.random()
                road.exchange(up=12_000)
                reading = road.meter.state().up
                assert reading is None or (known and count >= ENOUGH)
                if reading is not None:
                    assert reading.value == pytest.approx(up_bps, rel=0.15)
            assert (reading is not None) == known


@pytest.mark.parametrize(
    ("paced", "rtt_s", "known"), [(True, 0.04, False), (True, 0.01, True), (False, 0.04, True)]
)
def test_a_rate_that_may_be_the_pace_of_tcp_is_unknown(
    paced: bool, rtt_s: float, known: bool
) -> None:
    """BBR begins with some 40 kB in an RTT: at 40 ms that is 8 Mbit/s, whatever the link takes."""
    meter = LinkMeter()
    meter.paced = paced, False
    meter.record_rates(7e6, 7e6)
    state = meter.state(Segments(10, 0, rtt_s))
    assert (state.up is not None) == known
    assert state.down is not None


def test_large_messages_show_that_a_link_has_become_slower() -> None:
    """The rate that trains measured counts until then, and no stalled message outvotes it."""
    road = Road(LinkMeter(lambda: road.now_ns), 0.02, 10e6, 10e6)
    road.exchange()
    road.meter.record_rates(10e6, 10e6)
    road.up_bps = 2e6
    road.exchange(up=12_000)
    state = road.meter.state()
    assert state.up is not None
    assert state.up.value == 10e6
    for _ in range(4):
        road.exchange(up=12_000)
    state = road.meter.state()
    assert state.up is not None
    assert state.up.value == pytest.approx(2e6, rel=0.05)


def test_what_was_sent_ahead_is_no_rate() -> None:
    road = Road(LinkMeter(), 0.02, 10e6, 10e6)
    road.exchange()
    before = road.meter.state()
    road.exchange(ahead=12_000)
    after = road.meter.state()
    assert before.rtt is not None
    assert after.rtt is not None
    assert after.up is None
    assert after.rtt.samples == before.rtt.samples


def test_after_a_pause_old_samples_do_not_count() -> None:
    road = Road(LinkMeter(), 0.005, 1e9, 1e9)
    for _ in range(10):
        road.exchange()
    road.now_ns += int((FRESH_S + 0.1) * 1e9)
    road.rtt_s = 0.08
    road.exchange()
    state = road.meter.state()
    assert state.rtt is not None
    assert state.rtt.value == pytest.approx(0.08, rel=0.01)
    assert state.rtt.samples == 1


def test_readings_know_their_age() -> None:
    road = Road(LinkMeter(), 0.01, 1e9, 1e9)
    road.now_ns = time.monotonic_ns() - int(7e9)
    road.exchange()
    rtt = road.meter.state().rtt
    assert rtt is not None
    assert rtt.age_s == pytest.approx(7.0, abs=0.2)


def test_jitter_is_the_mean_step_between_samples() -> None:
    road = Road(LinkMeter(), 0.01, 1e12, 1e12)
    for rtt_s in (0.010, 0.014, 0.010, 0.014, 0.010):
        road.rtt_s = rtt_s
        road.exchange()
    jitter = road.meter.state().jitter
    assert jitter is not None
    assert jitter.value == pytest.approx(0.004, rel=0.01)


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
            assert 0 < segments.least_rtt_s < 1
            near.sendall(b"the borrowed descriptor is still open")
            assert read_segments(near.fileno(), port + 1) is None  # another peer: not ours any more
            assert read_segments(server.fileno(), port) is None
    assert read_segments(10_000, port) is None


@pytest.mark.parametrize(("name", "paced"), [("bbr", True), ("bbr2", True), ("cubic", False)])
def test_bbr_sends_at_a_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, paced: bool
) -> None:
    (tmp_path / "control").write_text(f"{name}\n")
    monkeypatch.setattr(tcp, "_CONTROL", tmp_path / "control")
    assert is_paced() == paced
    monkeypatch.setattr(tcp, "_CONTROL", tmp_path / "missing")
    assert not is_paced()


WIRELESS = """\
Inter-| sta-|   Quality        |   Discarded packets               | Missed | WE
 face | tus | link level noise |  nwid  crypt   frag  retry   misc | beacon | 22
"""


@pytest.mark.parametrize(
    ("lines", "level"),
    [
        ("wlan0: 0000   54.  -56.  -256        0      0      0      0      0        0\n", -56.0),
        (" wlp2s0: 0000   70.  -40.  -256\n wlan1: 0000   54.  -56.  -256\n", -40.0),
        ("wlan0: 0000    0     0     0         0\nwlan1: 0000   54.  -61.  -256\n", -61.0),
        ("wlan0: 0000   54.  200.  -256\n", None),  # a driver that does not report dBm
        ("wlan0: nonsense\n\x00\xff", None),
        ("", None),
    ],
)
def test_signal_strength(tmp_path, lines: str, level: float | None) -> None:
    source = tmp_path / "wireless"
    source.write_text(WIRELESS + lines, encoding="latin-1")
    assert signal_dbm(source) == level


def test_no_radio(tmp_path) -> None:
    assert signal_dbm(tmp_path / "absent") is None


@pytest.mark.parametrize("stall_s", [0.6, 1.0, 5.0])
@pytest.mark.parametrize("at", [0, 1, 2, 7])
def test_a_stall_during_one_exchange_stays_in_no_reading(at: int, stall_s: float) -> None:
    """An end that stood still meanwhile, in a ping of its answer or the only one of it."""
    for alone in (False, True):
        road = Road(LinkMeter(), 0.02, 20e6, 50e6)
        for number in range(8):
            road.rtt_s = 0.02 + (stall_s if number == at else 0.0)
            road.exchange()
            if alone:
                road.meter.begin_answer()
        road.rtt_s = 0.02
        road.exchanges(ENOUGH, up=12_000, down=12_000)
        state = road.meter.state()
        assert state.rtt is not None
        assert state.jitter is not None
        assert state.up is not None
        assert state.down is not None
        assert state.rtt.value == pytest.approx(0.02, rel=0.01)
        assert state.jitter.value < 0.001
        assert state.up.value == pytest.approx(20e6, rel=0.15)
        assert state.down.value == pytest.approx(50e6, rel=0.15)


def test_a_stall_asks_for_another_ping_and_a_slower_link_is_believed_at_the_second() -> None:
    road = Road(LinkMeter(), 0.02, 20e6, 50e6)
    road.exchange()
    road.meter.begin_answer()
    road.rtt_s = 1.0
    road.exchange()
    assert not road.meter.rtt_is_new
    road.exchange()
    assert road.meter.rtt_is_new
    rtt = road.meter.state().rtt
    assert rtt is not None
    assert rtt.value == pytest.approx(1.0, rel=0.01)


def test_the_first_reading_may_be_a_stall_and_then_tells_no_rate() -> None:
    road = Road(LinkMeter(), 1.0, 20e6, 50e6)
    road.exchange()
    road.rtt_s = 0.02
    road.exchanges(ENOUGH, up=12_000, down=12_000)
    assert road.meter.state().up is None


@pytest.mark.parametrize("stall_s", [1.0, 5.0])
def test_a_stall_during_one_transfer_is_no_rate(stall_s: float) -> None:
    road = Road(LinkMeter(), 0.02, 20e6, 50e6)
    for _ in range(ENOUGH):
        road.exchange()
        road.exchange(up=12_000, down=12_000)
    road.meter.begin_answer()
    road.rtt_s = 0.02 + stall_s
    road.exchange(up=12_000, down=12_000)
    state = road.meter.state()
    assert state.up is not None
    assert state.up.value == pytest.approx(20e6, rel=0.15)
    road.rtt_s = 0.02
    road.up_bps = 1e6  # and what lasts is followed
    road.exchanges(2 * ENOUGH, up=12_000, down=12_000)
    state = road.meter.state()
    assert state.up is not None
    assert state.up.value == pytest.approx(1e6, rel=0.15)
