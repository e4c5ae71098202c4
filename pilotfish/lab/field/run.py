"""Read a run file: a SQLite database that `field measure` or `field watch` writes round by round.

In: a path. Out: the run's facts and its answers, each with its rounds; probes and outages.

`docs/field.md` lists the tables; `lab/field/recording.py` writes them. Writing may have stopped
at any moment, so only ``finished`` answers count. The file may come from anywhere, so every value
is checked. Every fault in a file raises `RunFileError`.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from pilotfish.device_runtime.record import RttSample
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.axes import read_point
from pilotfish.lab.field.link_rows import (
    LINK_TABLES_SINCE,
    OUTAGE_COLUMNS,
    PROBE_COLUMNS,
    PROBE_JSON,
    Outage,
    Probe,
)
from pilotfish.lab.field.round_rows import ROUND_COLUMNS, round_of
from pilotfish.lab.field.run_clock import Moment
from pilotfish.lab.field.run_facts import Facts
from pilotfish.lab.field.run_file import format_of, open_read_only, reporting_damage
from pilotfish.lab.field.run_schema import CLOCK, CLOCK_SINCE, POINT, POINT_SINCE, later_columns
from pilotfish.wire.protocols import option_types

_ANSWER_COLUMNS = [
    column.name
    for column in fields(Answer)
    if column.name not in ("rounds", "at_s", "rtts", POINT, CLOCK)
]
# the end of the newest row; an answer's time to its end is unknown if it was cut off
_LAST_MOMENT = (
    "SELECT started_unix_s + ifnull(total_s, 0), clock_s + ifnull(total_s, 0) FROM answers "
    "WHERE clock_s IS NOT NULL "
    "UNION ALL SELECT began_unix_s + took_s, clock_s + took_s FROM probes "
    "UNION ALL SELECT ifnull(ended_unix_s, began_unix_s), ifnull(ended_clock_s, began_clock_s) "
    "FROM outages ORDER BY 2 DESC LIMIT 1"
)


class Run:
    """A run file that is open for reading. A command may still be writing it."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path = path
        self._database = database
        formats = range(2, format_of(database) + 1)
        self._later = [name for since in formats for name in later_columns(since)]
        version = format_of(database)
        later_columns_of_answers = {POINT: POINT_SINCE, CLOCK: CLOCK_SINCE}
        self._answer_columns = [
            *_ANSWER_COLUMNS,
            *(name for name, since in later_columns_of_answers.items() if version >= since),
        ]
        self._has_link_tables = version >= LINK_TABLES_SINCE
        self.facts = _facts(path, database)

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open and check a run file; raise `RunFileError`, which names the fault."""
        path = Path(path)
        database = open_read_only(path)
        try:
            return cls(path, database)
        except BaseException:
            database.close()
            raise

    def answers(self, *, warm_up: bool = False, finished: bool = True) -> Iterator[Answer]:
        """Yield the answers in the order in which they began, each with its rounds.

        warm_up: whether to include warm-up answers. finished: whether to skip unfinished answers.
        """
        condition = "(finished OR ?) AND (NOT warm_up OR ?)"
        with reporting_damage(self.path):
            # ids alone, since a month's watch would not fit into memory
            ids = self._database.execute(
                f"SELECT id FROM answers WHERE {condition} ORDER BY id", (not finished, warm_up)
            ).fetchall()
        for (id_,) in ids:
            with reporting_damage(self.path):
                row = self._database.execute(
                    f"SELECT {', '.join(self._answer_columns)} FROM answers WHERE id = ?", (id_,)
                ).fetchone()
                answer = None if row is None else self._answer(row)
            if answer is not None:  # a watch that goes on may have deleted it
                yield answer

    def _answer(self, row: sqlite3.Row) -> Answer:
        values = {name: row[name] for name in row.keys()}  # noqa: SIM118  # a Row iterates its values
        values["warm_up"], values["finished"] = bool(row["warm_up"]), bool(row["finished"])
        for name in ("link", "choice"):
            if values[name] is not None:
                values[name] = msgspec.json.decode(values[name])
        point = read_point(values.pop(POINT, "{}"))
        # An unfinished answer lacks some columns; their fields have the dataclass's defaults.
        known = {name: value for name, value in values.items() if value is not None}
        answer = msgspec.convert({"window": None, **known, "point": point}, Answer)
        if self._has_link_tables:
            answer.rtts.extend(
                msgspec.convert(tuple(sample), RttSample)
                for sample in self._database.execute(
                    "SELECT at_s, rtt_s FROM rtts WHERE answer = ? ORDER BY number", (answer.id,)
                )
            )
        for columns in self._database.execute(
            f"SELECT {', '.join([ROUND_COLUMNS, *self._later])} FROM rounds WHERE answer = ? "
            "ORDER BY number",
            (answer.id,),
        ):
            at_s, round_ = round_of(columns, self._later)
            answer.at_s.append(at_s)
            answer.rounds.append(round_)
        return answer

    def probes(self) -> Iterator[Probe]:
        """Yield the probes in the order in which they began; none in files of old formats."""
        for row in self._link_rows("probes", PROBE_COLUMNS):
            with reporting_damage(self.path):
                values = dict(row)
                for name in PROBE_JSON:
                    if values[name] is not None:
                        values[name] = msgspec.json.decode(values[name])
                for name in ("up_bound", "down_bound"):
                    values[name] = bool(values[name])
                probe = msgspec.convert(values, Probe)
            yield probe

    def outages(self) -> Iterator[Outage]:
        """Yield the outages in the order in which they began; none in files of old formats."""
        for row in self._link_rows("outages", OUTAGE_COLUMNS):
            with reporting_damage(self.path):
                outage = msgspec.convert(dict(row), Outage)
            yield outage

    def moments(self) -> list[tuple[float, float]]:
        """Return the times of all rows by the run's clock, ascending, and by the wall clock.

        Files of old formats have no run's clock, so the list is empty.
        """
        if not self._has_link_tables:
            return []
        with reporting_damage(self.path):
            rows = self._database.execute(
                "SELECT clock_s, started_unix_s FROM answers WHERE clock_s IS NOT NULL "
                "UNION ALL SELECT clock_s, began_unix_s FROM probes "
                "UNION ALL SELECT began_clock_s, began_unix_s FROM outages "
                "UNION ALL SELECT ended_clock_s, ended_unix_s FROM outages "
                "WHERE ended_clock_s IS NOT NULL ORDER BY 1"
            ).fetchall()
            return [msgspec.convert(tuple(row), tuple[float, float]) for row in rows]

    def last_moment(self) -> Moment:
        """Return the last moment at which the file tells that the run ran, by all clocks.

        It is the end of the newest row, the last start, or `Facts.alive_clock_s`.
        """
        facts, start = self.facts, self.facts.starts[-1].moment
        moments = [(start.unix_s, start.clock_s)]
        if facts.alive_unix_s is not None and facts.alive_clock_s is not None:
            moments.append((facts.alive_unix_s, facts.alive_clock_s))
        if self._has_link_tables:
            with reporting_damage(self.path):
                moments += [
                    msgspec.convert(tuple(row), tuple[float, float])
                    for row in self._database.execute(_LAST_MOMENT)
                ]
        unix_s, clock_s = max(moments, key=lambda moment: moment[1])
        return Moment(
            unix_s=unix_s,
            clock_s=clock_s,
            boot_id=start.boot_id,
            boot_s=start.boot_s + clock_s - start.clock_s,
        )

    def _link_rows(self, table: str, columns: tuple[str, ...]) -> Iterator[sqlite3.Row]:
        if not self._has_link_tables:
            return
        with reporting_damage(self.path):
            rows = self._database.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY id")
            for row in rows:  # noqa: UP028  # `yield from` would close the cursor after its database
                yield row

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _facts(path: Path, database: sqlite3.Connection) -> Facts:
    with reporting_damage(path):
        rows = database.execute("SELECT name, value FROM facts").fetchall()
        facts = {row["name"]: msgspec.json.decode(row["value"]) for row in rows}
        if isinstance(settings := facts.get("settings"), dict):
            _gather_options(settings)
        parsed = msgspec.convert(facts, Facts)
        if not parsed.starts:
            raise msgspec.ValidationError("no start of the run is recorded")
        return parsed


def _gather_options(settings: dict[str, Any]) -> None:
    """Move the protocols' options into ``options``; formats before 4 stored them in settings."""
    option_names = [name for kind in option_types() for name in kind.__struct_fields__]
    old_options = {name: settings.pop(name) for name in option_names if name in settings}
    set_options = {name: value for name, value in old_options.items() if value is not None}
    settings.setdefault("options", set_options)
