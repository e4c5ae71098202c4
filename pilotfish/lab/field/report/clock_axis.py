"""Draw against clock time (UTC): ticks, lines that break over gaps, and bands for the gaps."""

from collections.abc import Iterator
from datetime import datetime, timezone

import numpy as np

from pilotfish.lab.drawing import Axes
from pilotfish.lab.field.report.link_history import LinkHistory
from pilotfish.lab.field.report.samples import Array, Samples, breaks, by_span

_MINUTE, _HOUR, DAY_S = 60.0, 3600.0, 86400.0
_STEPS_S = (
    *(1.0, 2.0, 5.0, 10.0, 15.0, 30.0),
    *(_MINUTE * minutes for minutes in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * hours for hours in (1, 2, 3, 6, 12)),
    *(DAY_S * days for days in (1, 2, 5, 10, 30, 90, 365)),
)
_TICKS = {True: 13, False: 5}  # most ticks of an axis, by whether the picture is wide
_POINTS = {True: 500, False: 180}  # most points of a line, by whether the picture is wide
AWAY, PAUSED = "#D55E00", "#8a939c"  # colours of outages and pauses


def finish(axes: Axes, history: LinkHistory, wide: bool) -> None:
    """Set the limits and ticks of the x axis, and draw bands for outages and pauses."""
    for label, colour, alpha, spans in (
        ("edge away", AWAY, 0.28, [(a.began_s, a.lasted_s) for a in history.outages]),
        ("not measured", PAUSED, 0.22, [(begin, end - begin) for begin, end in history.pauses]),
    ):
        if spans:
            axes.broken_barh(
                spans,
                (0.0, 1.0),
                transform=axes.get_xaxis_transform(),
                facecolors=colour,
                edgecolors=colour,  # an edge shows also an outage that is narrower than a pixel
                linewidth=0.4,
                alpha=alpha,
                zorder=0.5,
                label=label,
            )
    margin = 0.01 * max(history.ended_s - history.began_s, 1.0)
    axes.set_xlim(history.began_s - margin, history.ended_s + margin)
    ticks = dict(_ticks(history.began_s, history.ended_s, _TICKS[wide]))
    axes.set_xticks(list(ticks), list(ticks.values()))


def _ticks(begin_s: float, end_s: float, most: int) -> Iterator[tuple[float, str]]:
    """Yield times and labels of ticks; the first of each day has the date, if there are several."""
    step = next((step for step in _STEPS_S if (end_s - begin_s) / step <= most - 1), None)
    step = step or (end_s - begin_s) / (most - 1)
    first = np.ceil(begin_s / step) * step
    several = end_s - begin_s > DAY_S or begin_s // DAY_S != end_s // DAY_S
    day = None
    for tick_s in first + step * np.arange(int((end_s - first) / step) + 1):
        at = datetime.fromtimestamp(float(tick_s), timezone.utc)
        date = f"{at.day} {at:%b}"
        clock = f"{at:%H:%M:%S}" if step < _MINUTE else f"{at:%H:%M}"
        if step >= DAY_S:
            yield float(tick_s), date
        else:
            # also a label without a date has two lines, so that all have the same height
            below = date if several and date != day else " "
            yield float(tick_s), f"{clock}\n{below}"
        day = date


def label_of(history: LinkHistory) -> str:
    """Return the label of the x axis, with the date if there is only one."""
    begin, end = (
        datetime.fromtimestamp(at, timezone.utc) for at in (history.began_s, history.ended_s)
    )
    if begin.date() == end.date():
        return f"time (UTC), {begin.day} {begin:%b %Y}"
    return f"time (UTC), {begin:%Y}" if begin.year == end.year else "time (UTC)"


def line(
    axes: Axes,
    of: Samples,
    history: LinkHistory,
    *,
    wide: bool,
    colour: str,
    label: str,
    marker: str = "",
    filled: bool = True,
    band: bool = True,
) -> None:
    """Draw medians as a line, and extremes as a band: of each round, or of each part of the time.

    The rounds of a watch have a point each if there is room for all; otherwise the time has equal
    parts. The line breaks at outages, and where nothing was measured. marker: draws the medians as
    points instead of a line; filled: whether the points are filled. band: whether to draw the band.
    """
    spans = by_span(of, _begins_of_points(history, _POINTS[wide]))
    if marker:
        axes.plot(
            spans.unix_s,
            spans.median,
            linestyle="",
            marker=marker,
            markersize=3.5 if len(spans.unix_s) > 100 else 5,
            markerfacecolor=colour if filled else "none",
            markeredgewidth=0.9,
            color=colour,
            label=label,
        )
        return
    begins = np.array([outage.began_s for outage in history.outages], np.float64)
    broken = breaks(spans.first_s, spans.last_s, history.longest_s, begins)
    at = np.flatnonzero(broken)
    times, low, median, high = (
        np.insert(values, at, np.nan)
        for values in (spans.unix_s, spans.low, spans.median, spans.high)
    )
    if band:
        # with steps, an extreme is as wide as its part of the time, not a triangle to the next ones
        axes.fill_between(times, low, high, step="mid", color=colour, alpha=0.3, linewidth=0)
    axes.plot(times, median, color=colour, linewidth=1.1, label=label)
    # a point between two breaks has no line, so it is drawn as a dot
    broken[:1] = True
    alone = broken & np.append(broken[1:], True)
    axes.plot(
        spans.unix_s[alone],
        spans.median[alone],
        color=colour,
        linestyle="",
        marker=".",
        markersize=3,
    )


def _begins_of_points(history: LinkHistory, most: int) -> Array:
    """Return the begins of the times that a line has a point for, ascending; at most so many."""
    if 0 < len(history.rounds_s) <= most:
        return history.rounds_s
    return np.linspace(history.began_s, history.ended_s, most, endpoint=False)
