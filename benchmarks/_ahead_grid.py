"""Tables of `ahead.py` with a cell for each link, drafter and temperature, and their goals."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from _ahead_cells import Cell, Ends, Spread, Texts, measured, options_of, ways
from _common import Goal, Rows, Steps, at_least, at_most

from pilotfish.emulation.emulator import Conditions
from pilotfish.wire.protocols import STREAM

# Of `rtt`, temperature 0: times `stream`, by drafter and RTT in ms.
WANTED = {"int4": {20: 1.55, 50: 1.45}, "int8": {20: 2.4, 50: 2.3, 100: 2.0}}
LEAST, AUTO_LEAST, MODEL_OFF = 0.98, 0.95, 0.10


@dataclass(frozen=True)
class Place:
    """One link, as tables name it; traces begin anew with each answer."""

    name: str
    conditions: Conditions
    traced: bool = False

    @classmethod
    def rtt(cls, ms: float) -> "Place":
        return cls(f"RTT {ms:g}", Conditions(rtt_s=ms * 1e-3))

    @property
    def rtt_ms(self) -> float:
        return round(1e3 * self.conditions.rtt_s, 3)


@dataclass
class Report:
    """What all tables have measured, and what was asked of them."""

    rows: Rows = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    def add(self, rows: Rows, goals: Sequence[Goal] = ()) -> None:
        self.rows += rows
        self.goals += goals


@dataclass(frozen=True)
class Grid:
    """What the cells of a table have in common.

    about: further columns of each cell, as the target's pace.
    """

    table: str
    questions: Sequence[Any]
    tokens: int
    temperatures: Sequence[float]
    windows: Sequence[int]
    protocol: str
    texts: Texts
    steps: Steps
    about: dict[str, Any] = field(default_factory=dict)

    def cells(self, both: Ends, places: Sequence[Place]) -> Rows:
        """Measure all; a row each."""
        rows: Rows = []
        for place in places:
            both.change(place.conditions)
            # a trace begins anew with each answer
            before = partial(both.link.set, place.conditions) if place.traced else _nothing
            for temperature in self.temperatures:
                for name, device in both.devices.items():
                    cell = measured(
                        ways(device, temperature, self.protocol, self.windows),
                        self.questions,
                        temperature=temperature,
                        tokens=self.tokens,
                        steps=self.steps,
                        label=f"{self.table}: {place.name}, {name}, T {temperature:g}",
                        before=before,
                    )
                    rows.append(self._row(place, name, temperature, cell))
        return rows

    def _row(self, place: Place, drafter: str, temperature: float, cell: Cell) -> dict[str, Any]:
        waiting = cell.waiting()
        wait = waiting[0] if waiting else STREAM
        best = max((STREAM, "ahead", wait), key=lambda name: cell.times(name).mid)
        alone = cell.all[STREAM]
        return {
            "table": self.table,
            **self.about,
            "link": place.name,
            "rtt_ms": place.rtt_ms,
            "drafter": drafter,
            "temperature": temperature,
            "prompts": len(alone.answers),
            "stream_ms": 1e3 / Spread.of([alone.rate(at) for at in alone.answers]).mid,
            "ahead": cell.times("ahead")._asdict(),
            "wait": cell.times(wait)._asdict() | {"window": cell.all[wait].way.window},
            "auto": cell.times("auto")._asdict() | {"chose": cell.chosen()},
            "auto_over_best": cell.times("auto", best)._asdict() | {"best": best},
            "forecast": cell.forecast(),
            "a_token": {name: cell.all[name].a_token() for name in (STREAM, "ahead", wait, "auto")},
            "sources": cell.all["ahead"].sources(),
            "texts": self.texts.compared(cell, self.questions, temperature),
        }


def _nothing() -> None:
    """Before an answer over a link that stays as it is."""


def table_rows(rows: Rows, extra: Sequence[str] = ()) -> Rows:
    """The cells as a table for people."""
    results: Rows = []
    for row in rows:
        each = row["a_token"]["ahead"]
        results.append(
            {
                **{name: row[name] for name in extra},
                "link": row["link"],
                "drafter": row["drafter"],
                "T": f"{row['temperature']:g}",
                "stream": f"{row['stream_ms']:.1f} ms",
                "ahead": _times(row["ahead"]),
                "stop-and-wait": f"{_times(row['wait'])} γ {row['wait']['window']}",
                "auto": f"{_times(row['auto'])} {row['auto']['chose']}",
                "auto/best": _times(row["auto_over_best"]),
                "passes, positions, drafts a token": " / ".join(
                    f"{each[name]:.2f}" for name in ("passes", "positions", "drafts")
                ),
                "texts": options_of(row["texts"]),
            }
        )
    return results


def _times(of: dict[str, Any]) -> str:
    return str(Spread(of["mid"], of["low"], of["high"]))


def forecasts(rows: Rows) -> Rows:
    """The model's speed over `stream` beside the clock's, of each cell that has both."""
    results: Rows = []
    for row in rows:
        for way, names in (("ahead", ("ahead",)), ("wait", ("greedy", "coupled"))):
            predicted = max((row["forecast"].get(name, 0.0) for name in names), default=0.0)
            if predicted:
                clock = row[way]["mid"]
                results.append(
                    {
                        "table": f"{row['table']}, model",
                        "link": row["link"],
                        "drafter": row["drafter"],
                        "T": f"{row['temperature']:g}",
                        "way": way,
                        "model": round(predicted, 3),
                        "clock": round(clock, 3),
                        "off": round(predicted / clock - 1.0, 3),
                    }
                )
    return results


def goals(rows: Rows, *, wanted: bool = False, model: bool = False) -> list[Goal]:
    """What cells are to reach. wanted: also `WANTED`; model: also the forecasts."""
    if not rows:
        return []
    table = rows[0]["table"]
    slowest = min(rows, key=lambda row: row["ahead"]["mid"])
    results = [
        at_least(
            f"{table}: ahead over stream, the least cell ({_named(slowest)})",
            slowest["ahead"]["mid"],
            LEAST,
        ),
        at_most(f"{table}: texts that differ", sum(row["texts"]["differ"] for row in rows), 0),
    ]
    for row in rows:
        goal = WANTED.get(row["drafter"], {}).get(row["rtt_ms"])
        if wanted and goal and row["temperature"] == 0.0:
            results.append(at_least(f"{table}: ahead, {_named(row)}", row["ahead"]["mid"], goal))
        auto = row["auto_over_best"]
        noise = (auto["high"] - auto["low"]) / 2  # half of the quartiles' distance
        least = min(AUTO_LEAST, 1.0 - noise)
        if auto["mid"] < least:
            results.append(at_least(f"{table}: auto over {auto['best']}, {_named(row)}",
                                  auto["mid"], round(least, 3)))  # fmt: skip
    if model:
        results += [
            at_most(
                f"{forecast['table']}: {forecast['way']}, {forecast['link']}, off",
                abs(forecast["off"]),
                MODEL_OFF,
            )
            for forecast in forecasts(rows)
        ]
    return results


def _named(row: dict[str, Any]) -> str:
    pace = f"{row['pace']}, " if "pace" in row else ""
    return f"{pace}{row['link']}, {row['drafter']}, T {row['temperature']:g}"
