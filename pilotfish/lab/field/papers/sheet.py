"""The constants and tables that a paper's command prints, in a terminal or as JSON.

`Constant.whose` names the source of a number: "paper" if the paper prints the number, "ours" if we
chose it because the paper does not print it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Literal, TypeAlias

import numpy as np
from rich import box
from rich.table import Table

from pilotfish.lab.field.resampling import Floats, estimate

Value: TypeAlias = str | int | float | bool | None
Row: TypeAlias = Mapping[str, Value]
"""The values of a table's row, by the keys of the columns."""


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

    def table(self) -> Table:
        """Make the table for a terminal, without title and note, which may be wider."""
        table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
        for heading, decimals in self.columns.values():
            justify: Literal["left", "right"] = "left" if decimals is None else "right"
            table.add_column(heading, justify=justify, overflow="fold")
        for row in filter(self.in_terminal, self.rows):
            cells = ((row[key], decimals) for key, (_, decimals) in self.columns.items())
            table.add_row(*(_cell(value, decimals) for value, decimals in cells))
        return table


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


def _cell(value: Value, decimals: int | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and decimals is not None:
        # adding 0.0 turns −0.0 into 0.0, which has no minus sign
        return f"{round(value, decimals) + 0.0:,.{decimals}f}"
    return f"{value:,}" if isinstance(value, int) else f"{value}"
