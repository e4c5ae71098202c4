"""Plot latency against the window, for one run and for several runs together.

In: the results of runs. Out: plots, with descriptions in words (alternative texts).
"""

from collections.abc import Sequence

from pilotfish.lab.drawing import Axes, escape_math, legend_below
from pilotfish.lab.field.configuration import WindowSetting
from pilotfish.lab.field.report.canvas import (
    Plot,
    PlotStyle,
    few_only,
    format_counts,
    legend_shape,
    select,
    shorten,
    whiskers,
)
from pilotfish.lab.field.report.figures import (
    Figures,
    by_series,
    lowest,
    protocols_of,
    quickest,
    timed,
)
from pilotfish.lab.statistics import FEWEST_VALUES, Spread

_WITHOUT_WINDOW = "no γ"


def latency(run: str, all_figures: Sequence[Figures], styles: PlotStyle) -> Plot | None:
    """Plot the time per token against the window, a line for each protocol and varied options.

    Returns None if the run has no protocol with a window, or only one window and nothing else.
    Figures 4 and 7 of WISV have the same form.
    """
    measured = timed(all_figures)
    if len(_columns([f for f, _ in measured])) < 2:
        return None  # without windows there is nothing to compare
    selection = select({str(f.configuration): spread.n for f, spread in measured})
    what, unit = "latency against window", "answer"
    if not selection.drawn:
        return few_only(run, what, selection.few, unit)
    drawn = [(f, spread) for f, spread in measured if str(f.configuration) in selection.drawn]
    columns = _columns([f for f, _ in drawn])
    series = by_series(f for f, _ in drawn)
    legend = legend_shape(list(series))[1]

    def paint(all_axes: list[Axes], wide: bool) -> None:
        (axes,) = all_axes
        for i, (label, line) in enumerate(series.items()):
            # shift each line, so that intervals do not overlap
            offset = 0.24 * ((i + 0.5) / len(series) - 0.5)
            points = [(columns.index(_column(f)) + offset, spread) for f, spread in timed(line)]
            _line(axes, points, label, styles)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(bottom=0)
        legend_below(axes, legend_shape(list(series), wide)[0])

    return Plot(
        run=run,
        what=what,
        finding=_lowest([f for f, _ in drawn]),
        n=format_counts((spread.n for _, spread in drawn), "answers a point"),
        selection=selection,
        unit=unit,
        xlabel="window γ (drafted tokens per round)",
        ylabels=["time per committed token (ms)"],
        heights=(3.6 + legend / 2, 3.9 + legend),
        paint=paint,
        alt=f"{run}: time per committed token in ms against the window γ in drafted tokens, median "
        f"and 95 % interval for each of {', '.join(series)}",
    )


def _lowest(all_figures: Sequence[Figures]) -> str:
    best = lowest(all_figures)
    if best is None or best.token_ms is None:
        return "no fixed choice with a target was measured"
    return f"lowest fixed choice: {best.configuration}, {best.token_ms.median:.1f} ms"


def _line(
    axes: Axes, points: Sequence[tuple[float, Spread]], label: str, styles: PlotStyle
) -> None:
    """Draw medians with intervals, joined by a line; a single point gets a dotted line across."""
    for x, spread in points:
        axes.errorbar(
            x,
            spread.median,
            whiskers(spread),
            color=styles.colour_of(label),
            capsize=2,
            linewidth=1,
        )
    if len(points) == 1:  # a horizontal line, to compare the other lines with
        axes.axhline(
            points[0][1].median, color=styles.colour_of(label), linewidth=0.8, linestyle=":"
        )
    axes.plot(
        [x for x, _ in points],
        [spread.median for _, spread in points],
        color=styles.colour_of(label),
        marker=styles.marker_of(label),
        linewidth=1.4,
        label=escape_math(label),
    )


def _column(figures: Figures) -> str:
    window = figures.configuration.window
    return _WITHOUT_WINDOW if window is None else str(window)


