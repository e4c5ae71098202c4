"""The measured state of a link, and its age: the papers' CSI (wisv §III-A)."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A measured value, the age of its newest sample in seconds, and the number of samples."""

    value: float
    age_s: float
    samples: int


@dataclass(frozen=True, kw_only=True)
class LinkState:
    """A device's link to its edge; None for what was never measured.

    rtt and jitter: seconds. up and down: goodput in bit/s. retransmitted: the share of TCP segments
    that were sent again since the connection was made. signal: dBm, where there is a radio.
    """

    rtt: Reading | None = None
    jitter: Reading | None = None
    up: Reading | None = None
    down: Reading | None = None
    retransmitted: Reading | None = None
    signal: Reading | None = None
