"""Measure a link by the messages that cross it, without extra traffic.

In: for each exchange (request and reply) its sizes, its departure and return on the device's clock,
and its arrival and stay on the edge's clock. Out: `LinkState`, and each exchange's uplink and
downlink time.

The sum of both times needs no common clock. To split it, the meter estimates the clocks' offset
from the quickest small exchange, assuming that its uplink and downlink times were equal. Small
messages measure the RTT. Trains of messages measure rates (`wire.link.train`). Large messages
(≥ 10 kB) measure a rate, too: their bits, divided by their time beyond half an RTT. Jitter and loss
falsify this time, so several large messages must agree (`_LargeMessages`).

A value is the median of an answer's last few samples, so a single stall changes nothing, and a
changed link shows soon. A sample far from both neighbours does not count, since device or edge may
have been suspended; if the next sample confirms it, both count.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from statistics import fmean, median
from typing import NamedTuple

from pilotfish.wire.link.state import LinkState, Reading
from pilotfish.wire.link.tcp import Segments

SMALL_BYTES = 1_500  # largest small message (bytes): one TCP segment
LARGE_BYTES = 10_000
FRESH_S = 2.0  # age (s) up to which a reading needs no ping
_MEDIAN_OF = 5
_MAX_SAMPLES = 16
_LARGE_OF, _LEAST_LARGE = 8, 4  # largest and smallest number of last large messages that agree
_AGREED = 0.15  # largest spread of their transfer times, as a share of the median
# losses are those of this time (ns), or of a longer one with enough segments
_LOSS_NS, _LOSS_SEGMENTS = 5_000_000_000, 50
_LOSS_STEP_NS = 500_000_000  # least time between two kept counts
# Bytes in one RTT that TCP with BBR lets through at the beginning: 2.89 times a window of 10
# segments, less a share for the RTT's variation. A higher rate than that is the pace of TCP.
_PACED_BYTES = 25_000
_DRIFT = 200e-6  # largest drift between two clocks (s/s)
_STALLED, _STALL_S = 8.0, 0.25  # a stall exceeds its neighbours by this factor and by this time (s)


class Transit(NamedTuple):
    """Seconds that an exchange spent on the uplink and on the downlink."""

    up_s: float
    down_s: float


def _is_slower(rtt_s: float, other_s: float) -> bool:
    return rtt_s > max(_STALLED * other_s, other_s + _STALL_S)


def _is_lower_rate(rate_bps: float, other_bps: float) -> bool:
    return _STALLED * rate_bps < other_bps


class _Samples:
    """The last few values of one quantity, each with its time (ns) and its answer's number.

    stalled: compares two values; True if the first looks like a stall compared with the second.
    """

    def __init__(self, stalled: Callable[[float, float], bool]) -> None:
        self._all: deque[tuple[int, float, int]] = deque(maxlen=_MAX_SAMPLES)
        self._stalled = stalled
        self.answer = 0

    def add(self, now_ns: int, value: float) -> None:
        self._all.append((now_ns, value, self.answer))

    @property
    def _valid(self) -> list[tuple[int, float, int]]:
        """The samples, except samples that look like a stall compared with both neighbours."""
        samples = list(self._all)
        return [
            sample
            for at, sample in enumerate(samples)
            if len(samples) == 1
            or not all(
                self._stalled(sample[1], other[1])
                for other in (*samples[max(0, at - 1) : at], *samples[at + 1 : at + 2])
            )
        ]

    @property
    def values(self) -> list[float]:
        return [value for _, value, _ in self._valid]

    @property
    def new(self) -> bool:
        """Whether the last sample belongs to the present answer."""
        taken = self._valid
        return bool(taken) and taken[-1][2] == self.answer

    @property
    def recent(self) -> list[float]:
        """The last values that are close in time and belong to one answer.

        An answer under `stream` has a single sample, which older samples must not outvote.
        """
        return self._recent(self._valid)

    @property
    def best(self) -> float | None:
        """The largest of the last few values."""
        return max((value for _, value, _ in islice(reversed(self._all), _MEDIAN_OF)), default=None)

    def _recent(self, taken: list[tuple[int, float, int]]) -> list[float]:
        if not taken:
            return []
        newest_ns, _, newest = taken[-1]
        since_ns = newest_ns - int(FRESH_S * 1e9)
        close = [v for at, v, answer in taken if at >= since_ns and answer == newest]
        return close[-_MEDIAN_OF:]

    def reading(self, now_ns: int) -> Reading | None:
        """Return the median of the recent values; None without any."""
        taken = self._valid
        recent = self._recent(taken)
        if not recent:
            return None
        age_s = (now_ns - taken[-1][0]) * 1e-9
        return Reading(value=median(recent), age_s=age_s, samples=len(recent))


class _LargeMessages:
    """The transfer times of one direction's last large messages, and the rate that they agree on.

    Jitter delays each message by another time. If the times of most messages are nearly equal, the
    transfer took long compared with the jitter, so their median is not falsified much by it. Lost
    segments delay a few messages more: the slowest quarter does not count.
    """

    def __init__(self) -> None:
        # the time of arrival (ns), and seconds for each bit
        self._all: deque[tuple[int, float]] = deque(maxlen=_LARGE_OF)

    def add(self, now_ns: int, size: int, transfer_s: float) -> None:
        self._all.append((now_ns, transfer_s / (8 * size)))

    def reading(self, now_ns: int) -> Reading | None:
        """Return the rate with its age; None if the messages are few or do not agree."""
        bps = self.bps
        if bps is None:
            return None
        age_s = (now_ns - self._all[-1][0]) * 1e-9
        return Reading(value=bps, age_s=age_s, samples=len(self._all))

    @property
    def bps(self) -> float | None:
        """The rate in bit/s; None: unknown."""
        if len(self._all) < _LEAST_LARGE:
            return None
        per_bit_s = sorted(pace_s for _, pace_s in self._all)
        middle_s, slow_s = median(per_bit_s), per_bit_s[len(per_bit_s) * 3 // 4]
        agree = per_bit_s[0] > 0.0 and slow_s - per_bit_s[0] <= _AGREED * middle_s
        return 1 / middle_s if agree else None


def _newer(reading: Reading | None, other: Reading | None) -> Reading | None:
    """Return the younger reading; None if both are None."""
    known = [each for each in (other, reading) if each is not None]
    return min(known, key=lambda each: each.age_s, default=None)


class _RecentLoss:
    """The share of a connection's segments that were sent again in the last seconds.

    The kernel only counts from the connection's beginning, so older counts are kept to subtract.
    """

    def __init__(self) -> None:
        self._counts: deque[tuple[int, Segments]] = deque([(0, Segments(0, 0))])

    def reading(self, segments: Segments, now_ns: int) -> Reading | None:
        """Return the share since the latest count that is old enough; None: nothing was sent."""
        counts = self._counts
        if segments.sent < counts[-1][1].sent:  # another connection, or a counter that overflowed
            overflowed = segments.retransmitted > segments.sent
            counts.clear()
            counts.append((0, segments if overflowed else Segments(0, 0)))
        while len(counts) > 1 and self._is_base(counts[1], segments, now_ns):
            counts.popleft()
        base = counts[0][1]
        if segments.sent > counts[-1][1].sent and now_ns - counts[-1][0] >= _LOSS_STEP_NS:
            counts.append((now_ns, segments))
        sent = segments.sent - base.sent
        if sent <= 0:
            return None
        again = max(0, segments.retransmitted - base.retransmitted)
        return Reading(value=min(1.0, again / sent), age_s=0.0, samples=sent)

    @staticmethod
    def _is_base(count: tuple[int, Segments], segments: Segments, now_ns: int) -> bool:
        """Whether enough time has passed and enough segments were sent since this count."""
        at_ns, then = count
        return now_ns - at_ns >= _LOSS_NS and segments.sent - then.sent >= _LOSS_SEGMENTS


class LinkMeter:
    """A device's measurements of its link. Times are monotonic; ``edge_…``: on the edge's clock.

    clock: returns the present time (ns); by default the device's monotonic clock. on_rtt: called
    with the time (ns) and the value (s) of each sample of the RTT.
    """

    def __init__(
        self,
        clock: Callable[[], int] | None = None,
        on_rtt: Callable[[int, float], None] = lambda at_ns, rtt_s: None,
    ) -> None:
        self._clock = clock or time.monotonic_ns
        self._on_rtt = on_rtt
        self._offset_ns = 0  # the edge's clock minus the device's clock
        self._quickest_ns, self._compared_ns = 2**62, 0
        self._rtt = _Samples(_is_slower)
        self._up, self._down = _Samples(_is_lower_rate), _Samples(_is_lower_rate)
        self._large = _LargeMessages(), _LargeMessages()  # up and down
        self.paced = False, False  # whether TCP paces what is sent up and down
        self._loss, self._loss_down = _RecentLoss(), _RecentLoss()
        self._told_down: tuple[int, Reading | None] = 0, None  # time and value of the loss down

    def record_exchange(
        self,
        *,
        up_bytes: int,
        down_bytes: int,
        ahead_bytes: int = 0,
        behind_bytes: int = 0,
        sent_ns: int,
        received_ns: int,
        edge_received_ns: int,
        held_ns: int,
        learn: bool = True,
    ) -> Transit:
        """Return an exchange's time on the link, and sample it if it is suitable.

        ahead_bytes: bytes sent shortly before the request, which may have delayed the request.
        behind_bytes: bytes of older replies, which may have delayed this reply. held_ns: stay at
        the edge. learn: whether the exchange may be a sample.
        """
        on_link_ns = max(0, received_ns - sent_ns - held_ns)
        small = learn and max(up_bytes + ahead_bytes, down_bytes + behind_bytes) <= SMALL_BYTES
        if small:
            self._compare_clocks(received_ns, on_link_ns, edge_received_ns - sent_ns)
        up_ns = min(on_link_ns, max(0, edge_received_ns - self._offset_ns - sent_ns))
        transit = Transit(up_ns * 1e-9, (on_link_ns - up_ns) * 1e-9)
        if small:
            self._rtt.add(received_ns, on_link_ns * 1e-9)
            self._on_rtt(received_ns, on_link_ns * 1e-9)
        elif learn:
            self._learn_rates(received_ns, (up_bytes, down_bytes), transit)
        return transit

    def record_rates(self, up_bps: float | None, down_bps: float | None) -> None:
        """Add the rates that trains or a chunked message's acknowledgements told; None: unknown."""
        now_ns = self._clock()
        for bps, samples in ((up_bps, self._up), (down_bps, self._down)):
            if bps is not None:
                samples.add(now_ns, bps)

    def record_segments_down(self, segments: Segments) -> None:
        """Add the edge's counters of the segments that it sent."""
        now_ns = self._clock()
        self._told_down = now_ns, self._loss_down.reading(segments, now_ns)

    @property
    def rates_bps(self) -> tuple[float | None, float | None]:
        """The best recent rates up and down; None: unknown. Computing them takes microseconds."""
        up, down = (
            max((bps for bps in (samples.best, large.bps) if bps is not None), default=None)
            for samples, large in zip((self._up, self._down), self._large, strict=True)
        )
        return up, down

    def _learn_rates(self, now_ns: int, sizes: tuple[int, int], transit: Transit) -> None:
        rtts = self._rtt.recent
        if not rtts or _is_slower(
            min(rtts), sum(transit)
        ):  # the RTT is unknown, or this exchange stalled
            return
        # half the smallest RTT, since larger RTTs contain waiting times
        way_s = min(rtts) / 2
        for size, took_s, large in zip(sizes, transit, self._large, strict=True):
            if size >= LARGE_BYTES:
                large.add(now_ns, size, took_s - way_s)

    def _jitter_s(self) -> float:
        steps = [abs(after - before) for before, after in pairwise(self._rtt.values)]
        return fmean(steps) if steps else 0.0

    def _compare_clocks(self, now_ns: int, on_link_ns: int, apart_ns: int) -> None:
        """Estimate the clocks' offset from the quickest exchange.

        ``apart_ns``: arrival on the edge's clock minus departure on the device's. Since clocks
        drift, an old minimum expires. If a clock jumped (the edge rebooted, the device slept),
        an exchange seems to have arrived before it left.
        """
        self._quickest_ns += int((now_ns - self._compared_ns) * _DRIFT) + 1
        self._compared_ns = now_ns
        impossible = not 0 <= apart_ns - self._offset_ns <= on_link_ns
        if impossible or on_link_ns <= self._quickest_ns:
            self._quickest_ns = on_link_ns
            self._offset_ns = apart_ns - on_link_ns // 2

    def _rate(self, way: int, now_ns: int, segments: Segments | None) -> Reading | None:
        """Return the rate up (0) or down (1); None if it may be the pace of TCP."""
        samples = self._up, self._down
        reading = _newer(samples[way].reading(now_ns), self._large[way].reading(now_ns))
        if reading is None or segments is None or not self.paced[way]:
            return reading
        return reading if reading.value * segments.least_rtt_s / 8 <= _PACED_BYTES else None

    @property
    def rtt_is_new(self) -> bool:
        """Whether the last RTT was measured in the present answer."""
        return self._rtt.new

    def begin_answer(self) -> None:
        """Begin a new answer, to which samples belong from now on."""
        for samples in (self._rtt, self._up, self._down):
            samples.answer += 1

    def state(self, segments: Segments | None = None, signal_dbm: float | None = None) -> LinkState:
        """Return the link's present state; arguments: the kernel's and the radio's readings."""
        now_ns = self._clock()
        rtt = self._rtt.reading(now_ns)
        taken = len(self._rtt.values)
        told_ns, loss_down = self._told_down
        return LinkState(
            rtt=rtt,
            jitter=Reading(value=self._jitter_s(), age_s=rtt.age_s, samples=taken)
            if rtt is not None and taken > 1
            else None,
            up=self._rate(0, now_ns, segments),
            down=self._rate(1, now_ns, segments),
            retransmitted=self._loss.reading(segments, now_ns) if segments is not None else None,
            retransmitted_down=replace(loss_down, age_s=(now_ns - told_ns) * 1e-9)
            if loss_down is not None
            else None,
            signal=Reading(value=signal_dbm, age_s=0.0, samples=1)
            if signal_dbm is not None
            else None,
        )
