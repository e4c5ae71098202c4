"""How much of a large message is under way: enough for the link, and not more."""

from __future__ import annotations

from collections import deque

import pytest

from pilotfish.device_runtime.link.flow import LEAST_BYTES, ChunkFlow


class Path:
    """A path with a rate and an RTT, by a clock of its own, over which a message of bytes goes.

    mtu: chunks above it vanish, and stop the connection, which is made anew after a second.
    """

    def __init__(self, rate_bps: float, rtt_s: float, mtu: int = 1 << 30) -> None:
        self.now_s = 0.0
        self.rate, self.rtt_s, self.mtu = rate_bps / 8, rtt_s, mtu
        self.flow = ChunkFlow(lambda: self.now_s)
        self.most_s = 0.0  # the longest that a byte has waited for the link
        self.lost: list[int] = []
        self.largest = 0

    def carry(self, total: int) -> float:
        """Send so many bytes; returns the seconds."""
        begun_s, sent, free_s, connection = self.now_s, 0, self.now_s, 1
        acks: deque[tuple[float, int]] = deque()
        self.flow.follow(connection)
        while sent < total or acks:
            while size := self.flow.next_size(total - sent):
                if size > self.mtu:
                    self.lost.append(size)
                    self.flow.on_sent(sent + size, size)
                    self.flow.on_stall()
                    self.now_s += 1.0
                    connection += 1
                    self.flow.follow(connection)
                    acks.clear()
                    continue
                sent += size
                self.largest = max(self.largest, size)
                self.flow.on_sent(sent, size)
                free_s = max(free_s, self.now_s) + size / self.rate
                self.most_s = max(self.most_s, free_s - self.now_s)
                acks.append((free_s + self.rtt_s, sent))
            if acks:
                self.now_s, offset = acks.popleft()
                self.flow.on_acknowledged(offset)
        return self.now_s - begun_s


@pytest.mark.parametrize("rtt_s", [0.02, 0.1, 0.7])
@pytest.mark.parametrize("rate_bps", [20e3, 64e3, 1e6, 20e6, 200e6])
def test_the_link_is_filled_and_nothing_waits_for_long(rate_bps: float, rtt_s: float) -> None:
    path = Path(rate_bps, rtt_s)
    total = int(5 * rate_bps / 8)
    path.carry(total)  # to learn
    assert path.most_s < max(1.5, 4 * 4096 * 8 / rate_bps)  # until the link shows its rate
    path.most_s = 0.0
    took_s = path.carry(total)
    assert took_s < 1.3 * 5 + 2 * rtt_s
    # a window that leaves at once after a pause waits for an RTT; and no link is slower than chunks
    assert path.most_s < max(0.6 + rtt_s, 8 * 8192 / rate_bps)


def test_the_rate_is_learnt() -> None:
    path = Path(1e6, 0.05)
    path.carry(1_000_000)
    assert path.flow.full_bps == pytest.approx(1e6, rel=0.1)
    assert path.flow.whole_bytes(None) == pytest.approx(1e6 / 8 * 0.25, rel=0.1)


def test_a_link_that_is_not_filled_tells_no_rate_of_its_own() -> None:
    path = Path(1e9, 0.05)
    path.carry(30_000)
    assert path.flow.full_bps is None


def test_large_messages_go_whole_where_the_link_is_known_to_be_fast() -> None:
    flow = ChunkFlow()
    assert flow.whole_bytes(None) == 16 << 10
    assert flow.whole_bytes(100e6) == 3_125_000
    assert flow.whole_bytes(64e3) == 2000
    assert flow.whole_bytes(1e3) == 1024


@pytest.mark.parametrize("mtu", [400, 600, 1000, 1400])
def test_a_path_that_loses_large_segments_is_crossed_with_small_ones(mtu: int) -> None:
    path = Path(1e7, 0.05, mtu)
    path.carry(20_000)
    assert len(path.lost) <= 3
    assert path.largest > mtu // 4
    before = len(path.lost)
    path.carry(40_000)  # and remembered
    assert len(path.lost) <= before + 1


def test_a_path_that_was_suspected_wrongly_is_as_fast_as_ever_in_the_end() -> None:
    path = Path(1e7, 0.05)
    path.carry(100_000)
    path.flow.next_size(1 << 20)
    path.flow.on_sent(4096, 4096)
    path.flow.on_stall()
    assert path.flow.next_size(1 << 20) == 0  # until what was under way is over
    path.flow.follow(2)
    assert path.flow.next_size(1 << 20) == LEAST_BYTES
    path.carry(200_000)
    path.carry(2_000_000)
    assert path.carry(1_000_000) < 1.3
    assert path.largest > 4096


def test_a_connection_is_risked_only_by_a_size_that_has_not_passed() -> None:
    """One that stands still with it will not move again, and is given up at once."""
    flow = ChunkFlow()
    flow.follow(1)
    flow.on_sent(2048, 2048)
    assert not flow.tries_larger
    flow.on_stall()
    flow.follow(2)
    end = 0
    for risked in (False, False, False, False, True, False):
        end += (size := flow.next_size(1 << 20))
        flow.on_sent(end, size)
        assert flow.tries_larger == risked
        flow.on_acknowledged(end)
    assert size == 2 * LEAST_BYTES
