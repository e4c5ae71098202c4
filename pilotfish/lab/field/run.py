"""Read a run file: a SQLite database that `field measure` or `field watch` writes round by round.

In: a path. Out: the run's facts and its answers, each with its rounds; probes and outages.

`docs/field.md` lists the tables; `lab/field/recording.py` writes them. Writing may have stopped
at any moment, so only ``finished`` answers count. The file may come from anywhere, so every value
is checked. Every fault in a file raises `RunFileError`.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

from pilotfish.base.settings import setting
from pilotfish.device_runtime.record import STAGES, Choice, Round, RttSample, acceptance
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.lab.field.axes import Point, format_point, read_point
from pilotfish.lab.field.link_rows import (
    LINK_TABLES_SINCE,
    OUTAGE_COLUMNS,
    PROBE_COLUMNS,
    PROBE_JSON,
    Outage,
    Probe,
)
from pilotfish.lab.field.run_clock import Moment
from pilotfish.lab.field.run_file import (
    CLOCK,
    CLOCK_SINCE,
    INQUIRED,
    NOTES,
    POINT,
    POINT_SINCE,
    format_of,
    later_columns,
    open_read_only,
    reporting_damage,
)
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import LOCAL, counters_of, option_types, streams
from pilotfish.wire.request import AUTO

WindowSetting: TypeAlias = int | Literal["auto"]

_MOST_REPEATS = 10_000


class Configuration(NamedTuple):
    """A protocol, its window, and its values of the options that the run varies (`field.axes`).

    window: draft tokens, or None under protocols without windows (`has_windows`), and with an
    expansion.
    """

    protocol: str
    window: WindowSetting | None
    point: Point = ()

    @classmethod
    def of(cls, protocol: str, window: WindowSetting | None, point: Point = ()) -> "Configuration":
        """Return the configuration; leave out a window that has no effect under the protocol.

        Older runs asked for `ahead` once a window, and a choice of ``auto`` has the window 0.
        """
        return cls(protocol, (window or None) if has_windows(protocol) else None, point)

    def __str__(self) -> str:
        name = self.protocol if self.window is None else f"{self.protocol} γ={self.window}"
        return f"{name} {format_point(self.point)}" if self.point else name

    def to_json(self) -> dict[str, Any]:
        """Return protocol, window and varied options, by name."""
        return {"protocol": self.protocol, "window": self.window, **dict(self.point)}


def has_windows(protocol: str) -> bool:
    """Return whether a window has an effect: not under `local`, `auto`, `stream` and `ahead`."""
    return protocol not in (LOCAL, AUTO) and not streams(protocol)


class Cell(NamedTuple):
    """A cell of a run's matrix. prompt: index of the prompt. repeat: number, counted from 0."""

    configuration: Configuration
    prompt: int
    repeat: int


class MatrixSettings(EngineSettings, frozen=True, kw_only=True):
    """The matrix of a run: protocols × windows × varied options × prompts × repeats.

    seed: seed of the answers and of the configurations' order. options: options of the request and
    of the protocols that have one value, without the temperature. link: options of the emulated
    link that have one value. varied: options with several values. If `link` is empty and no option
    of the link is varied, no link is emulated. provider, threads: provider and CPU threads of the
    drafter.
    """

    prompts: tuple[str, ...]
    protocols: Annotated[
        tuple[str, ...],
        setting("protocols to compare; auto chooses one for each answer", metavar="P,P,…"),
    ] = ("greedy", "coupled", "stream", "ahead", "auto")
    windows: Annotated[
        tuple[WindowSetting, ...],
        setting("number of draft tokens per round, or auto", metavar="N,N,…"),
    ] = (2, 4, 8)
    repeat: Annotated[
        int,
        setting(
            "number of answers to each prompt by each protocol and window", ge=1, le=_MOST_REPEATS
        ),
    ] = 4
    warm_up: Annotated[
        int,
        setting(
            "number of warm-up answers of each protocol and window at every start, which do "
            "not count",
            ge=0,
            le=_MOST_REPEATS,
        ),
    ] = 1
    max_tokens: Annotated[int, setting("maximum number of tokens of an answer", ge=1)] = 64
    temperature: float = 0.0
    seed: Annotated[int, setting("seed; repeat r uses seed N + r", ge=0)] = 0
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    link: dict[str, float] = msgspec.field(default_factory=dict)
    varied: dict[str, tuple[Any, ...]] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run: the first start, or a resumption.

    Host: the host's facts then. clock_s, boot_id, boot_s: the same moment by the run's clock, and
    by the seconds since a boot (`run_clock.Moment`). off_s: of a watch, the seconds before this
    start in which nothing tells that it ran.
    """

    unix_s: float
    host: dict[str, Any]  # result of `host.facts`
    clock_s: float = 0.0
    boot_id: str = ""
    boot_s: float = 0.0
    off_s: float = 0.0

    @property
    def moment(self) -> Moment:
        """The moment of the start by all clocks."""
        return Moment(
            unix_s=self.unix_s, clock_s=self.clock_s, boot_id=self.boot_id, boot_s=self.boot_s
        )


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The schedule of a `field watch`: seconds between two rounds, and of the whole watch.

    for_s: None if the watch has no end. keep_s, most_bytes: bounds of the file; older rows are
    deleted.
    """

    every_s: float
    for_s: float | None = None
    keep_s: float | None = None
    most_bytes: int | None = None