def _columns(all_figures: Sequence[Figures]) -> list[str]:
    """List the labels of the windows: from short to long, then ``auto``, then no window."""

    def order(window: WindowSetting | None) -> tuple[int, int]:
        return (0, window) if isinstance(window, int) else (1 if window == "auto" else 2, 0)

    windows = sorted({f.configuration.window for f in all_figures}, key=order)
    return [_WITHOUT_WINDOW if window is None else str(window) for window in windows]


def compare_runs(runs: Sequence[tuple[str, Sequence[Figures]]], styles: PlotStyle) -> Plot | None:
    """Plot a row for each run, with each protocol at its best window; None for a single run."""
    best_of = {run: best for run, spread in runs if (best := _best_windows(spread))}
    if len(best_of) < 2:
        return None
    selection = select(
        {_mark(run, f): spread.n for run, best in best_of.items() for f, spread in best}
    )
    heading, what, unit = "Each protocol at its best window", "the comparison of runs", "answer"
    enough = {
        run: [pair for pair in best if _mark(run, pair[0]) in selection.drawn]
        for run, best in best_of.items()
    }
    measured = [(run, best) for run, best in enough.items() if best]
    if len(measured) < 2:
        return few_only("All runs", what, selection.few, unit)
    protocols = protocols_of([f for _, best in measured for f, _ in best])

    def paint(all_axes: list[Axes], wide: bool) -> None:
        (axes,) = all_axes
        for i, protocol in enumerate(protocols):
            # shift each protocol, so that points do not overlap
            offset = 0.5 * ((i + 0.5) / len(protocols) - 0.5)
            points = [
                (row + offset, spread)
                for row, (_, best) in enumerate(measured)
                for f, spread in best
                if f.configuration.protocol == protocol
            ]
            _dots(axes, points, protocol, styles)
        names = [escape_math(shorten(run, 30 if wide else 18)) for run, _ in measured]
        axes.set_yticks(range(len(measured)), names)
        axes.set_ylim(len(measured) - 0.4, -0.6)
        axes.set_xlim(left=0)
        legend_below(axes, 9 if wide else 4)

    return Plot(
        run=heading,
        what=what,
        finding=f"{len(measured)} runs",
        n=format_counts((f.n for _, best in measured for f, _ in best), "answers a point"),
        selection=selection,
        unit=unit,
        xlabel="time per committed token (ms)",
        ylabels=["run"],
        heights=(1.5 + 0.5 * len(measured), 1.9 + 0.5 * len(measured)),
        paint=paint,
        alt="Time per committed token in ms of every protocol at its best window, a row for each "
        f"run: {', '.join(run for run, _ in measured)}",
    )


def _mark(run: str, figures: Figures) -> str:
    """Return the name of a protocol's point in the row of a run."""
    return f"{run} {figures.configuration.protocol}"


def _dots(
    axes: Axes, points: Sequence[tuple[float, Spread]], protocol: str, styles: PlotStyle
) -> None:
    """Draw a protocol's medians with intervals, in the rows of the runs."""
    colour = styles.colour_of(protocol)
    for y, spread in points:
        axes.errorbar(spread.median, y, xerr=whiskers(spread), color=colour, capsize=2, linewidth=1)
    axes.scatter(
        [spread.median for _, spread in points],
        [y for y, _ in points],
        color=colour,
        marker=styles.marker_of(protocol),
        s=22,
        zorder=3,
        label=escape_math(protocol),
    )


def _best_windows(all_figures: Sequence[Figures]) -> list[tuple[Figures, Spread]]:
    """Return each protocol's results at its `quickest` window, of those with enough answers."""
    measured = [f for f, _ in timed(all_figures)]
    return timed(
        quickest([f for f in measured if f.configuration.protocol == protocol], FEWEST_VALUES)
        for protocol in protocols_of(measured)
    )
