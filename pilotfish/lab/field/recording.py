"""Write a run file: every round is on the disk before the next round begins.

In: the facts of a run; begin, rounds and end of each answer; probes and outages. Out: the SQLite
database that `field.run` reads.

Each round is one transaction in WAL mode with ``synchronous=FULL``. So a kill or a power cut loses
only the current round. The rounds of `stream` are an exception, because its tokens arrive faster
than some disks can sync. The operating system gets each round at once, so a kill does not lose it;
the disk gets all rounds when the answer ends. After each answer SQLite's log is merged into the
database. So a closed run is a single file.

An advisory lock admits one writer at a time. The lock ends with the writer's process.
"""

import math
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pilotfish.base.errors import RunFileError
from pilotfish.device_runtime.record import STAGES, Round, RttSample
from pilotfish.lab.field.axes import read_point
from pilotfish.lab.field.link_rows import (
    OUTAGE_COLUMNS,
    PROBE_COLUMNS,
    PROBE_JSON,
    Outage,
    Probe,
)
from pilotfish.lab.field.run import Answer, Cell, Configuration, Facts
from pilotfish.lab.field.run_file import (
    CLOCK,
    FORMAT,
    INQUIRED,
    NOTES,
    POINT,
    creation_sql,
    format_of,
    harden,
    later_columns,
    open_read_only,
    reporting_damage,
    upgrade_sql,
)
from pilotfish.lab.runs import WriterLock
from pilotfish.wire.protocols import STREAM, counters

_DAMAGE = sqlite3.DatabaseError
# by table, the time of a row by which `Recorder.forget` decides: an outage that has not ended stays
_TIMES = {
    "answers": "clock_s",
    "probes": "clock_s",
    "outages": "ifnull(ended_clock_s, 9e999)",
}


class AnswerWriter(Protocol):
    """Takes the rows of answers; see the methods of `Recorder`."""

    def begin(self, answer: Answer) -> int:
        """Take the begin of an answer; return its id."""
        ...

    def add_round(self, answer: int, number: int, at_s: float, round_: Round) -> None:
        """Take a round of this answer."""
        ...

    def add_rtts(self, answer: int, rtts: Sequence[RttSample]) -> None:
        """Take the samples of the RTT of this answer."""
        ...

    def end(self, answer: int, **columns: Any) -> None:
        """Take the end of this answer."""
        ...


