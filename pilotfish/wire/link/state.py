"""The measured state of a link, with its age (the papers' CSI, wisv §III-A); signal strength."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

WIRELESS = Path("/proc/net/wireless")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A measured value, the age of its newest sample (s), and the number of its samples."""

    value: float
    age_s: float
    samples: int


@dataclass(frozen=True, kw_only=True)
class LinkState:
    """The state of a device's link to its edge; None: never measured.

    rtt, jitter: seconds. up, down: goodput in bit/s. retransmitted: share of the TCP segments
    of the last seconds that were sent again by the device; retransmitted_down: by the edge, as it
    told with its last answer to a ping. signal: dBm, if there is a radio.
    """

    rtt: Reading | None = None
    jitter: Reading | None = None
    up: Reading | None = None
    down: Reading | None = None
    retransmitted: Reading | None = None
    retransmitted_down: Reading | None = None
    signal: Reading | None = None


class ReadingKind(NamedTuple):
    """What a reading is: its name for people, its unit in names (`rtt_s`), and a unit for people.

    size: the shown unit in the reading's unit, for example 1e-3 for ms.
    """

    name: str
    unit: str
    shown_unit: str
    size: float


READINGS = {
    "rtt": ReadingKind("RTT", "s", "ms", 1e-3),
    "jitter": ReadingKind("jitter", "s", "ms", 1e-3),
    "up": ReadingKind("goodput up", "bps", "Mbit/s", 1e6),
    "down": ReadingKind("goodput down", "bps", "Mbit/s", 1e6),
    "retransmitted": ReadingKind("retransmitted", "", "% of segments", 1e-2),
    "retransmitted_down": ReadingKind("retransmitted down", "", "% of segments", 1e-2),
    "signal": ReadingKind("signal", "dbm", "dBm", 1.0),
}
"""The fields of `LinkState`."""


def signal_dbm(source: Path = WIRELESS) -> float | None:
    """Return the signal level in dBm of the first radio with a link; None without one.

    ``source`` has two lines of headings, then one line for each radio: its name, a status, and
    three numbers (link quality, level, noise). A number that was just updated ends with a full
    stop.
    """
    try:
        lines = source.read_text(encoding="ascii", errors="replace").splitlines()[2:]
    except OSError:
        return None
    for line in lines:
        fields = line.partition(":")[2].split()
        try:
            quality, level = (float(field.rstrip(".")) for field in fields[1:3])
        except ValueError:
            continue
        # drivers without a measurement report quality 0, or an impossible level
        if quality > 0 and -120.0 <= level < 0.0:
            return level
    return None
