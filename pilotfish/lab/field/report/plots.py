"""Plot the stages, acceptance and bytes of a run; axes have units, and titles have n.

In: the results of one run. Out: plots, with descriptions in words (alternative texts).
"""

import math
from collections.abc import Sequence

from pilotfish.device_runtime.record import STAGES
from pilotfish.lab.drawing import (
    MARKERS,
    PALETTE,
    Axes,
    FuncFormatter,
    MaxNLocator,
    NullFormatter,
    escape_math,
    legend_below,
)
from pilotfish.lab.field.report.canvas import (
    ROW,
    Plot,
    PlotStyle,
    few_only,
    format_counts,
    legend_shape,
    select,
)
from pilotfish.lab.field.report.figures import Figures, by_series
from pilotfish.lab.statistics import FEWEST_VALUES, PositionCounts, share_interval

_ROWS = 7  # minimum height of a narrow plot, in rows


def stages(run: str, all_figures: Sequence[Figures]) -> Plot | None:
    """Plot the time per committed token by stage, with a bar for each (protocol, window)."""
    every = [(f, f.round_ms.n) for f in all_figures if f.round_ms is not None and f.stages_ms]
    if not every:
        return None
    selection = select({str(f.configuration): rounds for f, rounds in every})
    what, unit = "time by stage", "steady round"
    if not selection.drawn:
        return few_only(run, what, selection.few, unit)
    measured = [f for f, _ in every if str(f.configuration) in selection.drawn]
    means = {stage: sum(f.stages_ms[stage] for f in measured) / len(measured) for stage in STAGES}
    largest = max(STAGES, key=lambda stage: means[stage])
    share = 100 * means[largest] / (sum(means.values()) or 1.0)

    def paint(all_axes: list[Axes], wide: bool) -> None:
        (axes,) = all_axes
        left = [0.0] * len(measured)
        for stage, colour in zip(STAGES, PALETTE, strict=True):
            widths = [f.stages_ms[stage] for f in measured]
            axes.barh(
                range(len(measured)), widths, left=left, color=colour, label=stage, height=0.7
            )
            left = [a + b for a, b in zip(left, widths, strict=True)]
        _rows(axes, measured)
        legend_below(axes, 7 if wide else 4)

    return Plot(
        run=run,
        what=what,
        finding=f"on average {share:.0f} % of a token's time is {largest}",
        n=format_counts((n for _, n in every if n >= FEWEST_VALUES), "steady rounds a bar"),
        selection=selection,
        unit=unit,
        xlabel="time per committed token (ms, mean)",
        ylabels=["protocol and\nwindow γ (tokens)"],
        heights=_heights(measured, 1.7),
        paint=paint,
        alt=f"{run}: mean time per committed token in ms by stage ({', '.join(STAGES)}), a bar for "
        f"each protocol and window γ in tokens",
    )


def _heights(rows: Sequence[Figures], around: float) -> tuple[float, float]:
    """Return the heights of a plot with a row for each of ``rows``, wide and narrow (inches)."""
    return 1.5 + ROW * max(len(rows), 4), around + ROW * max(len(rows), _ROWS)


