"""Open a run file for reading, or raise one clear error.

A run file may come from anywhere, and a SQLite schema can contain code: views, triggers, generated
columns, checks and defaults run when a table is read or written, possibly without end. So before
any other reading, the schema is checked: except for spaces, it must equal the schema of the
file's format (`run_schema.schema_of`).
"""

import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pilotfish.base.errors import RunFileError
from pilotfish.base.prose import one_line
from pilotfish.lab.field.run_schema import APPLICATION_ID, FORMAT, schema_of

_OPENING_S = 120.0  # time limit (s) for checking a whole file, long enough for a slow memory card
_CELL_BYTES = 1 << 26  # maximum bytes of a value; the facts of 1,000 prompts take megabytes
_MESSAGE_LETTERS = 200  # maximum letters of SQLite's message, which may quote the file
_STEPS = 10_000  # number of steps of SQLite's virtual machine between two checks of the time limit


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
        for name, sql in schema_of(version).items()
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
