"""The rows that hold the rounds of answers: what a round becomes in a run file, and back.

The columns of format 1 come first, then those that later formats added, in the formats' order.
"""

import sqlite3
from collections.abc import Iterator
from typing import Any

import msgspec

from pilotfish.device_runtime.record import STAGES, Round
from pilotfish.lab.field.run_schema import FORMAT, INQUIRED, NOTES, json_text, later_columns
from pilotfish.wire.protocols import counters, counters_of

ROUND_COLUMNS = (
    "at_s, protocol, start, window, nodes, accepted, tokens, uplink_bytes, downlink_bytes, "
    + ", ".join(f"{stage}_s" for stage in STAGES)
)


def round_values(at_s: float, round_: Round) -> tuple[Any, ...]:
    """Return a round's values in the order of the current format's columns.

    at_s: see `Answer`.
    """
    return (
        at_s,
        round_.protocol,
        round_.start,
        round_.window,
        round_.nodes,
        round_.accepted,
        msgspec.json.encode(round_.tokens).decode(),
        round_.uplink_bytes,
        round_.downlink_bytes,
        *(getattr(round_.timings, stage) for stage in STAGES),
        *_later_values(round_),
    )


def _later_values(round_: Round) -> Iterator[Any]:
    """Yield a round's values of the columns that formats 2 and later added, in column order."""
    known_counters = counters()
    other_notes = {
        name: value
        for name, value in round_.notes.items()
        if name not in known_counters or known_counters[name].column_since is None
    }
    later_values = {INQUIRED: round_.inquired, NOTES: json_text(other_notes)}
    for since in range(2, FORMAT + 1):
        for column in later_columns(since):
            yield later_values[column] if column in later_values else round_.notes.get(column, 0)


def round_of(columns: sqlite3.Row, later: list[str]) -> tuple[float, Round]:
    """Return at_s and the round of a row.

    later: names of the columns that formats 2 and later added.
    """
    at_s, protocol, start, window, nodes, accepted, tokens, up, down, *rest = columns
    stages, counts = rest[: len(STAGES)], dict(zip(later, rest[len(STAGES) :], strict=True))
    inquired = counts.pop(INQUIRED, 0)
    other_notes = msgspec.json.decode(counts.pop(NOTES, "{}"), type=dict[str, int | float])
    counter_names = {counter.name for counter in counters_of(protocol)}
    notes = {name: value for name, value in counts.items() if value or name in counter_names}
    record = {
        "protocol": protocol,
        "start": start,
        "window": window,
        "nodes": nodes,
        "accepted": accepted,
        "tokens": msgspec.json.decode(tokens, type=list[int]),
        "uplink_bytes": up,
        "downlink_bytes": down,
        "timings": dict(zip(STAGES, stages, strict=True)),
        "notes": {**notes, **other_notes},
        "inquired": inquired,
    }
    return msgspec.convert(at_s, float), msgspec.convert(record, Round)
