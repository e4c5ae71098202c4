"""Constants and tables of a paper's command, for a terminal and as JSON.

`Constant.whose` names the source of a number: "paper" if the paper prints it, "ours" if we chose
it because the paper does not.
"""

import csv
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import ROUND_HALF_UP, Decimal
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich import box
from rich.table import Table

Value: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True)
class Constant:
    """A number used by the tables. whose: its source. why: a remark on it."""

    name: str
    value: Value
    unit: str
    whose: Literal["paper", "ours"]
    why: str


@dataclass(frozen=True)
class Sheet:
    """A table.

    columns: heading and decimals of a column, by its JSON key. in_terminal: whether a terminal
    shows a row; JSON has all rows, with unrounded numbers.
    """

    key: str
    title: str
    columns: Mapping[str, tuple[str, int | None]]
    rows: Sequence[Mapping[str, Value]]
    note: str = ""
    in_terminal: Callable[[Mapping[str, Value]], bool] = lambda row: True

    def table(self) -> Table:
        """Make the terminal's table; title and note are printed apart, since they may be wider."""
        table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
        for heading, decimals in self.columns.values():
            justify: Literal["left", "right"] = "left" if decimals is None else "right"
            table.add_column(heading, justify=justify, overflow="fold")
        for row in filter(self.in_terminal, self.rows):
            cells = ((row[key], decimals) for key, (_, decimals) in self.columns.items())
            table.add_row(*(_cell(value, decimals) for value, decimals in cells))
        return table


@dataclass(frozen=True)
class Paper:
    """One paper: its constants, tables, remarks (misprints among them) and plots."""

    title: str
    constants: Sequence[Constant]
    sheets: Callable[[], Sequence[Sheet]]
    remarks: Sequence[str]
    draw: Callable[[Path], Sequence[Path]]

    def figures(self) -> dict[str, Any]:
        """Return all but the pictures, ready for JSON; the rows of a table are under its key."""
        tables = {sheet.key: [dict(row) for row in sheet.rows] for sheet in self.sheets()}
        return {
            "paper": self.title,
            "constants": [asdict(constant) for constant in self.constants],
            **tables,
            "remarks": list(self.remarks),
        }

    def constants_sheet(self) -> Sheet:
        """Tabulate the constants."""
        columns: dict[str, tuple[str, int | None]] = {
            "name": ("constant", None),
            "value": ("value", None),
            "unit": ("unit", None),
            "whose": ("whose", None),
            "why": ("why", None),
        }
        return Sheet("constants", "Constants", columns, [asdict(c) for c in self.constants])


def round_as_printed(value: float, decimals: int) -> float:
    """Round as a printed table does: halves away from zero.

    Rounding to 9 decimals first removes floating-point noise from decimal ties (27.875 ms).
    """
    unit = Decimal(1).scaleb(-decimals)
    return float(Decimal(repr(round(value, 9))).quantize(unit, ROUND_HALF_UP))


def read_measurements(file: str, whole: Collection[str]) -> list[dict[str, Value]]:
    """Read the rows of a CSV file in this folder.

    whole: columns of integers; other cells are floats, and an empty cell is None.
    """
    text = (resources.files(__package__) / file).read_text("utf-8")
    return [
        {
            key: None if cell == "" else int(cell) if key in whole else float(cell)
            for key, cell in row.items()
        }
        for row in csv.DictReader(text.splitlines())
    ]


def number(row: Mapping[str, Value], key: str) -> float:
    """Return the cell ``key`` as a float."""
    return float(str(row[key]))


def _cell(value: Value, decimals: int | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and decimals is not None:
        return f"{round(value, decimals) + 0.0:,.{decimals}f}"  # + 0.0: no minus before a 0
    return f"{value:,}" if isinstance(value, int) else f"{value}"
