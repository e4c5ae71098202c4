"""The goodput of a long transfer in one direction, from the arrivals of its messages.

In:  when how many bytes had arrived, on the receiver's clock. Out: a rate, and whether it is only a
     lower bound.

TCP begins slowly and doubles its rate with each round trip, so a short transfer is slower than the
link. The rate counts if the last half of the transfer was steady: its two quarters, each of at
least one RTT, differ by at most a tenth. A rate can be steady because TCP's window limits it, as
after a loss. Then the messages come in bursts at the link's pace, or segments are repeated. In all
these cases the link may carry more, and the rate is a lower bound.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_STEADY: Final = 0.1  # largest difference of the two quarters' rates, as a share of the higher
_LEAST_QUARTER_S: Final = 0.025
_LEAST_MESSAGES: Final = 20  # number in the last half
_BURST_S: Final = 0.02  # shortest time over which the pace of a burst is measured
_BURST_MESSAGES: Final = 10
_BURST_SHARE: Final = 0.85  # a steady rate that is a smaller share of the bursts' pace is a bound

_MOST_BPS: Final = 1e12  # no link is faster; the edge tells the times of an upload, and may lie


class Arrival(NamedTuple):
    """A message's arrival: the time, and the bytes that had arrived by then.

    repeated: segments that the sender had repeated by then; None: unknown.
    """

    at_s: float
    received_bytes: int
    repeated: int | None = None


class Goodput(NamedTuple):
    """A goodput in bit/s. is_bound: whether the link's goodput may be higher."""

    bps: float
    is_bound: bool


def estimate_goodput(arrivals: Sequence[Arrival], rtt_s: float) -> Goodput | None:
    """Return the goodput of a transfer; None if its arrivals take no or an impossibly short time.

    rtt_s: the RTT without queues.
    """
    # the kernel's time of an arrival may be a little before the process's time of the one before it
    at_s = np.maximum.accumulate([arrival.at_s for arrival in arrivals] or [0.0])
    received = np.array([arrival.received_bytes for arrival in arrivals], np.float64)
    if at_s[-1] <= at_s[0]:
        return None
    took_s = float(at_s[-1] - at_s[0])
    half_s, quarter_s = at_s[-1] - took_s / 2, at_s[-1] - took_s / 4
    at_half, at_quarter = np.interp([half_s, quarter_s], at_s, received)
    third, fourth = at_quarter - at_half, received[-1] - at_quarter
    is_steady = (
        took_s / 4 >= max(rtt_s, _LEAST_QUARTER_S)
        and np.count_nonzero(at_s >= half_s) >= _LEAST_MESSAGES
        and abs(third - fourth) <= _STEADY * max(third, fourth)
    )
    bps = 16 * float(received[-1] - at_half) / took_s
    if _repeats(arrivals, half_s):
        # data behind a lost segment arrives late and at once, so only the whole transfer counts
        return _possible(Goodput(8 * float(received[-1] - received[0]) / took_s, True))
    pace_bps = 8 * _fastest(at_s, received, max(_BURST_S, rtt_s / 2))
    return _possible(Goodput(bps, not is_steady or bps < _BURST_SHARE * pace_bps))


def _possible(goodput: Goodput) -> Goodput | None:
    return goodput if goodput.bps <= _MOST_BPS else None


def _repeats(arrivals: Sequence[Arrival], since_s: float) -> bool:
    """Return whether the sender repeated segments since a time."""
    known = [(each.at_s, each.repeated) for each in arrivals if each.repeated is not None]
    before = [repeated for at_s, repeated in known if at_s <= since_s]
    return bool(before) and known[-1][1] > before[-1]


def _fastest(at_s: NDArray[np.float64], received: NDArray[np.float64], least_s: float) -> float:
    """Return the highest rate (bytes/s) over a time of about ``least_s``.

    The time has several messages, since a process reads messages a little late, or many at once.
    """
    window_s = max(least_s, _BURST_MESSAGES * float(np.median(np.diff(at_s))))
    starts = np.flatnonzero(at_s + window_s <= at_s[-1])
    if len(starts) == 0:
        return 0.0
    ends = np.searchsorted(at_s, at_s[starts] + window_s, side="right") - 1
    return float(np.max(received[ends] - received[starts])) / window_s