def _rows(axes: Axes, all_figures: Sequence[Figures]) -> None:
    """Label a row for each (protocol, window); the first row is at the top."""
    axes.set_yticks(
        range(len(all_figures)), [escape_math(str(f.configuration)) for f in all_figures]
    )
    axes.set_ylim(len(all_figures) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def depths(run: str, all_figures: Sequence[Figures], styles: PlotStyle) -> Plot | None:
    """Plot, by depth, the share of rounds that reach a depth, and the share that accept it.

    A line has the protocol and the varied options of its label; all their windows are pooled. A
    share of the rounds that drafted a depth, or reached it, is drawn if these are enough. Returns
    None if there are no drafts.
    """
    pooled = {label: _pool_positions(each) for label, each in by_series(all_figures).items()}
    every = {label: counts for label, counts in pooled.items() if counts}
    if not every:
        return None
    selection = select({label: counts[0].drafted for label, counts in every.items()})
    what, unit = "acceptance by position", "round"
    if not selection.drawn:
        return few_only(run, what, selection.few, unit)
    measured = {
        label: [p for p in every[label] if p.drafted >= FEWEST_VALUES] for label in selection.drawn
    }
    for label in selection.drawn:
        selection.few.update(_few_depths(label, every[label]))
    first = [counts[0] for counts in measured.values()]
    share = sum(p.accepted for p in first) / sum(p.reached for p in first)
    legend = legend_shape(list(measured))[1]

    def paint(all_axes: list[Axes], wide: bool) -> None:
        reached, accepted = all_axes
        for i, (label, counts) in enumerate(measured.items()):
            # shift each line, so that equal points do not overlap
            offset = 0.2 * ((i + 0.5) / len(measured) - 0.5)
            _depths(reached, accepted, counts, offset, label, styles)
        for axes in (reached, accepted):
            axes.set_ylim(0, 104)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend_below(reached, legend_shape(list(measured), wide)[0])

    label = "depth in the window (tokens)"
    return Plot(
        run=run,
        what=what,
        finding=f"the first drafted token is accepted in {100 * share:.0f} % of rounds",
        n=format_counts((p.drafted for p in first), "rounds a line"),
        selection=selection,
        unit=unit,
        xlabel=[label, label],
        ylabels=["reached\n(% of rounds)", "accepted when\nreached (%)"],
        heights=(3.6 + legend / 2, 4.6 + legend),
        paint=paint,
        alt=f"{run}: by depth in the window in tokens, the % of rounds that reach it and the % of "
        f"those that accept it, with 95 % intervals, for each of {', '.join(measured)}",
        side_by_side=True,
    )


def _few_depths(label: str, counts: Sequence[PositionCounts]) -> dict[str, int]:
    """Return the first depth whose share has too few rounds, of each of the two shares.

    Deeper ones have still fewer. The values are the numbers of rounds at these depths.
    """
    shares = (
        ("reached", [(p.depth, p.drafted) for p in counts]),
        ("accepted", [(p.depth, p.reached) for p in counts]),
    )
    return {
        f"{label} {share} from depth {depth}": number
        for share, numbers in shares
        for depth, number in [pair for pair in numbers if pair[1] < FEWEST_VALUES][:1]
    }


def _depths(
    reached: Axes,
    accepted: Axes,
    counts: Sequence[PositionCounts],
    offset: float,
    label: str,
    styles: PlotStyle,
) -> None:
    """Draw the two lines of a series, and the intervals of its acceptance."""
    colour, marker = styles.colour_of(label), styles.marker_of(label)
    reached.plot(
        [p.depth + offset for p in counts],
        [100 * p.reached / p.drafted for p in counts],
        color=colour,
        marker=marker,
        linewidth=1.4,
        label=escape_math(label),
    )
    enough = [p for p in counts if p.reached >= FEWEST_VALUES]
    shares = [100 * p.accepted / p.reached for p in enough]
    accepted.plot(
        [p.depth + offset for p in enough], shares, color=colour, marker=marker, linewidth=1.4
    )
    for p in enough:
        low, high = share_interval(p.accepted, p.reached)
        accepted.vlines(p.depth + offset, 100 * low, 100 * high, color=colour, linewidth=0.8)


def _pool_positions(all_figures: Sequence[Figures]) -> list[PositionCounts]:
    """Add up the counts at each depth over these results."""
    counts = [p for f in all_figures for p in f.positions]
    return [
        PositionCounts(
            depth=depth,
            drafted=sum(p.drafted for p in counts if p.depth == depth),
            reached=sum(p.reached for p in counts if p.depth == depth),
            accepted=sum(p.accepted for p in counts if p.depth == depth),
        )
        for depth in sorted({p.depth for p in counts})
    ]


def bytes_per_token(run: str, all_figures: Sequence[Figures]) -> Plot | None:
    """Plot bytes per committed token, uplink and downlink, on a log scale; None without bytes."""
    every = [f for f in all_figures if f.up_bytes_per_token or f.down_bytes_per_token]
    if not every:
        return None
    selection = select({str(f.configuration): f.rounds for f in every})
    what, unit = "bytes per token", "round"
    if not selection.drawn:
        return few_only(run, what, selection.few, unit)
    measured = [f for f in every if str(f.configuration) in selection.drawn]
    directions = (
        ("up", PALETTE[0], MARKERS[2], [f.up_bytes_per_token or 0.0 for f in measured]),
        ("down", PALETTE[1], MARKERS[4], [f.down_bytes_per_token or 0.0 for f in measured]),
    )
    totals = [sum(direction[3][row] for direction in directions) for row in range(len(measured))]
    least = measured[totals.index(min(totals))].configuration
    most = measured[totals.index(max(totals))].configuration

    def paint(all_axes: list[Axes], _: bool) -> None:
        (axes,) = all_axes
        for row in range(len(measured)):
            ends = [direction[3][row] for direction in directions if direction[3][row]]
            axes.plot(ends, [row] * len(ends), color="#bbbbbb", linewidth=1)
        for name, colour, marker, values in directions:
            rows = [row for row, value in enumerate(values) if value]
            sizes = [values[row] for row in rows]
            axes.scatter(sizes, rows, color=colour, marker=marker, s=26, label=name)
        _scale_by_decades(
            axes, [value for direction in directions for value in direction[3] if value]
        )
        _rows(axes, measured)
        legend_below(axes)

    return Plot(
        run=run,
        what=what,
        finding=f"{min(totals):.0f} bytes per token ({least}) to {max(totals):,.0f} ({most})",
        n=format_counts((f.rounds for f in measured), "rounds a row"),
        selection=selection,
        unit=unit,
        xlabel="bytes per committed token (log scale)",
        ylabels=["protocol and\nwindow γ (tokens)"],
        heights=_heights(measured, 1.5),
        paint=paint,
        alt=f"{run}: bytes per committed token, up and down, on a log scale, for each protocol and "
        f"window γ in tokens",
    )


def _scale_by_decades(axes: Axes, values: Sequence[float]) -> None:
    """Set a log scale that begins and ends at powers of ten, so that it has two labels or more."""
    axes.set_xscale("log")
    axes.set_xlim(
        10.0 ** math.floor(math.log10(0.9 * min(values))),
        10.0 ** math.ceil(math.log10(1.1 * max(values))),
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
