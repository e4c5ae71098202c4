"""What is known about a link, and how old it is: the papers' CSI (wisv §III-A)."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A measured value, the seconds since its newest sample, and how many samples it stands on."""

    value: float
    age_s: float
    samples: int


@dataclass(frozen=True, kw_only=True)
class LinkState:
    """A device's link to its edge; None is what was never measured.

    rtt and jitter: seconds. up and down: goodput in bit/s. retransmitted: the share of TCP segments
    that were sent again since the connection was made. signal: dBm, where there is a radio.
    """

    rtt: Reading | None = None
    jitter: Reading | None = None
    up: Reading | None = None
    down: Reading | None = None
    retransmitted: Reading | None = None
    signal: Reading | None = None
