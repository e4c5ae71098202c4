"""What a paper's command shows: constants and tables, for people and as JSON.

Every number says whose it is: `Constant.whose` is "paper" where the paper prints it and "ours"
where it does not and we had to choose.
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
    """A number that the tables rest on."""

    name: str
    value: Value
    unit: str
    whose: Literal["paper", "ours"]
    why: str


@dataclass(frozen=True)
class Sheet:
    """A table: ``columns`` maps the key of a cell, as in JSON, to its heading and decimals.

    Decimals are for the eye; JSON has the numbers as they are in ``rows``, and rows that ``shown``
    leaves out of a terminal.
    """

    key: str
    title: str
    columns: Mapping[str, tuple[str, int | None]]
    rows: Sequence[Mapping[str, Value]]
    note: str = ""
    shown: Callable[[Mapping[str, Value]], bool] = lambda row: True

    def table(self) -> Table:
        """For a terminal; title and note stand outside, where they may be wider than it."""
        table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
        for heading, decimals in self.columns.values():
            justify: Literal["left", "right"] = "left" if decimals is None else "right"
            table.add_column(heading, justify=justify, overflow="fold")
        for row in filter(self.shown, self.rows):
            cells = ((row[key], decimals) for key, (_, decimals) in self.columns.items())
            table.add_row(*(_cell(value, decimals) for value, decimals in cells))
        return table


@dataclass(frozen=True)
class Paper:
    """One paper: what it rests on, what follows, what it misprints, and how it is drawn."""

    title: str
    constants: Sequence[Constant]
    sheets: Callable[[], Sequence[Sheet]]
    remarks: Sequence[str]
    draw: Callable[[Path], Sequence[Path]]

    def figures(self) -> dict[str, Any]:
        """Everything but the pictures, ready for JSON; a list of rows under each table's key."""
        tables = {sheet.key: [dict(row) for row in sheet.rows] for sheet in self.sheets()}
        return {
            "paper": self.title,
            "constants": [asdict(constant) for constant in self.constants],
            **tables,
            "remarks": list(self.remarks),
        }

    def constants_sheet(self) -> Sheet:
        """The constants as a table of their own."""
        columns: dict[str, tuple[str, int | None]] = {
            "name": ("constant", None),
            "value": ("value", None),
            "unit": ("unit", None),
            "whose": ("whose", None),
            "why": ("why", None),
        }
        return Sheet("constants", "Constants", columns, [asdict(c) for c in self.constants])


def printed(value: float, decimals: int) -> float:
    """Rounded as a printed table is: halves away from zero.

    What floating point adds to a decimal tie (27.875 ms) is taken off first.
    """
    unit = Decimal(1).scaleb(-decimals)
    return float(Decimal(repr(round(value, 9))).quantize(unit, ROUND_HALF_UP))


def measurements(file: str, whole: Collection[str]) -> list[dict[str, Value]]:
    """Rows of a CSV file beside this one: ``whole`` columns are integers, an empty cell is None."""
    text = (resources.files(__package__) / file).read_text("utf-8")
    return [
        {
            key: None if cell == "" else int(cell) if key in whole else float(cell)
            for key, cell in row.items()
        }
        for row in csv.DictReader(text.splitlines())
    ]


def number(row: Mapping[str, Value], key: str) -> float:
    """A cell that holds a number."""
    return float(str(row[key]))


def _cell(value: Value, decimals: int | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and decimals is not None:
        return f"{round(value, decimals) + 0.0:,.{decimals}f}"  # + 0.0: no minus before a 0
    return f"{value:,}" if isinstance(value, int) else f"{value}"
