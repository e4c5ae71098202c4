"""The size, titles, colours and markers of the report's plots, and how many points a plot needs.

Each plot is drawn twice: as wide as the page, and for a phone, whose letters would otherwise be
too small. `select` owns the rule that nothing is drawn of fewer than `FEW` points.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from pilotfish.lab.drawing import MARKERS, PALETTE, Axes, escape_math, panels
from pilotfish.lab.page import Picture
from pilotfish.lab.statistics import FEWEST_VALUES, Spread

FEW = FEWEST_VALUES  # answers, rounds or samples
# widths of a plot (inches): as the page, and equal to 360 CSS pixels, so that a phone does not
# shrink letters
WIDE, NARROW = 10.0, 3.75
MOST_SERIES = 14  # lines in a picture; a run without varied options has at most this many
MOST_ROWS = 28  # rows in a picture
ROW = 0.27  # height of a row (inches)
_LEGEND_LINE = 0.17  # height of a line of the legend (inches)
_TITLE_LETTERS = {True: 112, False: 42}  # letters of a title's line, by whether the plot is wide
_NBSP = "\N{NO-BREAK SPACE}"
_INNER_SPACE = re.compile(r"(?<!;) ")  # a space inside one part of "n = …; …"
_UNIT_SPACE = re.compile(r"(?<=\d) (?=%|ms)")


class PlotStyle:
    """The colour and marker of each protocol or series, the same in all plots of a report."""

    def __init__(self, labels: Iterable[str]) -> None:
        self._order = list(dict.fromkeys(labels))

    def colour_of(self, label: str) -> str:
        """Return the colour of a protocol or series."""
        return PALETTE[self._order.index(label) % len(PALETTE)]

    def marker_of(self, label: str) -> str:
        """Return its marker; those with the same colour have different markers."""
        index = self._order.index(label)
        return MARKERS[(index + index // len(PALETTE)) % len(MARKERS)]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The lines of a plot that have enough points, and the numbers of points of the others."""

    drawn: list[str]
    few: dict[str, int]


def select(points: Mapping[str, int]) -> Selection:
    """Select the lines to draw. points: number of points of each line, by its label.

    A plot of medians or means has one entry, its number of answers or rounds: intervals tell how
    sure a median is. Each line of a distribution, of shares or over time needs enough points.
    """
    return Selection(
        drawn=[label for label, number in points.items() if number >= FEW],
        few={label: number for label, number in points.items() if number < FEW},
    )


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot that is not drawn yet.

    run: name of the run, or what is compared. what: name of the plot, for a sentence. finding, n:
    the rest of the title. selection: lines to draw, counted in ``unit``. xlabel: one label, or one
    for each of ``ylabels``. heights: inches of the wide and of the narrow picture. paint: draws
    into the axes, one for each of ``ylabels``, and knows whether the picture is wide. side_by_side:
    whether the axes of the wide picture are side by side. alt: the plot in words.
    """

    run: str
    what: str
    finding: str
    n: str
    selection: Selection
    unit: str
    xlabel: str | Sequence[str]
    ylabels: Sequence[str]
    heights: tuple[float, float]
    paint: Callable[[list[Axes], bool], None]
    alt: str
    side_by_side: bool = False


def few_only(run: str, what: str, selection: Selection, unit: str) -> Plot:
    """Return a plot of which no line has enough points; `draw` says so in words."""
    assert not selection.drawn
    return Plot(
        run=run,
        what=what,
        finding="",
        n="",
        selection=selection,
        unit=unit,
        xlabel="",
        ylabels=[],
        heights=(0.0, 0.0),
        paint=lambda *_: None,
        alt="",
    )


def draw(plot: Plot, path: Path) -> Picture | None:
    """Draw the two pictures of a plot; None if it has no line with enough points."""
    if not plot.selection.drawn:
        return None
    narrow = path.with_name(f"{path.stem}-narrow{path.suffix}")
    for at, wide, width, height in (
        (path, True, WIDE, plot.heights[0]),
        (narrow, False, NARROW, plot.heights[1]),
    ):
        heading = title(plot.run, plot.finding, plot.n, wide=wide)
        inches = (width, height)
        side_by_side = plot.side_by_side and wide
        with panels(
            at, heading, plot.xlabel, plot.ylabels, inches, side_by_side=side_by_side
        ) as axes:
            plot.paint(axes, wide)
    return Picture(path=path, alt=f"{plot.alt}; {plot.finding} ({plot.n}).", narrow=narrow)


def left_out(plot: Plot) -> str | None:
    """Return the sentence on what is not drawn and why; None if everything is drawn."""
    few = plot.selection.few
    if not few:
        return None
    if "" in few:
        why = f"not drawn, because there are only {few['']} {plot.unit}; a picture needs {FEW}"
    else:
        counts = ", ".join(f"{label} ({number} {plot.unit})" for label, number in few.items())
        why = f"not drawn for {counts}; a line needs {FEW}"
    return f"{plot.run}: {plot.what}: {why}."


def shorten(text: str, letters: int) -> str:
    """Shorten a name to at most ``letters`` letters, so that it fits an axis."""
    return text if len(text) <= letters else text[: letters - 1] + "…"


def legend_shape(labels: Sequence[str], wide: bool = False) -> tuple[int, float]:
    """Return the columns of a legend, and the height (inches) that it needs beyond three lines."""
    longest = max(map(len, labels))
    columns = 3 if longest <= 15 else 2 if longest <= 26 else 1
    if wide:
        columns *= 3
    return columns, _LEGEND_LINE * max(0, math.ceil(len(labels) / columns) - 3)


def title(run: str, finding: str, n: str, *, wide: bool = False) -> str:
    """Format a title: the run, the finding and the number of samples, with line breaks."""
    counts = f"({_INNER_SPACE.sub(_NBSP, n)})"
    lines = (f"{run}: {finding} {counts}",) if wide else (run, finding, counts)
    return escape_math(
        "\n".join(fill(_UNIT_SPACE.sub(_NBSP, line), _TITLE_LETTERS[wide]) for line in lines)
    )


def count(number: int, noun: str) -> str:
    """Format a number of things: ``1 outage``, ``1,200 answers``; noun: in the singular."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_counts(counts: Iterable[int], what: str) -> str:
    """Format counts: ``n = 12 answers each``, or a range. what: text that begins with the noun."""
    sizes = sorted(set(counts))
    if sizes[-1] == 1:
        what = re.sub(r"s\b", "", what, count=1)
    span = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,}–{sizes[-1]:,}"
    return f"n = {span} {what}"


def whiskers(spread: Spread) -> list[list[float]] | None:
    """Return the interval for matplotlib: distances below and above the median; None if absent."""
    if spread.low is None or spread.high is None:
        return None
    return [[spread.median - spread.low], [spread.high - spread.median]]
