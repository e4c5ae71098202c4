"""Open a run file for reading, or raise one clear error.

A run file may come from anywhere, and a SQLite schema can contain code: views, triggers, generated
columns, checks and defaults run when a table is read or written, possibly without end. So before
any other reading, the schema is checked: except for spaces, it must equal the schema that
`creation_sql` and `upgrade_sql` make.
"""

import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import msgspec

from pilotfish.base.errors import RunFileError
from pilotfish.base.prose import one_line
from pilotfish.device_runtime.record import STAGES
from pilotfish.lab.field.link_rows import LINK_TABLES, LINK_TABLES_SINCE
from pilotfish.wire.protocols import RoundCounter, counters

APPLICATION_ID = 0x504C4652  # "PLFR": PRAGMA application_id of a run file
FORMAT = 6  # PRAGMA user_version of the current format; each format adds columns or tables
_OPENING_S = 120.0  # time limit (s) for checking a whole file, long enough for a slow memory card
_CELL_BYTES = 1 << 26  # maximum bytes of a value; the facts of 1,000 prompts take megabytes
_MESSAGE_LETTERS = 200  # maximum letters of SQLite's message, which may quote the file
_STEPS = 10_000  # number of steps of SQLite's virtual machine between two checks of the time limit
INQUIRED, NOTES = "inquired", "notes"
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
    statements = "; ".join(_schema(FORMAT).values())
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
            f"DROP INDEX measured_once; {_schema(version + 1)['measured_once']};",
        ]
    if version + 1 == CLOCK_SINCE:
        statements.append(f"ALTER TABLE answers ADD COLUMN {_CLOCK_SQL};")
    if version + 1 == LINK_TABLES_SINCE:
        statements += [f"{sql};" for sql in LINK_TABLES.values()]
    return f"{' '.join(statements)} PRAGMA user_version = {version + 1};"


def _schema(version: int) -> dict[str, str]:
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


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open a run file for reading; raise `RunFileError` if it is damaged or not supported."""
    if not path.is_file():
        raise RunFileError(f"There is no run file {path}: make one with `pilotfish field measure`.")
    if path.stat().st_size == 0:
        raise RunFileError(f"{path} is empty: no run was ever recorded in it.")
    with reporting_damage(path):
        database = _connect(path)
        try:
            _check_format(path, database)
            _check_schema(path, database)
            problem = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                fault = one_line(problem, _MESSAGE_LETTERS)
                raise RunFileError(f"{path} is damaged ({fault}): restore a copy of this file.")
            database.set_progress_handler(None, 0)  # the time limit holds only for the checks above
        except BaseException:
            database.close()
            raise
    return database


def _check_format(path: Path, database: sqlite3.Connection) -> None:
    """Raise `RunFileError` if the database is not a run file, or has an unsupported format."""
    if database.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise RunFileError(f"{path} is not a run file of `pilotfish field`.")
    version = format_of(database)
    if not 1 <= version <= FORMAT:
        raise RunFileError(
            f"{path} has format {version}, but this version of Pilotfish reads formats 1 to "
            f"{FORMAT}: use the version that wrote the file."
        )


def _check_schema(path: Path, database: sqlite3.Connection) -> None:
    """Raise `RunFileError` if the schema differs from the schema of the file's format."""
    version = format_of(database)
    rows = database.execute("SELECT type, name, sql FROM sqlite_master LIMIT 100")
    actual = {(str(kind), str(name)): _without_spaces(sql) for kind, name, sql in rows}
    expected = {
        ("index" if "INDEX" in sql else "table", name): _without_spaces(sql)
        for name, sql in _schema(version).items()
    }
    for kind, name in sorted(actual.keys() | expected.keys()):
        key = (kind, name)
        if actual.get(key) == expected.get(key):
            continue
        fault = (
            f"its {kind} {name[:40]!r} differs from the {kind} in a run file of format {version}"
        )
        if key not in actual:
            fault = f"it lacks the {kind} {name}"
        elif key not in expected:
            fault = f"it has a {kind[:10]!r} {name[:40]!r}, which no run file has"
        raise RunFileError(
            f"{path} cannot be read: {fault}. Restore a copy of this file, or measure again."
        )


def _without_spaces(sql: object) -> str:
    """Remove all spaces from a statement, because SQLite changes them."""
    return "".join(str(sql).split())


def format_of(database: sqlite3.Connection) -> int:
    """Return the format number of a run file."""
    version: int = database.execute("PRAGMA user_version").fetchone()[0]
    return version


def harden(database: sqlite3.Connection) -> None:
    """Configure SQLite for a file that may be malicious; call this before any other statement."""
    database.execute("PRAGMA trusted_schema = OFF")
    database.execute("PRAGMA cell_size_check = ON")
    if sys.version_info >= (3, 11):
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _CELL_BYTES)


def _connect(path: Path) -> sqlite3.Connection:
    """Open a read-only connection.

    This works even in a read-only folder, if the run was closed properly.
    """
    wal, journal = (path.with_name(f"{path.name}-{kind}") for kind in ("wal", "journal"))
    until_s = time.monotonic() + _OPENING_S
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        database = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, timeout=10.0)
        database.row_factory = sqlite3.Row
        try:
            harden(database)
            database.execute("PRAGMA query_only = ON")
            database.set_progress_handler(lambda: time.monotonic() > until_s, _STEPS)
            database.execute("SELECT 1 FROM sqlite_master").fetchone()
            return database
        except sqlite3.OperationalError as error:
            database.close()
            # SQLite must apply the journal before the checks, since the journal may change the
            # schema
            if journal.exists():
                raise RunFileError(
                    f"The last write to {path} was interrupted (its journal {journal.name} is "
                    "left): resume the run with `pilotfish field measure --resume`."
                ) from error
            if wal.exists() or "immutable" in mode:
                raise
    raise AssertionError  # never reached: the loop returns or raises


@contextmanager
def reporting_damage(path: Path) -> Iterator[None]:
    """Convert the errors that arise from reading the file into `RunFileError`."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise RunFileError(
            f"{path} cannot be read: {one_line(str(error), _MESSAGE_LETTERS)}."
        ) from error
    except (
        sqlite3.DatabaseError,
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
        TypeError,  # raised if a value that should be JSON is not a text
    ) as error:
        raise RunFileError(
            f"{path} is not a run file, or is damaged: {one_line(str(error), _MESSAGE_LETTERS)}."
        ) from error
