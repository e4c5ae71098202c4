"""The papers' CSI c: the features of a link for a decision head (wisv §III-A, §IV-A).

In:  an RTT, both rates and a loss, as far as they are known. Out: the features that the head reads,
     and one number, the quality for wireless relabelling (wisv §V-B).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# log10 bit/s, log10 bit/s, a share, log10 s
FEATURES = ("log10_up_bps", "log10_down_bps", "loss", "log10_rtt_s")

# quality is 0 at the poor end and below it, 1 at the good end and above it
POOR_BPS, GOOD_BPS = 5e6, 500e6
POOR_RTT_S, GOOD_RTT_S = 0.100, 0.005


@dataclass(frozen=True, kw_only=True)
class Channel:
    """A link as it was measured or sampled; None for unknown values.

    rtt_s: seconds. up_bps, down_bps: goodput in bit/s, without retransmissions. loss: share of
    packets that had to be sent again, wisv's PER. Raises ValueError if a time or a rate is not
    positive and finite, or a loss not within [0, 1].
    """

    rtt_s: float | None = None
    up_bps: float | None = None
    down_bps: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        for name in ("rtt_s", "up_bps", "down_bps"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ValueError(f"A channel's {name} must be positive and finite, not {value}.")
        if self.loss is not None and not 0.0 <= self.loss <= 1.0:
            raise ValueError(f"A channel's loss must be within 0 and 1, not {self.loss}.")

    def features(self) -> NDArray[np.float64]:
        """Return `FEATURES`, f64 [4], NaN where unknown; a head standardises and clips them."""
        return np.array(
            [_log10(self.up_bps), _log10(self.down_bps), _known(self.loss), _log10(self.rtt_s)]
        )

    def quality(self) -> float:
        """Rate the link in [0, 1]: wisv's scalar, whose formula the paper leaves open.

        Ours: the mean of two positions on logarithmic scales, that of the slower rate between 5 and
        500 Mbit/s and that of the RTT between 100 and 5 ms, times 1 − loss. Unknown values do not
        count; an entirely unknown channel has quality 1, so that labels stay.
        """
        rates = [rate for rate in (self.up_bps, self.down_bps) if rate is not None]
        positions = [_position(min(rates), POOR_BPS, GOOD_BPS)] if rates else []
        if self.rtt_s is not None:
            positions.append(_position(self.rtt_s, POOR_RTT_S, GOOD_RTT_S))
        mean = sum(positions) / len(positions) if positions else 1.0
        return mean * (1.0 - (self.loss or 0.0))


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _log10(value: float | None) -> float:
    return math.nan if value is None else math.log10(value)


def _position(value: float, poor: float, good: float) -> float:
    """Return a value's place on the logarithmic scale from poor (0) to good (1), clipped."""
    position = (math.log(value) - math.log(poor)) / (math.log(good) - math.log(poor))
    return min(max(position, 0.0), 1.0)
