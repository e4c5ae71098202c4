"""The tables of ``pilotfish field load``."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from rich.table import Table

from pilotfish.lab.field.load.figures import TAIL, Percentiles, PointFigures, capacity
from pilotfish.lab.statistics import FEWEST_VALUES

_Column: TypeAlias = tuple[str, str, Callable[[PointFigures], float | None]]
_SPEED: tuple[_Column, ...] = (
    ("devices", "d", lambda f: f.devices),
    ("n", "d", lambda f: f.n),
    ("tokens/s", ".1f", lambda f: f.tokens_per_s),
    ("first, ms", ".0f", lambda f: _of(f.first_token_ms, "p50")),
    (f"p{TAIL}", ".0f", lambda f: _of(f.first_token_ms, "p90")),
    ("a token, ms", ".1f", lambda f: _of(f.token_ms, "p50")),
    (f"p{TAIL}", ".1f", lambda f: _of(f.token_ms, "p90")),
)
_EDGE: tuple[_Column, ...] = (
    ("devices", "d", lambda f: f.devices),
    ("edge, ms", ".1f", lambda f: f.edge_ms),
    ("CPU, ms", ".1f", lambda f: f.edge_cpu_ms),
    ("tokens a round", ".2f", lambda f: f.tokens_per_round),
    ("failed", "d", lambda f: f.failed),
    ("different", "d", lambda f: f.different),
)
_SPEED_CAPTION = (
    "n: answers; tokens/s: of all devices; first: time to the first token; –: fewer than "
    f"{FEWEST_VALUES} answers, or a point that ended early"
)
_EDGE_CAPTION = (
    "edge: the target's passes per token, as the edge announced them to each device; CPU: of the "
    "edge per token, if it runs here and the point did not end early; different: answers that are "
    "not the recorded ones"
)

_CAPACITY_CAPTION = (
    "the largest measured number at which 9 of 10 answers hold the limit; ≥: perhaps more"
)


def points_tables(measured: Sequence[PointFigures]) -> Iterator[Table]:
    """Yield two tables with a row for each point: the speed, and the edge's work."""
    yield _table(measured, _SPEED, _SPEED_CAPTION)
    yield _table(measured, _EDGE, _EDGE_CAPTION)


def _table(measured: Sequence[PointFigures], columns: Sequence[_Column], caption: str) -> Table:
    table = Table(caption=caption)
    table.add_column("")
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for each in measured:
        table.add_row(each.method, *(_number(value(each), form) for _, form, value in columns))
    return table


def capacity_table(measured: Sequence[PointFigures], limit_s: float) -> Table:
    """Return a table with the number of devices that the edge carries in each method."""
    table = Table(caption=_CAPACITY_CAPTION)
    table.add_column("")
    table.add_column(f"devices at {limit_s * 1e3:g} ms a token", justify="right")
    for method in dict.fromkeys(each.method for each in measured):
        table.add_row(method, str(capacity(method, measured, limit_s)))
    return table


def _of(percentiles: Percentiles | None, name: str) -> float | None:
    return None if percentiles is None else float(getattr(percentiles, name))


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
