"""Draw a recorded terminal as an SVG that plays by itself, without any script in it.

Each text appears when it was written. Where nothing moves (a reader who asked for less motion, a
program that shows only still pictures) the whole text stands there at once.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from _terminal import Cell, Recording

_WIDTH, _HEIGHT = 8.4, 19.0  # a character's width and a line's height, in the picture's units
_MARGIN, _BAR = 18.0, 34.0
_STEP_S = 0.05  # texts of the same twentieth of a second appear together
_PAUSE_S = 3.0  # the end stands for a while before it begins again
_STYLE = """\
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;\
fill:#e6edf3;white-space:pre}
.frame{fill:#0d1117;stroke:#30363d}
.green{fill:#56d364}.yellow{fill:#e3b341}.cyan{fill:#56d4dd}.magenta{fill:#f778ba}
.red{fill:#ff7b72}.blue{fill:#79c0ff}.dim{opacity:.65}.bold{font-weight:bold}
.bar{fill:#8b949e}.up{fill:#56d364}.down{fill:#ff7b72}
"""


class Phase(NamedTuple):
    """What the line below the terminal says from ``at_s`` on; name: its class of style."""

    at_s: float
    name: str
    words: str


def draw(recording: Recording, phases: Sequence[Phase], title: str, *, slower: float) -> str:
    """Return the SVG. slower: a second of the recording takes this many seconds."""
    last_s = max(cell.at_s for line in recording.lines for cell in line.values())
    length_s = last_s * slower + _PAUSE_S
    lines = len(recording.lines)
    width = recording.columns * _WIDTH + 2 * _MARGIN
    height = lines * _HEIGHT + 2 * _MARGIN + _BAR
    times: set[int] = set()
    body = [
        f'<text class="{_class(run[0].style)} t{_step(run[0].at_s, times)}" '
        f'x="{_MARGIN + column * _WIDTH:.1f}" y="{_MARGIN + 14 + row * _HEIGHT:.1f}" '
        f'textLength="{len(run) * _WIDTH:.1f}">{escape("".join(cell.character for cell in run))}'
        "</text>"
        for row, line in enumerate(recording.lines)
        for column, run in _runs(line)
    ]
    bar = [
        f'<text class="bar {phase.name} p{at}" x="{_MARGIN}" y="{height - _MARGIN:.1f}">'
        f"{escape(phase.words)}</text>"
        for at, phase in enumerate(phases)
    ]
    rules = [
        f".t{step}{{animation:t{step} {length_s:.2f}s step-end infinite}}"
        f"@keyframes t{step}{{0%{{visibility:hidden}}"
        f"{min(100.0, step * _STEP_S * slower / length_s * 100):.2f}%{{visibility:visible}}}}"
        for step in sorted(times)
    ]
    rules += _bar_rules(phases, length_s, slower)
    earlier = ",".join(f".p{at}" for at in range(len(phases) - 1))
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}{earlier}{{visibility:hidden}}",
            "@media (prefers-reduced-motion:no-preference){",
            *rules,
            "}</style>",
            f'<rect class="frame" width="{width:.0f}" height="{height:.0f}" rx="8"/>',
            *body,
            *bar,
            "</svg>\n",
        )
    )


def _runs(line: dict[int, Cell]) -> Iterator[tuple[int, list[Cell]]]:
    """Split a line into neighbouring characters of one style and one time; blanks draw nothing."""
    cells = [(column, line[column]) for column in sorted(line)]
    groups = groupby(
        enumerate(cells),
        key=lambda item: (
            item[1][0] - item[0],  # equal for neighbouring columns
            item[1][1].style,
            int(item[1][1].at_s / _STEP_S),
        ),
    )
    for _, group in groups:
        members = [cell for _, cell in group]
        if any(not cell.character.isspace() for _, cell in members):
            yield members[0][0], [cell for _, cell in members]


def _class(style: frozenset[str]) -> str:
    return " ".join(sorted(style)) or "plain"


def _step(at_s: float, times: set[int]) -> int:
    step = int(at_s / _STEP_S)
    times.add(step)
    return step


def _bar_rules(phases: Sequence[Phase], length_s: float, slower: float) -> Iterator[str]:
    """Show each phase until the next one begins; a still picture shows the last one alone."""
    ends_s = [phase.at_s * slower for phase in phases[1:]] + [length_s]
    for at, (phase, end_s) in enumerate(zip(phases, ends_s, strict=True)):
        begin, end = (min(100.0, s / length_s * 100) for s in (phase.at_s * slower, end_s))
        yield (
            f".p{at}{{animation:p{at} {length_s:.2f}s step-end infinite}}"
            f"@keyframes p{at}{{0%{{visibility:hidden}}{begin:.2f}%{{visibility:visible}}"
            f"{end:.2f}%{{visibility:hidden}}}}"
        )
