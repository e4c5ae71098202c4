"""`Figure`: a figure or table of a paper that a command measures on this machine's pair.

A figure declares its columns, the paper's own numbers, and a function that measures its rows.
`field.papers.figure_run` measures a figure and stores its rows, `field.papers.figure_file` reads
them, and `comparison` puts them beside the numbers that the paper prints.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TypeAlias

from pilotfish.base.errors import PairMismatchError, UnsupportedError
from pilotfish.lab.field.papers.judged import Judge
from pilotfish.lab.field.papers.sheet import Row, Sheet, Value
from pilotfish.lab.pairs import OpenPair

Identity: TypeAlias = tuple[Value, ...]
"""The values of a row in the columns that identify it."""
Report: TypeAlias = Callable[[str, int, "int | None"], None]
_PROMPTS = "prompts.txt"


def default_prompts() -> tuple[str, ...]:
    """Return the prompts with which the shipped figures were measured."""
    text = (resources.files(__package__) / _PROMPTS).read_text("utf-8")
    return tuple(line for line in text.splitlines() if line)


def _report_nothing(label: str, done: int, total: int | None) -> None:
    """Report no progress."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every measurement needs: a pair, prompts, a seed.

    pair: drafter and target, opened; ``pair.paths`` are their folders. seed: prompt p is answered
    with the seed plus p. threads: CPU threads of a pass; None: one per core. report: function that
    shows progress, called with the label of a stage, the number of finished steps, and the number
    of all steps (None if it is unknown). workers: function that returns the artifacts of further
    workers of a federation; each is an experiment of its own beside the target. judge: a decision
    head and its questions, whose texts are then the prompts.
    """

    pair: OpenPair
    prompts: Sequence[str] = field(default_factory=default_prompts)
    seed: int = 0
    threads: int | None = None
    report: Report = _report_nothing
    workers: Callable[[], Sequence[Path]] = tuple
    judge: Judge | None = None

    def expect_judge(self) -> Judge:
        """Return the judge; raise `UnsupportedError` if the bench has none."""
        if self.judge is None:
            raise UnsupportedError("This figure needs a decision head: name it by --head.")
        return self.judge

    def expect_common_vocabulary(self) -> None:
        """Raise `PairMismatchError` unless drafter and target have the same tokens.

        A figure that compares their distributions needs it.
        """
        if not self.pair.vocabularies.trivial:
            raise PairMismatchError(
                "This figure compares the distributions of drafter and target token by token, but "
                "they have different vocabularies: name a drafter with the target's vocabulary."
            )


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure or table of a paper, and how to measure it.

    key: name in the command ("figure4", "table2"). columns: heading and number of decimals of each
    column, by key, as in `Sheet`. identity: the columns that identify a row. printed: the rows that
    the paper prints, with the identifying columns and columns of their own (``mass_printed``);
    empty if the paper prints no numbers. measure: function that yields each row as soon as it is
    measured, and skips the rows whose identities are in its second argument. Each row states n, the
    number of prompts; n is at least 30, or the row has an interval (``mass_low``, ``mass_high``).
    minutes: duration on two CPU cores. draw: function that draws measured rows into a folder, and
    returns the pictures' paths.
    """

    key: str
    title: str
    columns: Mapping[str, tuple[str, int | None]]
    identity: tuple[str, ...]
    measure: Callable[[Bench, Container[Identity]], Iterator[Row]]
    minutes: float
    printed: Callable[[], Sequence[Row]] = tuple
    draw: Callable[[Sequence[Row], Path], Sequence[Path]] | None = None
    note: str = ""

    @property
    def sheet_key(self) -> str:
        """The key of the comparison in JSON."""
        return f"{self.key}_measured"

    def identify(self, row: Row) -> Identity:
        """Return the values that identify a row."""
        return tuple(row[column] for column in self.identity)

    def comparison(self, measured: Sequence[Row], source: str) -> Sheet:
        """Make a table of measured rows beside the printed ones.

        source: sentences about the origin of the measured rows. Printed rows without a measured row
        are at the end.
        """
        printed = {self.identify(row): row for row in self.printed()}
        rows: list[Row] = [{**printed.pop(self.identify(row), {}), **row} for row in measured]
        whole = [{**dict.fromkeys(self.columns), **row} for row in (*rows, *printed.values())]
        note = " ".join(filter(None, (self.note, source)))
        return Sheet(self.sheet_key, self.title, self.columns, whole, note)
