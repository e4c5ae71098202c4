"""Write a run file: every round is on the disk before the next one begins.

In: the facts of a run, the begin and end of each answer, its rounds as they happen. Out: the SQLite
database that `field.run` reads.

Each round is one transaction in WAL mode with ``synchronous=FULL``, so that a kill or a power cut
loses only the running round. `stream` is the exception: its tokens arrive faster than some disks
sync, and waiting for the disk would slow the measurement. Its rounds go to the operating system one
by one, where a kill cannot reach them, and to the disk at the end of the answer. After each answer
the log is folded into the file; a closed run is one file.

An advisory lock admits one writer at a time; it ends with the writer's process.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from pilotfish.base.errors import RunFileError
from pilotfish.base.files import PRIVATE
from pilotfish.device_runtime.record import STAGES, Round
from pilotfish.field.run import Answer, Cell, Configuration, Facts, Start
from pilotfish.field.run_file import (
    FORMAT,
    INQUIRED,
    NOTES,
    creation_sql,
    format_of,
    harden,
    later_columns,
    open_read_only,
    reporting_damage,
    upgrade_sql,
)
from pilotfish.wire.protocols import STREAM, counters


class Recorder:
    """A run file, opened for writing by `create` or `resume`. Not thread-safe.

    A failed write raises an `OSError` that names the file.
    """

    def __init__(self, path: Path, lock: int, database: sqlite3.Connection) -> None:
        self.path = path
        self._lock = lock
        self._database = database

    @classmethod
    def create(cls, path: Path, facts: Facts) -> "Recorder":
        """Create a file with these facts; raise `RunFileError` if the file has a run already."""
        expect_unused(path)
        lock = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE)  # SQLite gives its logs the same mode
        try:
            _lock(path, lock)
            database = _open(path)
            # Tables and facts appear together, before the log begins: after a kill in between, the
            # file is empty again, as `has_begun` finds.
            database.executescript(f"BEGIN; {creation_sql()}")
            with database:
                database.executemany("INSERT INTO facts VALUES (?, ?)", _encode(facts).items())
            database.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            os.close(lock)
            raise OSError(f"{path} cannot be written: {error}.") from error
        except BaseException:
            os.close(lock)
            raise
        return cls(path, lock, database)

    @classmethod
    def resume(cls, path: Path) -> "Recorder":
        """Open an existing file; raise `RunFileError` if it is no run, or has a writer."""
        has_begun(path)  # it rolls a journal back, which may restore another schema
        open_read_only(path).close()
        lock = os.open(path, os.O_RDWR)
        try:
            _lock(path, lock)
            with reporting_damage(path):
                database = _open(path)
                database.execute("PRAGMA journal_mode = WAL")
                for version in range(format_of(database), FORMAT):
                    database.executescript(f"BEGIN; {upgrade_sql(version)} COMMIT;")
        except BaseException:
            os.close(lock)
            raise
        return cls(path, lock, database)

    def add_start(self, starts: Sequence[Start]) -> None:
        """Record that measuring began (again)."""
        with self._writing() as database:
            value = _json(starts)
            database.execute("UPDATE facts SET value = ? WHERE name = 'starts'", (value,))

    def finished_cells(self) -> set[Cell]:
        """Return the cells of the matrix that are measured."""
        with reporting_damage(self.path):
            rows = self._database.execute(
                "SELECT protocol, window, prompt, repeat FROM answers "
                "WHERE finished AND NOT warm_up"
            ).fetchall()
        return {Cell(Configuration(row[0], row[1]), row[2], row[3]) for row in rows}

    def begin(self, answer: Answer) -> int:
        """Record the begin of an answer; return the id for its rounds and its end."""
        columns = ("protocol", "window", "prompt", "repeat", "warm_up", "temperature", "seed")
        values = [getattr(answer, name) for name in (*columns, "started_unix_s")]
        with self._writing() as database:
            cursor = database.execute(
                f"INSERT INTO answers ({', '.join(columns)}, started_unix_s) "
                f"VALUES ({', '.join('?' * len(values))})",
                values,
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def add_round(self, answer: int, number: int, at_s: float, round_: Round) -> None:
        """Record a round that both ends have committed."""
        values = (
            answer,
            number,
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
        insert = f"INSERT INTO rounds VALUES ({', '.join('?' * len(values))})"
        with self._writing(sync=round_.protocol != STREAM) as database:
            database.execute(insert, values)

    def end(self, answer: int, **columns: Any) -> None:
        """Record that the answer is complete, or its ``error``; columns: fields of `Answer`."""
        values = [_column(value) for value in columns.values()]
        with self._writing() as database:
            database.execute(
                f"UPDATE answers SET {', '.join(f'{name} = ?' for name in columns)} WHERE id = ?",
                (*values, answer),
            )
        with self._naming_file():  # folds the log into the file
            self._database.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        """Close the file; if it has no readers, fold its log into it."""
        try:
            with suppress(sqlite3.OperationalError):
                self._database.execute("PRAGMA journal_mode = DELETE")
        finally:
            self._database.close()
            os.close(self._lock)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _writing(self, *, sync: bool = True) -> Iterator[sqlite3.Connection]:
        """Run a transaction. sync: write it to the disk, not only to the operating system."""
        with self._naming_file():
            self._database.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
            with self._database:
                yield self._database

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise OSError(f"{self.path} cannot be written: {error}.") from error


def has_begun(path: Path) -> bool:
    """Whether the file has a run; a file whose creation was cut off is empty."""
    if not path.exists():
        return False
    if path.is_dir():
        raise RunFileError(f"{path} is a folder: name a file in it.")
    if path.with_name(path.name + "-journal").exists():
        with reporting_damage(path):
            _open(path).close()  # rolls back what was not committed
    return path.stat().st_size > 0


def expect_unused(path: Path) -> None:
    """Raise `RunFileError` if the file has a run already."""
    if has_begun(path):
        raise RunFileError(f"{path} exists: go on with it by --resume, or name another file.")


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path.resolve(), timeout=1.0)
    harden(database)
    database.execute("SELECT 1 FROM sqlite_master").fetchone()
    database.execute("PRAGMA synchronous = FULL")
    return database


def _lock(path: Path, file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunFileError(
            f"{path} is being written by another `pilotfish field measure`: wait for it, or name "
            "another file."
        ) from None


def _later_values(round_: Round) -> Iterator[Any]:
    """Yield the values of the columns that formats after the first added, in their order."""
    known_counters = counters()
    other_notes = {
        name: value
        for name, value in round_.notes.items()
        if name not in known_counters or known_counters[name].column_since is None
    }
    later_values = {INQUIRED: round_.inquired, NOTES: _json(other_notes)}
    for since in range(2, FORMAT + 1):
        for column in later_columns(since):
            yield later_values[column] if column in later_values else round_.notes.get(column, 0)


def _encode(facts: Facts) -> dict[str, str]:
    """Encode every fact as name and JSON value."""
    return {name: _json(getattr(facts, name)) for name in facts.__dataclass_fields__}


def _column(value: Any) -> Any:
    """Convert a value for SQLite: structures become JSON."""
    return value if value is None or isinstance(value, int | float | str) else _json(value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=lambda scalar: scalar.item()).decode()
