"""Features of a link for a decision head: the papers' channel state, CSI c (wisv §III-A, §IV-A).

In:  the RTT, both rates and the loss, as far as they are known.
Out: the features that the head reads; and the quality, a number for wireless relabelling (wisv
     §V-B).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# units: log10(bit/s), log10(bit/s), share of packets, log10(s)
FEATURES = ("log10_up_bps", "log10_down_bps", "loss", "log10_rtt_s")

# a link's quality is 0 at these poor values or worse, 1 at these good values or better
POOR_BPS, GOOD_BPS = 5e6, 500e6
POOR_RTT_S, GOOD_RTT_S = 0.100, 0.005


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Measured or sampled values of a link; None for an unknown value.

    rtt_s: RTT, seconds. up_bps, down_bps: goodput in bit/s, without retransmissions. loss: share of
    packets that had to be sent again, wisv's PER. Raises ValueError if the RTT or a rate is not
    positive and finite, or if the loss is not within [0, 1].
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
            raise ValueError(f"A channel's loss must be between 0 and 1, not {self.loss}.")

    def features(self) -> NDArray[np.float64]:
        """Return the values of `FEATURES`, f64 [4], NaN where unknown.

        A head standardises and clips them.
        """
        return np.array(
            [_log10(self.up_bps), _log10(self.down_bps), _known(self.loss), _log10(self.rtt_s)]
        )

    def quality(self) -> float:
        """Return the quality of the link in [0, 1]; the wisv paper gives no formula for it.

        The quality is the mean of two positions on logarithmic scales, times 1 − loss. The slower
        rate has a position between 5 and 500 Mbit/s; the RTT has a position between 100 and 5 ms.
        Unknown values do not count. An entirely unknown channel has quality 1, so that labels stay.
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
