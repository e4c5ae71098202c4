"""Size, titles, legends, colours and markers of the report's plots."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from pilotfish.field.drawing import MARKERS, PALETTE, Axes
from pilotfish.field.report.statistics import Spread

WIDTH = 3.75  # inches; on a phone, 360 CSS pixels wide, letters keep their size
_TITLE_LETTERS = 42
_NBSP = "\N{NO-BREAK SPACE}"
_INNER_SPACE = re.compile(r"(?<!;) ")  # within one part of "n = …; …"
_UNIT_SPACE = re.compile(r"(?<=\d) (?=%|ms)")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A plot's file. alt: its description in words, with units and counts."""

    path: Path
    alt: str


class PlotStyle:
    """Colour and marker of every protocol, the same in all plots of a report."""

    def __init__(self, protocols: Iterable[str]) -> None:
        self._order = list(dict.fromkeys(protocols))

    def colour_of(self, protocol: str) -> str:
        """Return a colour of the palette."""
        return PALETTE[self._order.index(protocol) % len(PALETTE)]

    def marker_of(self, protocol: str) -> str:
        """Return a marker; protocols of the same colour have different markers."""
        index = self._order.index(protocol)
        return MARKERS[(index + index // len(PALETTE)) % len(MARKERS)]


def escape_math(text: str) -> str:
    """Escape text from a file, so that matplotlib reads no formula in it."""
    return text.replace("$", r"\$")


def shorten(text: str, letters: int) -> str:
    """Shorten a name to ``letters`` letters, so that it fits an axis."""
    return text if len(text) <= letters else text[: letters - 1] + "…"


def title(run: str, finding: str, n: str) -> str:
    """Format a title: the run, the finding, the number of samples, wrapped to the width."""
    lines = (run, finding, f"({_INNER_SPACE.sub(_NBSP, n)})")
    return escape_math(
        "\n".join(fill(_UNIT_SPACE.sub(_NBSP, line), _TITLE_LETTERS) for line in lines)
    )


def format_counts(counts: Iterable[int], what: str) -> str:
    """Format ``n = 12 answers each``, or a range. what: begins with a plural noun."""
    sizes = sorted(set(counts))
    if sizes[-1] == 1:
        what = re.sub(r"s\b", "", what, count=1)
    span = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
    return f"n = {span} {what}"


def legend_below(axes: Axes, columns: int = 3) -> None:
    """Put the legend below the axes, where it hides nothing."""
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(loc="outside lower center", ncols=columns, handletextpad=0.4, columnspacing=1.0)


def whiskers(spread: Spread) -> list[list[float]] | None:
    """Return the distances below and above the median, as matplotlib wants; None without."""
    if spread.low is None or spread.high is None:
        return None
    return [[spread.median - spread.low], [spread.high - spread.median]]
