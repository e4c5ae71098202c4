"""Write the rows of a run file: every round is on the disk before the next round begins.

In: the facts of a run; begin, rounds and end of each answer; probes and outages. Out: the SQLite
database that `field.run` reads.

Each round is one transaction. So a kill or a power cut loses only the current round. The rounds of
`stream` are an exception, because its tokens arrive faster than some disks can sync. The operating
system gets each round at once, so a kill does not lose it; the disk gets all rounds when the answer
ends. After each answer SQLite's log is merged into the database. So a closed run is a single file.
"""

import math
from collections.abc import Sequence
from typing import Any

from pilotfish.device_runtime.record import Round, RttSample
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.axes import read_point
from pilotfish.lab.field.configuration import Cell, Configuration
from pilotfish.lab.field.link_rows import (
    OUTAGE_COLUMNS,
    PROBE_COLUMNS,
    PROBE_JSON,
    Outage,
    Probe,
)
from pilotfish.lab.field.round_rows import round_values
from pilotfish.lab.field.run_file import reporting_damage
from pilotfish.lab.field.run_schema import CLOCK, POINT, column_value, json_text
from pilotfish.lab.field.writable_run_file import WritableRunFile
from pilotfish.wire.protocols import STREAM

# by table, the time of a row by which `Recorder.forget` decides: an outage that has not ended stays
_TIMES = {
    "answers": "clock_s",
    "probes": "clock_s",
    "outages": "ifnull(ended_clock_s, 9e999)",
}


class Recorder(WritableRunFile):
    """Writes the rows of a run file; `create` or `resume` opens it. Not thread-safe.

    A failed write raises an `OSError`, which names the file.
    """

    def change_facts(self, **values: Any) -> None:
        """Change these facts of the run, by name."""
        with self._writing() as database:
            database.executemany(
                "INSERT INTO facts VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                [(name, json_text(value)) for name, value in values.items()],
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
        values += [json_text(dict(answer.point)), answer.clock_s]
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
        values = (answer, number, *round_values(at_s, round_))
        insert = f"INSERT INTO rounds VALUES ({', '.join('?' * len(values))})"
        with self._writing(sync=round_.protocol != STREAM) as database:
            database.execute(insert, values)

    def end(self, answer: int, **columns: Any) -> None:
        """Record the end of an answer. columns: fields of `Answer`, among them ``error``."""
        values = [column_value(value) for value in columns.values()]
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

    def add_probe(self, probe: Probe) -> None:
        """Record a probe. The id of ``probe`` is ignored."""
        values = {name: getattr(probe, name) for name in PROBE_COLUMNS}
        for name in PROBE_JSON:
            values[name] = None if values[name] is None else json_text(values[name])
        self._insert("probes", values)

    def add_outage(self, outage: Outage) -> None:
        """Record an outage when it begins, and again when it has ended.

        The begin by the run's clock names the outage. If the newest outage of the file is another
        one, the begin is not in the file, so the outage is recorded whole.
        """
        row = self._database.execute(
            "SELECT id, began_clock_s FROM outages ORDER BY id DESC LIMIT 1"
        ).fetchone()
        if row is None or row[1] != outage.began_clock_s:
            self._insert("outages", {name: getattr(outage, name) for name in OUTAGE_COLUMNS})
        elif outage.ended_clock_s is not None:
            self.end_outages(outage.ended_unix_s, outage.ended_clock_s, since=int(row[0]))

    def end_outages(self, unix_s: float | None, clock_s: float, *, since: int = 0) -> None:
        """Record this end, by both clocks, of all outages without an end. since: the first id."""
        with self._writing() as database:
            database.execute(
                "UPDATE outages SET ended_unix_s = ?, ended_clock_s = ? "
                "WHERE id >= ? AND ended_clock_s IS NULL",
                (unix_s, clock_s, since),
            )

    def _insert(self, table: str, values: dict[str, Any]) -> None:
        """Insert a row, whose id the database chooses."""
        del values["id"]
        with self._writing() as database:
            database.execute(
                f"INSERT INTO {table} ({', '.join(values)}) "
                f"VALUES ({', '.join('?' * len(values))})",
                tuple(values.values()),
            )

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
