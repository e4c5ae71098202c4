"""Is it a run file at all? A path in; out comes a connection to read from, or one clear error."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from wire.errors import RunFileError

APPLICATION_ID = 0x504C4652  # "PLFR", what tells our files from other SQLite databases
FORMAT = 3  # PRAGMA user_version; format 1 knows no decision head, 2 no deviation


def open_read_only(path: Path) -> sqlite3.Connection:
    """A connection to a run file that is one, whole and of a format that this version knows."""
    if not path.is_file():
        raise RunFileError(f"There is no run file {path}: make one with `pilotfish field measure`.")
    if path.stat().st_size == 0:
        raise RunFileError(f"{path} is empty: nothing was ever measured into it.")
    with damage_told(path):
        database = _connect(path)
        try:
            _check_format(path, database)
            problem = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                told = " ".join(problem.split())
                raise RunFileError(f"{path} is damaged ({told}): restore a copy of it.")
        except BaseException:
            database.close()
            raise
    return database


def _check_format(path: Path, database: sqlite3.Connection) -> None:
    """`RunFileError` unless the database is a run file that this version reads."""
    if database.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise RunFileError(f"{path} is not a run file of `pilotfish field measure`.")
    version = format_of(database)
    if not 1 <= version <= FORMAT:
        raise RunFileError(
            f"{path} has format {version}, and this version of Pilotfish reads 1 to {FORMAT}: "
            "use the version that made it."
        )


def format_of(database: sqlite3.Connection) -> int:
    """The format of a run file."""
    version: int = database.execute("PRAGMA user_version").fetchone()[0]
    return version


def _connect(path: Path) -> sqlite3.Connection:
    """Read-only; from a folder that cannot be written, too, when the run was closed properly."""
    wal = path.with_name(path.name + "-wal")
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        database = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, timeout=10.0)
        database.row_factory = sqlite3.Row
        try:
            database.execute("SELECT 1 FROM sqlite_master").fetchone()
            return database
        except sqlite3.OperationalError:
            database.close()
            if wal.exists() or "immutable" in mode:
                raise
    raise AssertionError  # the loop returns or raises


@contextmanager
def damage_told(path: Path) -> Iterator[None]:
    """Whatever reading a file can bring up, as one `RunFileError`."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise RunFileError(f"{path} cannot be read: {error}.") from error
    except (
        sqlite3.DatabaseError,
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:
        raise RunFileError(f"{path} is not a run file, or is damaged: {error}.") from error
