"""The size, titles, colours and markers of the report's plots."""

import math
import re
from collections.abc import Iterable, Sequence
from textwrap import fill

from pilotfish.lab.drawing import MARKERS, PALETTE, escape_math
from pilotfish.lab.statistics import Spread

# width of a plot (inches); equals 360 CSS pixels, so that a phone does not shrink letters
WIDTH = 3.75
MOST_SERIES = 14  # lines in a picture; a run without varied options has at most this many
MOST_ROWS = 28  # rows in a picture
_LEGEND_LINE = 0.17  # height of a line of the legend (inches)
_TITLE_LETTERS = 42
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


def shorten(text: str, letters: int) -> str:
    """Shorten a name to at most ``letters`` letters, so that it fits an axis."""
    return text if len(text) <= letters else text[: letters - 1] + "…"


def legend_shape(labels: Sequence[str]) -> tuple[int, float]:
    """Return the columns of a legend, and the height (inches) that it needs beyond three lines."""
    longest = max(map(len, labels))
    columns = 3 if longest <= 15 else 2 if longest <= 26 else 1
    return columns, _LEGEND_LINE * max(0, math.ceil(len(labels) / columns) - 3)


def title(run: str, finding: str, n: str) -> str:
    """Format a title: the run, the finding and the number of samples, with line breaks."""
    lines = (run, finding, f"({_INNER_SPACE.sub(_NBSP, n)})")
    return escape_math(
        "\n".join(fill(_UNIT_SPACE.sub(_NBSP, line), _TITLE_LETTERS) for line in lines)
    )


def format_counts(counts: Iterable[int], what: str) -> str:
    """Format counts: ``n = 12 answers each``, or a range. what: text that begins with the noun."""
    sizes = sorted(set(counts))
    if sizes[-1] == 1:
        what = re.sub(r"s\b", "", what, count=1)
    span = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
    return f"n = {span} {what}"


def whiskers(spread: Spread) -> list[list[float]] | None:
    """Return the interval for matplotlib: distances below and above the median; None if absent."""
    if spread.low is None or spread.high is None:
        return None
    return [[spread.median - spread.low], [spread.high - spread.median]]
