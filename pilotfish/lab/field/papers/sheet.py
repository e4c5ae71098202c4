"""The constants and tables that a paper's command prints, in a terminal or as JSON.

`Constant.whose` names the source of a number: "paper" if the paper prints the number, "ours" if we
chose it because the paper does not print it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Literal, TypeAlias

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from pilotfish.lab.field.resampling import Floats, estimate

Value: TypeAlias = str | int | float | bool | None
Row: TypeAlias = Mapping[str, Value]
"""The values of a table's row, by the keys of the columns."""
_MANY = 6  # rows, from which a column of equal values is named below the table
_SHORT = 10  # characters of a text that a narrow terminal does not break
_UNBOUNDED = 10_000


@dataclass(frozen=True)
class Constant:
    """A number that the tables use. whose: source of the number. why: remark on the number."""

    name: str
    value: Value
    unit: str
    whose: Literal["paper", "ours"]
    why: str


@dataclass(frozen=True)
class Sheet:
    """A table of a paper's command.

    columns: heading and number of decimals of each column, by JSON key. in_terminal: function that
    returns whether a terminal shows a row. JSON has all rows, with unrounded numbers.
    """

    key: str
    title: str
    columns: Mapping[str, tuple[str, int | None]]
    rows: Sequence[Row]
    note: str = ""
    in_terminal: Callable[[Row], bool] = lambda row: True

    def table(self, width: int) -> Table:
        """Make the table for a terminal of this width, without title and note.

        A column that has the same value in all of many rows is named below the table instead, and
        a text that the first column repeats is shown once. If the table is too wide, its 95 %
        intervals are left out, and the line below it says so; then headings have several lines.
        Numbers and short texts are never broken, so the table may still be wider.
        """
        measuring = Console(width=_UNBOUNDED)
        table = self._tabulated(with_intervals=True)
        if measuring.measure(table).maximum > width and self._has_intervals:
            table = self._tabulated(with_intervals=False)
        if measuring.measure(table).minimum > width:
            table = self._tabulated(with_intervals=not self._has_intervals, in_lines=True)
        return table

    def print(self, console: Console) -> None:
        """Print the table and an empty line; a console that is too narrow breaks the lines."""
        table = self.table(console.width)
        least = Console(width=_UNBOUNDED).measure(table).minimum
        width = max(console.width, least)
        Console(file=console.file, width=width, highlight=False).print(table, "")

    @property
    def _has_intervals(self) -> bool:
        return any(_is_interval(key, self.columns) for key in self.columns)

    def _tabulated(self, *, with_intervals: bool, in_lines: bool = False) -> Table:
        """Make the table. in_lines: each word of a number's heading has a line of its own."""
        visible = list(filter(self.in_terminal, self.rows))
        constant = self._constant_columns(visible) if len(visible) >= _MANY else {}
        below = [f"{heading} {value}" for heading, value in constant.values()]
        if self._has_intervals and not with_intervals:
            below.append("95 % intervals: in a wider terminal, or by --json -")
        table = Table(
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
            show_edge=False,
            caption="; ".join(below) or None,
            caption_justify="left",
        )
        columns = {
            key: column
            for key, column in self.columns.items()
            if key not in constant
            and not key.endswith("_high")
            and (with_intervals or not _is_interval(key, self.columns))
        }
        for key, (heading, decimals) in columns.items():
            justify: Literal["left", "right"] = "left" if decimals is None else "right"
            longest = max(len(self._cell(row, key)) for row in visible) if visible else 0
            is_whole = decimals is not None or longest <= _SHORT
            title = heading.replace(" ", "\n") if in_lines and decimals is not None else heading
            least = max(map(len, title.split("\n"))) if is_whole else _SHORT
            table.add_column(
                title,
                justify=justify,
                overflow="fold",
                no_wrap=is_whole,
                min_width=max(least, longest) if is_whole else least,
            )
        above = ""
        for row in visible:
            first, *others = (self._cell(row, key) for key in columns)
            is_repeated = first == above and next(iter(columns.values()))[1] is None
            table.add_row("" if is_repeated else first, *others)
            above = first
        return table

    def _constant_columns(self, rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
        """Return heading and cell of the number columns that are the same in all rows."""
        return {
            key: (heading, _cell(rows[0][key], decimals))
            for key, (heading, decimals) in self.columns.items()
            if decimals is not None
            and not key.endswith(("_low", "_high"))
            and f"{key}_low" not in self.columns
            and rows[0][key] is not None
            and len({row[key] for row in rows}) == 1
        }

    def _cell(self, row: Row, key: str) -> str:
        """Format a cell; the cell of an interval has both of its bounds."""
        decimals = self.columns[key][1]
        cell = _cell(row[key], decimals)
        if not _is_interval(key, self.columns) or row[key] is None:
            return cell
        high = key.removesuffix("_low") + "_high"
        return f"{cell}…{_cell(row[high], decimals)}"


def round_as_printed(value: float, decimals: int) -> float:
    """Round half away from zero, as printed tables do.

    The value is first rounded to 9 decimals, which removes floating-point noise from decimal ties
    such as 27.875.
    """
    unit = Decimal(1).scaleb(-decimals)
    return float(Decimal(repr(round(value, 9))).quantize(unit, ROUND_HALF_UP))


def interval_columns(name: str, heading: str, decimals: int) -> dict[str, tuple[str, int | None]]:
    """Return the columns of a value and of its 95 % interval, ``<name>_low`` to ``<name>_high``."""
    return {
        name: (heading, decimals),
        f"{name}_low": ("95 %", decimals),
        f"{name}_high": ("", decimals),
    }


def interval(name: str, values: Floats) -> dict[str, Value]:
    """Return the cells of a statistic and of its 95 % interval, for `interval_columns`.

    values: as in `estimate`; infinite values count as missing.
    """
    value = estimate(np.where(np.isfinite(values), values, np.nan))
    return {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}


def number(row: Row, key: str) -> float:
    """Return the cell of a row in the column ``key``, as a float."""
    return float(str(row[key]))


def _is_interval(key: str, columns: Collection[str]) -> bool:
    """Whether the key is that of a lower bound whose upper bound is another column."""
    return key.endswith("_low") and key.removesuffix("_low") + "_high" in columns


def _cell(value: Value, decimals: int | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and decimals is not None:
        # adding 0.0 turns −0.0 into 0.0, which has no minus sign
        return f"{round(value, decimals) + 0.0:,.{decimals}f}"
    return f"{value:,}" if isinstance(value, int) else f"{value}"