@dataclass(frozen=True)
class Model:
    """The description of a model, from its manifest, or from the edge that serves it.

    digest: first 16 hex digits of the hash of the artifact's files.
    """

    name: str
    precision: str | None = None
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a whole run.

    energy: rails of the power sensor; None without a sensor. device: the device's name; "" in old
    files. watch: the schedule of a `field watch`; None for a run of `field measure`. alive_unix_s,
    alive_clock_s: when a watch last wrote that it runs, by both clocks; it writes so during an
    outage, which has no rows, and when it stops.
    """

    software: str  # name and version, for example "pilotfish 0.2.0"
    settings: MatrixSettings
    starts: tuple[Start, ...]
    drafter: Model
    target: Model | None  # None if only `local` was measured
    edge: str | None  # address of the edge, tcp://host:port; None if the run had no edge
    edge_software: str | None
    draft_path: str
    keys_path: str | None
    note: str
    energy: str | None
    device: str = ""
    watch: Watch | None = None
    alive_unix_s: float | None = None
    alive_clock_s: float | None = None

    @property
    def host(self) -> dict[str, Any]:
        """The host's facts at the first start."""
        return self.starts[0].host


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer of the matrix. Its times do not include the time for recording.

    protocol, window: the requested configuration. protocol_used, window_used: the configuration
    that was used; under ``auto`` it differs from the requested one. link: state of the link when
    the answer began. choice: the protocol and window that ``auto`` chose for the answer. at_s[i]:
    seconds from the start of the answer to the commit of round i. The first round includes reading
    the prompt, because every answer starts with cold caches. recording_s: seconds spent writing the
    run file. clock_s: the begin by the run's clock
    (`run_clock`); None in old files. rtts: samples of the RTT during the answer.
    """

    id: int
    protocol: str
    window: WindowSetting | None
    prompt: int
    repeat: int
    warm_up: bool
    temperature: float
    seed: int
    started_unix_s: float
    finished: bool
    error: str | None = None  # message of the error that ended the answer, if it could be recorded
    protocol_used: str | None = None
    window_used: WindowSetting | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    finish_reason: str | None = None
    first_token_s: float = 0.0
    total_s: float = 0.0
    recording_s: float = 0.0
    link: LinkState | None = None
    choice: Choice | None = None
    probe_uplink_bytes: int = 0
    probe_downlink_bytes: int = 0
    pings: int = 0
    energy_j: float | None = None
    point: Point = ()
    clock_s: float | None = None
    rtts: list[RttSample] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)

    @property
    def configuration(self) -> Configuration:
        """The requested configuration."""
        return Configuration.of(self.protocol, self.window, self.point)

    @property
    def cell(self) -> Cell:
        """The cell of the matrix to which the answer belongs."""
        return Cell(self.configuration, self.prompt, self.repeat)

    @property
    def acceptance(self) -> float:
        """The acceptance α of the answer's rounds (`device_runtime.record.acceptance`)."""
        return acceptance(self.rounds)


_ANSWER_COLUMNS = [
    column.name
    for column in fields(Answer)
    if column.name not in ("rounds", "at_s", "rtts", POINT, CLOCK)
]
_ROUND_COLUMNS = (
    "at_s, protocol, start, window, nodes, accepted, tokens, uplink_bytes, downlink_bytes, "
    + ", ".join(f"{stage}_s" for stage in STAGES)
)
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
            f"SELECT {', '.join([_ROUND_COLUMNS, *self._later])} FROM rounds WHERE answer = ? "
            "ORDER BY number",
            (answer.id,),
        ):
            at_s, round_ = _round(columns, self._later)
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


def _round(columns: sqlite3.Row, later: list[str]) -> tuple[float, Round]:
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
