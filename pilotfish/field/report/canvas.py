"""What the report's plots share: size, titles, legends, colours and markers."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from pilotfish.field.drawing import MARKERS, PALETTE, Axes
from pilotfish.field.report.statistics import Spread

WIDTH = 3.75  # inches: at a phone's 360 CSS pixels the letters keep their size
_TITLE_LETTERS = 42
_NBSP = "\N{NO-BREAK SPACE}"
_together = re.compile(r"(?<!;) ")  # within one statement of n
_unit = re.compile(r"(?<=\d) (?=%|ms)")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A plot as a file, and its description in words with units and counts."""

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
        """Return a marker; protocols that share a colour differ in it."""
        at = self._order.index(protocol)
        return MARKERS[(at + at // len(PALETTE)) % len(MARKERS)]


def plain(text: str) -> str:
    """Escape text from a file, so that no letter of it is taken for a formula."""
    return text.replace("$", r"\$")


def shorten(text: str, letters: int) -> str:
    """Shorten a name to fit beside an axis."""
    return text if len(text) <= letters else text[: letters - 1] + "…"


def title(run: str, finding: str, n: str) -> str:
    """Format a title: the run, the finding, the number of samples, in lines that fit."""
    lines = (run, finding, f"({_together.sub(_NBSP, n)})")
    return plain("\n".join(fill(_unit.sub(_NBSP, line), _TITLE_LETTERS) for line in lines))


def format_counts(counts: Iterable[int], what: str) -> str:
    """Format ``n = 12 answers each``, or a range; ``what`` begins with a plural."""
    sizes = sorted(set(counts))
    if sizes[-1] == 1:
        what = re.sub(r"s\b", "", what, count=1)
    span = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
    return f"n = {span} {what}"


def legend_below(axes: Axes, columns: int = 3) -> None:
    """Put the legend under the axes, where it hides nothing."""
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(loc="outside lower center", ncols=columns, handletextpad=0.4, columnspacing=1.0)


def whiskers(spread: Spread) -> list[list[float]] | None:
    """Return the interval for matplotlib: below and above the median; None without one."""
    if spread.low is None or spread.high is None:
        return None
    return [[spread.median - spread.low], [spread.high - spread.median]]
