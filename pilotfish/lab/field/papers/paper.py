"""`Paper`: what the command of one paper shows and measures."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pilotfish.lab.field.papers.figure import Figure
from pilotfish.lab.field.papers.sheet import Constant, Sheet


@dataclass(frozen=True)
class Paper:
    """A paper's command: constants, tables, remarks (for example on misprints) and plots.

    sheets: function that computes the tables of the closed forms. measurable: the figures and
    tables that this machine can measure. drafter: name of the drafter with which the package's
    measurements are made, `default` or `default-28`; their target is always `default`. head: name
    of their decision head, if they need one.
    """

    title: str
    constants: Sequence[Constant]
    sheets: Callable[[], Sequence[Sheet]]
    remarks: Sequence[str]
    draw: Callable[[Path], Sequence[Path]]
    measurable: Sequence[Figure] = ()
    drafter: str = "default"
    head: str | None = None

    def constants_sheet(self) -> Sheet:
        """Make a table of the constants."""
        columns: dict[str, tuple[str, int | None]] = {
            "name": ("constant", None),
            "value": ("value", None),
            "unit": ("unit", None),
            "whose": ("whose", None),
            "why": ("why", None),
        }
        return Sheet("constants", "Constants", columns, [asdict(c) for c in self.constants])
