"""Read a run file: a SQLite database that `field measure` writes round by round.

In: a path. Out: the run's facts and its answers, each with its rounds.

`docs/field.md` lists the tables; `field/recording.py` writes them. A file may have been cut off at
any moment (only ``finished`` answers count) and may come from anywhere, so every value is checked.
Every fault of a file raises `RunFileError`.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

from pilotfish.base.settings import setting
from pilotfish.device_runtime.record import STAGES, Choice, Round, acceptance
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.field.run_file import (
    INQUIRED,
    NOTES,
    format_of,
    later_columns,
    open_read_only,
    reporting_damage,
)
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import counters_of, option_types

WindowSetting: TypeAlias = int | Literal["auto"]

_MOST_REPEATS = 10_000


class Configuration(NamedTuple):
    """A protocol and its window; None where a protocol has none (stream, local, auto)."""

    protocol: str
    window: WindowSetting | None

    def __str__(self) -> str:
        return self.protocol if self.window is None else f"{self.protocol} γ={self.window}"


class Cell(NamedTuple):
    """A cell of a run's matrix. prompt: index into the prompts. repeat: number from 0."""

    configuration: Configuration
    prompt: int
    repeat: int


class MatrixSettings(EngineSettings, frozen=True, kw_only=True):
    """The matrix of a run: protocols × windows × prompts × repeats.

    seed: also decides the order of the configurations. options: the protocols' own options that
    differ from their defaults. provider, threads: how the drafter is run.
    """

    prompts: tuple[str, ...]
    protocols: Annotated[
        tuple[str, ...],
        setting("protocols to compare; auto chooses one for each answer", metavar="P,P,…"),
    ] = ("greedy", "coupled", "stream")
    windows: Annotated[
        tuple[WindowSetting, ...], setting("draft tokens a round, or auto", metavar="N,N,…")
    ] = (2, 4, 8)
    repeat: Annotated[int, setting("answers a cell", ge=1, le=_MOST_REPEATS)] = 3
    warm_up: Annotated[
        int,
        setting(
            "uncounted answers of each configuration, at every start",
            ge=0,
            le=_MOST_REPEATS,
        ),
    ] = 1
    max_tokens: Annotated[int, setting("tokens of an answer, at most", ge=1)] = 64
    temperature: Annotated[float, setting("0 is greedy (default)", metavar="T")] = 0.0
    seed: Annotated[int, setting("seed; repeat r draws with N + r", ge=0)] = 0
    options: dict[str, Any] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of `field measure` (the first, or a resumption) and the host's facts then."""

    unix_s: float
    host: dict[str, Any]  # see `field.host.facts`


@dataclass(frozen=True)
class Model:
    """A model as its manifest describes it, or for a target its edge.

    digest: hash of the artifact's files, its first 16 hex digits.
    """

    name: str
    precision: str | None = None
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a whole run. energy: rails of the power sensor; None without a sensor."""

    software: str  # "pilotfish 0.2.0"
    settings: MatrixSettings
    starts: tuple[Start, ...]
    drafter: Model
    target: Model | None  # None when only `local` was measured
    edge: str | None  # tcp://host:port
    edge_software: str | None
    draft_path: str
    keys_path: str | None
    note: str
    energy: str | None

    @property
    def host(self) -> dict[str, Any]:
        """The host's facts when the run began."""
        return self.starts[0].host


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer of the matrix. Times exclude the time spent on recording.

    protocol, window: as requested. protocol_used, window_used: as carried out (under ``auto``).
    link, choice: as of the answer's begin. at_s[i]: when round i was committed, seconds since the
    answer began; the first round includes reading the prompt, since every answer starts with cold
    caches. recording_s: seconds spent on the run file between rounds.
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
    error: str | None = None  # why it is not finished, if that could be recorded
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
    rounds: list[Round] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)

    @property
    def configuration(self) -> Configuration:
        """The requested protocol and window."""
        return Configuration(self.protocol, self.window)

    @property
    def cell(self) -> Cell:
        """The answer's cell of the matrix."""
        return Cell(self.configuration, self.prompt, self.repeat)

    @property
    def acceptance(self) -> float:
        """α of its rounds; see `device_runtime.record.acceptance`."""
        return acceptance(self.rounds)

    @property
    def token_s(self) -> float:
        """Seconds per committed token, including reading the prompt; 0 without tokens."""
        return self.total_s / self.tokens if self.tokens else 0.0


