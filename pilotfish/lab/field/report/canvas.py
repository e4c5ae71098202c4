"""The size, titles, colours and markers of the report's plots."""

import re
from collections.abc import Iterable
from textwrap import fill

from pilotfish.lab.drawing import MARKERS, PALETTE, escape_math
from pilotfish.lab.statistics import Spread

# width of a plot (inches); equals 360 CSS pixels, so that a phone does not shrink letters
WIDTH = 3.75
_TITLE_LETTERS = 42
_NBSP = "\N{NO-BREAK SPACE}"
_INNER_SPACE = re.compile(r"(?<!;) ")  # a space inside one part of "n = …; …"
_UNIT_SPACE = re.compile(r"(?<=\d) (?=%|ms)")


class PlotStyle:
    """The colour and marker of each protocol, which are the same in all plots of a report."""

    def __init__(self, protocols: Iterable[str]) -> None:
        self._order = list(dict.fromkeys(protocols))

    def colour_of(self, protocol: str) -> str:
        """Return the protocol's colour."""
        return PALETTE[self._order.index(protocol) % len(PALETTE)]

    def marker_of(self, protocol: str) -> str:
        """Return the protocol's marker; protocols with the same colour have different markers."""
        index = self._order.index(protocol)
        return MARKERS[(index + index // len(PALETTE)) % len(MARKERS)]


def shorten(text: str, letters: int) -> str:
    """Shorten a name to at most ``letters`` letters, so that it fits an axis."""
    return text if len(text) <= letters else text[: letters - 1] + "…"


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
