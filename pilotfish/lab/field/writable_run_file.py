"""Open a run file for writing: one writer at a time, and what is written outlives a kill.

A transaction is in WAL mode with ``synchronous=FULL``, so a kill or a power cut loses only the
transaction of that moment. `Recorder` decides what is a transaction. A closed file has no log of
SQLite beside it: it is a single file.

An advisory lock admits one writer at a time. The lock ends with the writer's process.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pilotfish.base.errors import RunFileError
from pilotfish.lab.field.run_facts import Facts
from pilotfish.lab.field.run_file import format_of, harden, open_read_only, reporting_damage
from pilotfish.lab.field.run_schema import FORMAT, creation_sql, json_text, upgrade_sql
from pilotfish.lab.runs import WriterLock

if TYPE_CHECKING:
    from typing_extensions import Self

_DAMAGE = sqlite3.DatabaseError


class WritableRunFile:
    """A run file that is open for writing; `create` or `resume` opens it. Not thread-safe.

    A failed write raises an `OSError`, which names the file.
    """

    def __init__(self, path: Path, lock: WriterLock, database: sqlite3.Connection) -> None:
        self.path = path
        self._lock = lock
        self._database = database
        self._is_together = False

    @classmethod
    def create(cls, path: Path, facts: Facts) -> "Self":
        """Create a run file with these facts; raise `RunFileError` if the file has a run."""
        expect_unused(path)
        # The lock makes the file private; SQLite gives its log files the same permissions.
        lock = _lock(path)
        try:
            database = _open(path)
            # One transaction writes tables and facts, before WAL mode begins. If a kill interrupts
            # it, `has_begun` rolls it back, and the file is empty again.
            database.executescript(f"BEGIN; {creation_sql()}")
            with database:
                database.executemany("INSERT INTO facts VALUES (?, ?)", _encode(facts).items())
            database.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            lock.close()
            raise OSError(f"{path} cannot be written: {error}.") from error
        except BaseException:
            lock.close()
            raise
        return cls(path, lock, database)

    @classmethod
    def resume(cls, path: Path) -> "Self":
        """Open an existing run file.

        Raise `RunFileError` if it is not a run file or has a writer.
        """
        has_begun(path)  # called first, since it rolls a journal back, which may change the schema
        open_read_only(path).close()
        lock = _lock(path)
        try:
            with reporting_damage(path):
                database = _open(path)
                database.execute("PRAGMA journal_mode = WAL")
                for version in range(format_of(database), FORMAT):
                    database.executescript(f"BEGIN; {upgrade_sql(version)} COMMIT;")
        except BaseException:
            lock.close()
            raise
        return cls(path, lock, database)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write all rows of the ``with`` block in one transaction: all of them, or none."""
        with self._writing():
            self._is_together = True
            try:
                yield
            finally:
                self._is_together = False
        with suppress(sqlite3.DatabaseError):  # the rows are on the disk; only the log grows
            self._merge_log()

    @property
    def in_place(self) -> bool:
        """Whether the path still names the file that is open; someone may have moved it."""
        return self._lock.holds(self.path)

    def used_bytes(self) -> int:
        """Return the bytes of the database that rows occupy, without its log."""
        with reporting_damage(self.path):
            pages, free, size = (
                self._database.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
        return int((pages - free) * size)

    def close(self) -> None:
        """Close the file; if it has no readers, merge SQLite's log into it."""
        try:
            with suppress(sqlite3.DatabaseError):
                self._database.execute("PRAGMA journal_mode = DELETE")
        finally:
            self._database.close()
            self._lock.close()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _writing(self, *, sync: bool = True) -> Iterator[sqlite3.Connection]:
        """Run a transaction, or a part of it. sync: whether to wait until the disk has it."""
        with self._naming_file():
            if self._is_together:
                yield self._database
                return
            self._database.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
            with self._database:
                yield self._database

    def _merge_log(self) -> None:
        """Merge SQLite's log into the database."""
        self._database.execute("PRAGMA wal_checkpoint(PASSIVE)")

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            # SQLite raises DatabaseError itself, and no subclass, for a damaged file
            if not isinstance(error, sqlite3.OperationalError) and type(error) is not _DAMAGE:
                raise
            raise OSError(f"{self.path} cannot be written: {error}.") from error


def has_begun(path: Path) -> bool:
    """Return whether the file has a run; roll back a creation that was interrupted."""
    if not path.exists():
        return False
    if path.is_dir():
        raise RunFileError(f"{path} is a folder: name a file in it.")
    if path.with_name(path.name + "-journal").exists():
        with reporting_damage(path):
            _open(path).close()  # SQLite rolls back the interrupted transaction
    return path.stat().st_size > 0


def expect_unused(path: Path) -> None:
    """Raise `RunFileError` if the file has a run."""
    if has_begun(path):
        raise RunFileError(f"{path} exists: resume its run with --resume, or name another file.")


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path.resolve(), timeout=1.0)
    harden(database)
    database.execute("SELECT 1 FROM sqlite_master").fetchone()
    database.execute("PRAGMA synchronous = FULL")
    return database


def _lock(path: Path) -> WriterLock:
    return WriterLock(
        path,
        f"Another `pilotfish field` command is writing {path}: wait until it ends, or name "
        "another file.",
    )


def _encode(facts: Facts) -> dict[str, str]:
    """Encode every fact as JSON; return the values by name."""
    return {name: json_text(getattr(facts, name)) for name in facts.__dataclass_fields__}
