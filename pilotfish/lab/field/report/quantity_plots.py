"""Plot goodput, jitter, retransmissions and signal over clock time.

In: the `LinkHistory` of one run. Out: a plot with a panel for each measured quantity.
"""

from pilotfish.lab.drawing import PALETTE, Axes, legend_below
from pilotfish.lab.field.report import clock_axis
from pilotfish.lab.field.report.canvas import Plot, few_only, format_counts, select
from pilotfish.lab.field.report.link_history import QUANTITIES, LinkHistory, Series

_COLOURS = {
    "goodput up": PALETTE[0],
    "goodput down": PALETTE[2],
    "jitter": PALETTE[3],
    "retransmitted": PALETTE[0],
    "retransmitted down": PALETTE[2],
    "signal": PALETTE[6],
}
# markers of a measured value and of a lower bound
_MEASURED, _BOUND = ".", "^"


def quantities_over_time(run: str, history: LinkHistory) -> Plot | None:
    """Plot goodput, jitter, retransmissions and signal against clock time, a panel for each."""
    panels = {
        heading: lines
        for heading, names in (
            ("goodput\n(Mbit/s)", ("goodput up", "goodput down")),
            ("jitter\n(ms)", ("jitter",)),
            ("retransmitted\n(% of segments)", ("retransmitted", "retransmitted down")),
            ("signal\n(dBm)", ("signal",)),
        )
        if (lines := {name: each for name in names if (each := history.series(name)) is not None})
    }
    every = {name: each for lines in panels.values() for name, each in lines.items()}
    if not every:
        return None
    what, unit = "the link over time", "measurement"
    selection = select({name: sum(map(len, each)) for name, each in every.items()})
    if not selection.drawn:
        return few_only(run, what, selection.few, unit)
    drawn = {
        heading: {name: each for name, each in lines.items() if name in selection.drawn}
        for heading, lines in panels.items()
    }
    drawn = {heading: lines for heading, lines in drawn.items() if lines}

    def paint(all_axes: list[Axes], wide: bool) -> None:
        for axes, lines in zip(all_axes, drawn.values(), strict=True):
            _paint_quantities(axes, lines, history, wide)
        legend_below(all_axes[0], 6 if wide else 2)

    names = [name for lines in drawn.values() for name in lines]
    units = [QUANTITIES[name][1] for name in names]
    return Plot(
        run=run,
        what=what,
        finding="; ".join(_range(name, every[name]) for name in names[:2]),
        n=format_counts((sum(map(len, every[name])) for name in names), "measurements a line"),
        selection=selection,
        unit=unit,
        xlabel=clock_axis.label_of(history),
        ylabels=list(drawn),
        heights=(1.6 + 1.25 * len(drawn), 1.8 + 1.45 * len(drawn)),
        paint=paint,
        alt=f"{run}: against clock time (UTC), {', '.join(names)} of the link "
        f"({', '.join(dict.fromkeys(units))})",
    )


def _paint_quantities(
    axes: Axes, lines: dict[str, Series], history: LinkHistory, wide: bool
) -> None:
    """Draw a panel: goodput as points, lower bounds as hollow triangles, all else as lines."""
    for name, (measured, bounds) in lines.items():
        colour, several = _COLOURS[name], len(lines) > 1 or len(bounds) > 0
        if len(measured):
            clock_axis.line(
                axes,
                measured,
                history,
                wide=wide,
                colour=colour,
                label=name if several else "_",
                band=len(lines) == 1,
                marker=_MEASURED if name.startswith("goodput") else "",
            )
        if len(bounds):
            clock_axis.line(
                axes,
                bounds,
                history,
                wide=wide,
                colour=colour,
                label=f"{name}, ≥",
                marker=_BOUND,
                filled=False,
            )
    if "signal" not in lines:  # start just below zero, so that a line at zero is visible
        top = axes.get_ylim()[1] if axes.dataLim.ymax > 0 else 1.0
        axes.set_ylim(-0.04 * top, top)
    clock_axis.finish(axes, history, wide)


def _range(name: str, series: Series) -> str:
    """Describe the range of a quantity's values in words; a lower bound is marked by ≥."""
    values = [
        (float(v), bound)
        for each, bound in zip(series, ("", "≥ "), strict=True)
        for v in each.values
    ]
    ends = (min(values), max(values))
    texts = [
        f"{bound}{v:.0f}" if abs(v) >= 100 else f"{bound}{v:.{2 if abs(v) < 1 else 3}g}"
        for v, bound in ends
    ]
    bounds = f" ({len(series[1]):,} of {len(values):,} are ≥)" if len(series[1]) else ""
    return f"{name} {' to '.join(dict.fromkeys(texts))} {QUANTITIES[name][1]}{bounds}"
