"""The tables of a run file: SQL that creates them, and that converts files of older formats.

`docs/field.md` lists the columns. Each format adds columns or tables to the one before it. A value
that is no number or text is stored as JSON (`column_value`).
"""

from itertools import chain
from typing import Any

import msgspec

from pilotfish.device_runtime.record import STAGES
from pilotfish.lab.field.link_rows import LINK_TABLES, LINK_TABLES_SINCE
from pilotfish.wire.protocols import RoundCounter, counters

APPLICATION_ID = 0x504C4652  # "PLFR": PRAGMA application_id of a run file
FORMAT = 6  # PRAGMA user_version of the current format; each format adds columns or tables
INQUIRED, NOTES = "inquired", "notes"  # columns of rounds
POINT, POINT_SINCE = "point", 5  # a column of answers, and the format that added it
_POINT_SQL = f"{POINT} TEXT NOT NULL DEFAULT '{{}}'"
CLOCK, CLOCK_SINCE = "clock_s", 6  # a column of answers, and the format that added it
_CLOCK_SQL = f"{CLOCK} REAL"


def counter_columns(since: int) -> list[RoundCounter]:
    """Return the counters that got a column in this format."""
    return [counter for counter in counters().values() if counter.column_since == since]


def later_columns(since: int) -> dict[str, str]:
    """Return the columns of rounds that this format added: SQL types by name.

    Counters without a column are stored in ``notes``, a JSON object.
    """
    kinds = {True: "INTEGER", False: "REAL"}
    columns = {
        counter.name: f"{kinds[counter.counts_tokens]} NOT NULL DEFAULT 0"
        for counter in counter_columns(since)
    }
    if since == 2:
        columns[INQUIRED] = "INTEGER NOT NULL DEFAULT 0"
    if since == 4:
        columns[NOTES] = "TEXT NOT NULL DEFAULT '{}'"
    return columns


def creation_sql() -> str:
    """Return SQL that makes an empty database a run file: it creates the tables and sets ids."""
    statements = "; ".join(schema_of(FORMAT).values())
    return (
        f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT}; {statements};"
    )


def upgrade_sql(version: int) -> str:
    """Return SQL that converts a file of this format to the next format."""
    later = later_columns(version + 1).items()
    added = (f"ALTER TABLE rounds ADD COLUMN {name} {kind};" for name, kind in later)
    statements = [*added]
    if version + 1 == POINT_SINCE:
        statements += [
            f"ALTER TABLE answers ADD COLUMN {_POINT_SQL};",
            f"DROP INDEX measured_once; {schema_of(version + 1)['measured_once']};",
        ]
    if version + 1 == CLOCK_SINCE:
        statements.append(f"ALTER TABLE answers ADD COLUMN {_CLOCK_SQL};")
    if version + 1 == LINK_TABLES_SINCE:
        statements += [f"{sql};" for sql in LINK_TABLES.values()]
    return f"{' '.join(statements)} PRAGMA user_version = {version + 1};"


def schema_of(version: int) -> dict[str, str]:
    """Return the SQL statements that create a format's tables and indexes, by name."""
    later = (later_columns(since).items() for since in range(2, version + 1))
    measures = ", ".join(
        [
            *(f"{stage}_s REAL NOT NULL" for stage in STAGES),
            *(f"{name} {kind}" for name, kind in chain.from_iterable(later)),
        ]
    )
    point, key = (f", {_POINT_SQL}", f"{POINT}, ") if version >= POINT_SINCE else ("", "")
    later_of_answers = point + (f", {_CLOCK_SQL}" if version >= CLOCK_SINCE else "")
    return {
        "facts": "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        "answers": f"""CREATE TABLE answers (
    id INTEGER PRIMARY KEY,
    protocol TEXT NOT NULL, window, prompt INTEGER NOT NULL, repeat INTEGER NOT NULL,
    warm_up INTEGER NOT NULL, temperature REAL NOT NULL, seed INTEGER NOT NULL,
    started_unix_s REAL NOT NULL, finished INTEGER NOT NULL DEFAULT 0, error TEXT,
    protocol_used TEXT, window_used, prompt_tokens INTEGER, tokens INTEGER, finish_reason TEXT,
    first_token_s REAL, total_s REAL, recording_s REAL, link TEXT, choice TEXT,
    probe_uplink_bytes INTEGER, probe_downlink_bytes INTEGER, pings INTEGER,
    energy_j REAL{later_of_answers}
)""",
        "measured_once": f"""CREATE UNIQUE INDEX measured_once
    ON answers (protocol, ifnull(window, ''), {key}prompt, repeat)
    WHERE finished AND NOT warm_up""",
        "rounds": f"""CREATE TABLE rounds (
    answer INTEGER NOT NULL REFERENCES answers, number INTEGER NOT NULL, at_s REAL NOT NULL,
    protocol TEXT NOT NULL, start INTEGER NOT NULL, window INTEGER NOT NULL,
    nodes INTEGER NOT NULL, accepted INTEGER NOT NULL, tokens TEXT NOT NULL,
    uplink_bytes INTEGER NOT NULL, downlink_bytes INTEGER NOT NULL,
    {measures},
    PRIMARY KEY (answer, number)
) WITHOUT ROWID""",
        **(LINK_TABLES if version >= LINK_TABLES_SINCE else {}),
    }


def column_value(value: Any) -> Any:
    """Convert a value to a type of SQLite: None, numbers and texts stay, all else becomes JSON."""
    return value if value is None or isinstance(value, int | float | str) else json_text(value)


def json_text(value: Any) -> str:
    """Encode a value as JSON; scalars of NumPy become numbers."""
    return msgspec.json.encode(value, enc_hook=lambda scalar: scalar.item()).decode()
