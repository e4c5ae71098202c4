"""Measure the rate of one direction by trains: messages sent back to back, and their arrivals.

In:  the times at which a train's messages arrived, on the receiver's clock. Out: a rate, or None if
     the train cannot tell it.

The spread of the arrivals depends on the rate, and neither on the RTT nor on the clocks' offset.
Jitter, a lost segment and TCP's first windows disturb some of the arrivals. So the rate is the
slope of the line that most arrivals follow. The first fifth of a train does not count: later, some
message has already met the longest delay, and the messages after it come at the link's pace.

A pause of about an RTT is TCP's: its window was full, or it repeated a lost segment. The messages
on the two sides of a pause are on different lines, so each side is estimated by itself.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Final, NamedTuple

# bytes of a message that, with its framing and encryption, fits one TCP segment over Ethernet: TCP
# counts its window in segments, so a message of two would fill it twice as fast
_SEGMENT_BYTES: Final = 1_340
FIRST_TRAIN: Final = (_SEGMENT_BYTES,) * 9  # they and the request fit TCP's first window
MAX_PROBE_BYTES: Final = 100_000  # maximum bytes of a probe in one direction
MAX_MESSAGES: Final = 16  # maximum messages of a train
_MAX_PROBE_S: Final = 0.22  # time for which a probe may occupy the link (s); jitter may extend it
_LEAST_MESSAGES: Final = 6
_LEAST_ON_LINE: Final = 4  # fewer arrivals may be on a line by chance
_LEAST_OF_PART: Final = 5  # nor is a shorter part between two pauses evidence enough
_SKIPPED: Final = 0.2  # share of a train's bytes that do not count
_PAUSE: Final = 0.4  # a shorter gap, as a share of the RTT, is no pause of TCP
_PAUSE_GAPS: Final = 4  # nor is one that is not longer than the median gap by this factor
_HEAP_S: Final = 1e-3  # after a pause, messages that come so soon had arrived before its end
_CLOCK_S: Final = 150e-6  # error of an arrival's time (s): a process reads messages one by one
_NEAR: Final = 0.15  # largest distance of an arrival on the line, as a share of the line's time
_PRECISE, _USABLE = 0.1, 0.355  # largest errors: to send no second train, and to give a rate
_CONTRADICTED: Final = 2.5  # factor between two trains' rates, of which then none counts


class TrainRate(NamedTuple):
    """A rate in bit/s, and a bound of its relative error that 9 of 10 rates keep."""

    bps: float
    error: float


def estimate_rate(
    arrivals_s: Sequence[float], sizes: Sequence[int], rtt_s: float = math.inf
) -> TrainRate | None:
    """Estimate the rate at which a train arrived; None if no line fits its arrivals.

    rtt_s: the RTT, by which TCP's pauses are known.
    """
    ends = list(accumulate(sizes))
    parts = _parts(list(zip(ends, arrivals_s, strict=True)), rtt_s)
    estimates = [rate for part in parts if (rate := _estimate_part(part)) is not None]
    return min(estimates, key=lambda rate: rate.error, default=None)


def _parts(points: Sequence[tuple[int, float]], rtt_s: float) -> list[Sequence[tuple[int, float]]]:
    """Return the points between TCP's pauses, without those that do not count.

    points: (bytes so far, arrival in seconds).
    """
    gaps_s = [after - before for (_, before), (_, after) in pairwise(points)]
    pause_s = max(_PAUSE * rtt_s, _PAUSE_GAPS * median(gaps_s))
    bounds = [0, *(at for at, gap_s in enumerate(gaps_s, 1) if gap_s > pause_s), len(points)]
    parts = []
    for start, end in pairwise(bounds):
        part = points[start:end]
        if start == 0:
            parts.append([point for point in part if point[0] >= part[-1][0] * _SKIPPED])
        else:
            resumed_s = part[0][1]
            parts.append([point for point in part if point[1] >= resumed_s + _HEAP_S])
    least = _LEAST_ON_LINE if len(parts) == 1 else _LEAST_OF_PART
    return [part for part in parts if len(part) >= least]


def _estimate_part(points: Sequence[tuple[int, float]]) -> TrainRate | None:
    on_line = _most_on_line(points)
    if len(on_line) < max(_LEAST_ON_LINE, len(points) / 2):
        return None
    mean_bytes = sum(size for size, _ in on_line) / len(on_line)
    mean_s = sum(at for _, at in on_line) / len(on_line)
    squares = sum((size - mean_bytes) ** 2 for size, _ in on_line)
    slope = sum((size - mean_bytes) * (at - mean_s) for size, at in on_line) / squares
    if slope <= 0.0:
        return None
    residuals = sum((at - mean_s - slope * (size - mean_bytes)) ** 2 for size, at in on_line)
    deviation_s = (residuals / max(1, len(on_line) - 2)) ** 0.5
    span_s = slope * (on_line[-1][0] - on_line[0][0])
    share = len(on_line) / len(points)
    few = 1 + 2 / len(on_line)  # few points fit a line by chance
    return TrainRate(8 / slope, (3 * deviation_s * few + _CLOCK_S) / span_s / share**2)


def _most_on_line(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points near the line through two of them that has most points near it.

    points: (bytes so far, arrival in seconds).
    """
    best: list[tuple[int, float]] = []
    best_score = (0, 0.0)
    for at, (start_bytes, start_s) in enumerate(points):
        for end_bytes, end_s in points[at + 3 :]:
            took_s = end_s - start_s
            if took_s <= 0.0:
                continue
            slope, most_s = took_s / (end_bytes - start_bytes), max(_CLOCK_S, _NEAR * took_s)
            distances = [abs(s - start_s - slope * (b - start_bytes)) for b, s in points]
            near = [
                point for point, off_s in zip(points, distances, strict=True) if off_s <= most_s
            ]
            score = len(near), -sum(off_s for off_s in distances if off_s <= most_s) / took_s
            if not best or score > best_score:
                best, best_score = near, score
    return best


