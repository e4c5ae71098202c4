"""The rows of a run file that describe the link: RTT samples of answers, probes, outages.

`field.run` reads the rows, `field.recording` writes them, and `docs/field.md` lists the columns.
"""

from dataclasses import dataclass, field, fields

from pilotfish.wire.link.state import LinkState

LARGEST = 1e15  # upper bound of a measured value and of its negative; readers refuse others


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One measurement of the link between answers.

    began_unix_s: time by the wall clock. clock_s: time by the run's clock (`field.run_clock`).
    rtts_s: the RTT of each small ping that was answered, in the order of sending. lost: number of
    pings without a reply. up_bps, down_bps: goodput in bit/s; a bound means that the true goodput
    is at least this value. uplink_bytes, downlink_bytes: bytes that the probe cost. signal,
    position: values by name, as the radio and the receiver gave them. power_w: the mean power
    during the probe. A value is None if it was not measured.
    """

    id: int = 0
    began_unix_s: float
    clock_s: float
    took_s: float
    rtts_s: list[float] = field(default_factory=list)
    lost: int = 0
    up_bps: float | None = None
    up_bound: bool = False
    down_bps: float | None = None
    down_bound: bool = False
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    link: LinkState | None = None
    signal: dict[str, float | str] | None = None
    position: dict[str, float | str] | None = None
    power_w: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outage:
    """A time in which the edge could not be used, by the wall clock and by the run's clock.

    reason: message of the first error. ended_unix_s, ended_clock_s: None if the outage had not
    ended when the file was read.
    """

    id: int = 0
    began_unix_s: float
    began_clock_s: float
    ended_unix_s: float | None = None
    ended_clock_s: float | None = None
    reason: str = ""


def is_possible(value: float) -> bool:
    """Whether readers take this measured value; False for NaN."""
    return -LARGEST <= value <= LARGEST


PROBE_COLUMNS = tuple(column.name for column in fields(Probe))
PROBE_JSON = ("rtts_s", "link", "signal", "position")  # columns that are stored as JSON
OUTAGE_COLUMNS = tuple(column.name for column in fields(Outage))
LINK_TABLES_SINCE = 6  # the format that added these tables

LINK_TABLES = {
    "rtts": """CREATE TABLE rtts (
    answer INTEGER NOT NULL REFERENCES answers, number INTEGER NOT NULL, at_s REAL NOT NULL,
    rtt_s REAL NOT NULL,
    PRIMARY KEY (answer, number)
) WITHOUT ROWID""",
    "probes": """CREATE TABLE probes (
    id INTEGER PRIMARY KEY, began_unix_s REAL NOT NULL, clock_s REAL NOT NULL,
    took_s REAL NOT NULL, rtts_s TEXT NOT NULL, lost INTEGER NOT NULL, up_bps REAL,
    up_bound INTEGER NOT NULL, down_bps REAL, down_bound INTEGER NOT NULL,
    uplink_bytes INTEGER NOT NULL, downlink_bytes INTEGER NOT NULL, link TEXT, signal TEXT,
    position TEXT, power_w REAL
)""",
    "outages": """CREATE TABLE outages (
    id INTEGER PRIMARY KEY, began_unix_s REAL NOT NULL, began_clock_s REAL NOT NULL,
    ended_unix_s REAL, ended_clock_s REAL, reason TEXT NOT NULL
)""",
}