_ANSWER_COLUMNS = ", ".join(
    column.name for column in fields(Answer) if column.name not in ("rounds", "at_s")
)
_ROUND_COLUMNS = (
    "at_s, protocol, start, window, nodes, accepted, tokens, uplink_bytes, downlink_bytes, "
    + ", ".join(f"{stage}_s" for stage in STAGES)
)


class Run:
    """A run file, opened for reading, possibly while it is being written."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path = path
        self._database = database
        formats = range(2, format_of(database) + 1)
        self._later = [name for since in formats for name in later_columns(since)]
        self.facts = _facts(path, database)

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open and check a file; raise `RunFileError`, which names the fault."""
        path = Path(path)
        database = open_read_only(path)
        try:
            return cls(path, database)
        except BaseException:
            database.close()
            raise

    def answers(self, *, warm_up: bool = False, finished: bool = True) -> Iterator[Answer]:
        """Yield the answers in the order of their begin, each with its rounds.

        warm_up: include warm-up answers. finished: leave unfinished answers out.
        """
        condition = "(finished OR ?) AND (NOT warm_up OR ?)"
        with reporting_damage(self.path):
            rows = self._database.execute(
                f"SELECT {_ANSWER_COLUMNS} FROM answers WHERE {condition} ORDER BY id",
                (not finished, warm_up),
            ).fetchall()
        for row in rows:
            with reporting_damage(self.path):
                answer = self._answer(row)
            yield answer

    def _answer(self, row: sqlite3.Row) -> Answer:
        values = {name: row[name] for name in row.keys()}  # noqa: SIM118  (a Row iterates values)
        values["warm_up"], values["finished"] = bool(row["warm_up"]), bool(row["finished"])
        for name in ("link", "choice"):
            if values[name] is not None:
                values[name] = msgspec.json.decode(values[name])
        # columns that an unfinished answer lacks have the dataclass's defaults
        known = {name: value for name, value in values.items() if value is not None}
        answer = msgspec.convert({"window": None, **known}, Answer)
        for columns in self._database.execute(
            f"SELECT {', '.join([_ROUND_COLUMNS, *self._later])} FROM rounds WHERE answer = ? "
            "ORDER BY number",
            (answer.id,),
        ):
            at_s, round_ = _round(columns, self._later)
            answer.at_s.append(at_s)
            answer.rounds.append(round_)
        return answer

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _facts(path: Path, database: sqlite3.Connection) -> Facts:
    with reporting_damage(path):
        rows = database.execute("SELECT name, value FROM facts").fetchall()
        facts = {row["name"]: msgspec.json.decode(row["value"]) for row in rows}
        if isinstance(settings := facts.get("settings"), dict):
            _gather_options(settings)
        parsed = msgspec.convert(facts, Facts)
        if not parsed.starts:
            raise msgspec.ValidationError("it was never started")
        return parsed


def _gather_options(settings: dict[str, Any]) -> None:
    """Move the protocols' own options, which formats before 4 kept among the other settings."""
    option_names = [name for kind in option_types() for name in kind.__struct_fields__]
    old_options = {name: settings.pop(name) for name in option_names if name in settings}
    set_options = {name: value for name, value in old_options.items() if value is not None}
    settings.setdefault("options", set_options)


def _round(columns: sqlite3.Row, later: list[str]) -> tuple[float, Round]:
    """Read at_s and the round from `_ROUND_COLUMNS` and the columns of later formats."""
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