class RateProbe:
    """The probe of one direction: a short train, and a longer one if the first does not suffice.

    sizes: bytes of the next train's messages; empty when the probe is complete. A probe costs at
    most `MAX_PROBE_BYTES`, and little more than 0.3 s of the link.
    """

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] = FIRST_TRAIN
        self._best: TrainRate | None = None
        self._is_first = True

    @property
    def rate_bps(self) -> float | None:
        """The rate in bit/s; None: unknown."""
        return self._best.bps if self._best and self._best.error <= _USABLE else None

    def on_train(
        self,
        arrivals_s: Sequence[float],
        took_s: float,
        *,
        may_repeat: bool,
        rtt_s: float = math.inf,
    ) -> None:
        """Evaluate a train.

        took_s: seconds from sending to the last arrival, without an RTT. may_repeat: whether the
        second train may follow. rtt_s: the RTT; inf: unknown.
        """
        sizes = self.sizes
        estimate = estimate_rate(arrivals_s, sizes, rtt_s)
        if estimate is not None:
            before, self._best = self._best, estimate
            if before is not None and before.error < estimate.error:
                contradicted = not 1 / _CONTRADICTED < before.bps / estimate.bps < _CONTRADICTED
                self._best = None if contradicted else before
        is_precise = self._best is not None and self._best.error <= _PRECISE
        self.sizes = ()
        if self._is_first and may_repeat and not is_precise:
            stalled_s = _stall_s(arrivals_s)
            spread_s = max(arrivals_s[-1] - arrivals_s[0], took_s) - stalled_s
            self.sizes = _second_train(sizes, max(spread_s, 1e-4))
        self._is_first = False


def _stall_s(arrivals_s: Sequence[float]) -> float:
    """Return the time for which a lost segment stalled a train: its longest gap, if dominant."""
    gaps = [after - before for before, after in pairwise(arrivals_s)]
    longest = max(gaps)
    others = sum(gaps) - longest
    return longest - others / (len(gaps) - 1) if longest > others else 0.0


def _second_train(sizes: Sequence[int], took_s: float) -> tuple[int, ...]:
    """Return the sizes of a second train, after a first that took about ``took_s`` seconds."""
    spent = sum(sizes)
    budget = int(min(MAX_PROBE_BYTES, _MAX_PROBE_S * spent / took_s)) - spent
    size = max(_SEGMENT_BYTES, budget // MAX_MESSAGES)
    messages = min(MAX_MESSAGES, budget // size)
    return (size,) * messages if messages >= _LEAST_MESSAGES else ()
