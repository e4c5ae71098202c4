"""The columns of the exported tables: name, type and unit; `docs/field.md` says what they mean.

A column's unit is in its name (``_s``, ``_bps``, ``_dbm``, …). A missing value is None; an empty
text is missing, too, since CSV has no other way to write it. Times are in UTC with milliseconds.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from pilotfish.device_runtime.record import STAGES
from pilotfish.wire.link.state import READINGS

Kind: TypeAlias = Literal["text", "integer", "number", "boolean", "time"]

POSITION = {"lat": "deg", "lon": "deg", "alt_m": "", "error_m": "", "speed_m_s": ""}
"""Values of a probe's position, and the units that their names lack."""


class Column(NamedTuple):
    """A column of a table."""

    name: str
    kind: Kind


def columns(kind: Kind, names: str) -> list[Column]:
    """Return columns of one kind; names: separated by spaces."""
    return [Column(name, kind) for name in names.split()]


def with_unit(name: str, unit: str) -> str:
    """Return a column's name: the value's name and its unit."""
    return f"{name}_{unit}" if unit else name


def _moment(prefix: str = "") -> Iterator[Column]:
    """Yield the columns of a moment: corrected, by the wall clock then, and by the run's clock."""
    yield Column(f"{prefix}time_utc", "time")
    yield from columns("number", f"{prefix}unix_s {prefix}wall_unix_s {prefix}clock_s")


def _link() -> Iterator[Column]:
    for name, kind in READINGS.items():
        yield Column(f"link_{with_unit(name, kind.unit)}", "number")
        yield Column(f"link_{name}_age_s", "number")
        yield Column(f"link_{name}_samples", "integer")


def _identity(key: str) -> list[Column]:
    return [*columns("text", "run device"), Column(key, "integer")]


ANSWERS = [
    *_identity("answer"),
    *_moment(),
    *columns("text", "configuration protocol"),
    *columns("integer", "window"),
    *columns("boolean", "window_auto"),
    *columns("integer", "prompt repeat"),
    *columns("boolean", "warm_up finished"),
    *columns("text", "error"),
    *columns("number", "temperature"),
    *columns("integer", "seed"),
    *columns("text", "protocol_used"),
    *columns("integer", "window_used prompt_tokens tokens"),
    *columns("text", "finish_reason"),
    *columns("number", "first_token_s total_s recording_s token_s tokens_per_s acceptance"),
    *columns("integer", "rounds uplink_bytes downlink_bytes"),
    *columns("integer", "pings probe_uplink_bytes probe_downlink_bytes"),
    *columns("number", "energy_j"),
    *columns("text", "options choice_policy choice_protocol"),
    *columns("integer", "choice_window"),
    *columns("number", "choice_token_s"),
    *columns("text", "choice_hints"),
    *columns("integer", "choice_top_k"),
    *columns("text", "choice_expansion choice_reason choice_forecasts"),
    *_link(),
]
ROUNDS = [
    *_identity("answer"),
    *columns("integer", "round"),
    *columns("time", "time_utc"),
    *columns("number", "unix_s at_s"),
    *columns("text", "protocol"),
    *columns("integer", "start window nodes accepted tokens"),
    *columns("text", "token_ids"),
    *columns("integer", "uplink_bytes downlink_bytes"),
    *(Column(f"{stage}_s", "number") for stage in STAGES),
    *columns("number", "total_s"),
    *columns("integer", "inquired"),
    *columns("text", "notes"),
]
RTTS = [
    *_identity("answer"),
    *columns("integer", "probe number"),
    *columns("time", "time_utc"),
    *columns("number", "unix_s at_s rtt_s"),
]
PROBES = [
    *_identity("probe"),
    *_moment(),
    *columns("number", "took_s"),
    *columns("integer", "pings lost"),
    *columns("number", "rtt_median_s up_bps"),
    *columns("boolean", "up_bound"),
    *columns("number", "down_bps"),
    *columns("boolean", "down_bound"),
    *columns("integer", "uplink_bytes downlink_bytes"),
    *columns("number", "power_w signal_dbm"),
    *columns("text", "signal"),
    *(Column(f"position_{with_unit(name, unit)}", "number") for name, unit in POSITION.items()),
    *_link(),
]
OUTAGES = [
    *_identity("outage"),
    *_moment("began_"),
    *_moment("ended_"),
    *columns("number", "took_s"),
]
OUTAGES += columns("text", "reason")

TABLES = {
    "answers": ANSWERS,
    "rounds": ROUNDS,
    "probes": PROBES,
    "outages": OUTAGES,
    "rtts": RTTS,
}
"""The columns of each table, by the table's name."""