class Recorder:
    """A run file that is open for writing; `create` or `resume` opens it. Not thread-safe.

    A failed write raises an `OSError`, which names the file.
    """

    def __init__(self, path: Path, lock: WriterLock, database: sqlite3.Connection) -> None:
        self.path = path
        self._lock = lock
        self._database = database
        self._is_together = False

    @classmethod
    def create(cls, path: Path, facts: Facts) -> "Recorder":
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
    def resume(cls, path: Path) -> "Recorder":
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

    def change_facts(self, **values: Any) -> None:
        """Change these facts of the run, by name."""
        with self._writing() as database:
            database.executemany(
                "INSERT INTO facts VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                [(name, _json(value)) for name, value in values.items()],
            )

    def finished_cells(self) -> set[Cell]:
        """Return the cells of the matrix that have a finished answer."""
        with reporting_damage(self.path):
            rows = self._database.execute(
                f"SELECT protocol, window, {POINT}, prompt, repeat FROM answers "
                "WHERE finished AND NOT warm_up"
            ).fetchall()
            return {
                Cell(
                    Configuration.of(protocol, window, read_point(point)),
                    prompt,
                    repeat,
                )
                for protocol, window, point, prompt, repeat in rows
            }

    def begin(self, answer: Answer) -> int:
        """Record the begin of an answer; return its id, which `add_round` and `end` need."""
        columns = ("protocol", "window", "prompt", "repeat", "warm_up", "temperature", "seed")
        values = [getattr(answer, name) for name in (*columns, "started_unix_s")]
        values += [_json(dict(answer.point)), answer.clock_s]
        with self._writing() as database:
            cursor = database.execute(
                f"INSERT INTO answers ({', '.join(columns)}, started_unix_s, {POINT}, {CLOCK}) "
                f"VALUES ({', '.join('?' * len(values))})",
                values,
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def add_round(self, answer: int, number: int, at_s: float, round_: Round) -> None:
        """Record a round that both ends have committed.

        answer: the answer's id. number: the round's number in the answer. at_s: see `Answer`.
        """
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
        """Record the end of an answer. columns: fields of `Answer`, among them ``error``."""
        values = [_column(value) for value in columns.values()]
        with self._writing() as database:
            database.execute(
                f"UPDATE answers SET {', '.join(f'{name} = ?' for name in columns)} WHERE id = ?",
                (*values, answer),
            )
        if not self._is_together:
            with self._naming_file():
                self._merge_log()

    def add_rtts(self, answer: int, rtts: Sequence[RttSample]) -> None:
        """Record the samples of the RTT of an answer, by its id; call it once, before `end`."""
        rows = [(answer, number, *sample) for number, sample in enumerate(rtts)]
        with self._writing(sync=False) as database:  # `end` syncs
            database.executemany("INSERT INTO rtts VALUES (?, ?, ?, ?)", rows)

    def add_probe(self, probe: Probe) -> int:
        """Record a probe; return its id. The id of ``probe`` is ignored."""
        values = {name: getattr(probe, name) for name in PROBE_COLUMNS}
        for name in PROBE_JSON:
            values[name] = None if values[name] is None else _json(values[name])
        return self._insert("probes", values)

    def add_outage(self, outage: Outage) -> int:
        """Record an outage when it begins, and again when it has ended; return its id.

        The begin by the run's clock names the outage. If the newest outage of the file is another
        one, the begin is not in the file, so the outage is recorded whole.
        """
        row = self._database.execute(
            "SELECT id, began_clock_s FROM outages ORDER BY id DESC LIMIT 1"
        ).fetchone()
        if row is None or row[1] != outage.began_clock_s:
            values = {name: getattr(outage, name) for name in OUTAGE_COLUMNS}
            return self._insert("outages", values)
        number = int(row[0])
        if outage.ended_clock_s is not None:
            self.end_outages(outage.ended_unix_s, outage.ended_clock_s, since=number)
        return number

    def end_outages(self, unix_s: float | None, clock_s: float, *, since: int = 0) -> None:
        """Record this end, by both clocks, of all outages without an end. since: the first id."""
        with self._writing() as database:
            database.execute(
                "UPDATE outages SET ended_unix_s = ?, ended_clock_s = ? "
                "WHERE id >= ? AND ended_clock_s IS NULL",
                (unix_s, clock_s, since),
            )

    def _insert(self, table: str, values: dict[str, Any]) -> int:
        """Insert a row, whose id the database chooses; return this id."""
        del values["id"]
        with self._writing() as database:
            cursor = database.execute(
                f"INSERT INTO {table} ({', '.join(values)}) "
                f"VALUES ({', '.join('?' * len(values))})",
                tuple(values.values()),
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def forget(self, before_clock_s: float) -> None:
        """Delete answers and probes that began, and outages that ended, before this time.

        It is a time by the run's clock. Facts and an outage without an end stay. Later rows take
        the space, so the file does not become smaller. Rows have ascending times, so this reads
        only what it deletes, and not the whole file of a month.
        """
        with self._writing() as database:
            answer = self._first_since("answers", before_clock_s)
            database.execute("DELETE FROM rounds WHERE answer < ?", (answer,))
            database.execute("DELETE FROM rtts WHERE answer < ?", (answer,))
            database.execute("DELETE FROM answers WHERE id < ?", (answer,))
            probe = self._first_since("probes", before_clock_s)
            database.execute("DELETE FROM probes WHERE id < ?", (probe,))
            outage = self._first_since("outages", before_clock_s)
            database.execute("DELETE FROM outages WHERE id < ?", (outage,))

    def _first_since(self, table: str, clock_s: float) -> int:
        """Return the id of the first row since this time; without such a row, the next id."""
        row = self._database.execute(
            "SELECT coalesce("
            f"(SELECT id FROM {table} WHERE {_TIMES[table]} >= ? ORDER BY id LIMIT 1), "
            f"(SELECT max(id) + 1 FROM {table}), 0)",
            (clock_s,),
        ).fetchone()
        return int(row[0])

    def last_probe_s(self) -> float | None:
        """Return the time of the newest probe by the run's clock; None without probes."""
        return self._number("SELECT max(clock_s) FROM probes")

    def oldest_s(self) -> float | None:
        """Return the time of the oldest row that `forget` deletes; None without such a row.

        It is the begin of an answer or a probe, or the end of an outage, by the run's clock.
        """
        times = [
            self._number(f"SELECT {time} FROM {table} WHERE id = (SELECT min(id) FROM {table})")
            for table, time in _TIMES.items()
        ]
        return min((time for time in times if time is not None and time < math.inf), default=None)

    def _number(self, query: str) -> float | None:
        with reporting_damage(self.path):
            row = self._database.execute(query).fetchone()
        return None if row is None else row[0]

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

    def __enter__(self) -> "Recorder":
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


def _later_values(round_: Round) -> Iterator[Any]:
    """Yield a round's values of the columns that formats 2 and later added, in column order."""
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
    """Encode every fact as JSON; return the values by name."""
    return {name: _json(getattr(facts, name)) for name in facts.__dataclass_fields__}


def _column(value: Any) -> Any:
    """Convert a value to a type of SQLite: None, numbers and texts stay, all else becomes JSON."""
    return value if value is None or isinstance(value, int | float | str) else _json(value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=lambda scalar: scalar.item()).decode()
