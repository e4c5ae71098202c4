"""Plot the link over clock time, and the distribution of its RTT.

In: the `LinkHistory` of one run, or of several. Out: plots, with descriptions in words.
"""

import math
from collections.abc import Sequence

import numpy as np

from pilotfish.lab.drawing import PALETTE, Axes, NullLocator, escape_math, legend_below
from pilotfish.lab.field.report import clock_axis
from pilotfish.lab.field.report.canvas import (
    Plot,
    count,
    few_only,
    format_counts,
    legend_shape,
    select,
    shorten,
)
from pilotfish.lab.field.report.link_history import LinkHistory
from pilotfish.lab.field.report.samples import Array, Samples, distribution, percentiles

_WIDE_RANGE = 8.0  # ratio of the extremes above which an axis is logarithmic
_MOST_DRAWN = 99.5  # percentile at which the axis of a distribution ends
_COLOURS = (PALETTE[0], PALETTE[2], PALETTE[3])  # of sources; outages have another colour
_DASHES = ("-", "--", "-.", ":")


def rtt_over_time(run: str, history: LinkHistory) -> Plot | None:
    """Plot the RTT against clock time; None if it was never measured."""
    selection = select({source: len(each) for source, each in history.rtts.items()})
    what, unit = "RTT over time", "RTT sample"
    if not history.rtts:
        return None
    if not selection.drawn:
        return few_only(run, what, selection.few, unit)
    drawn = {source: history.rtts[source] for source in selection.drawn}
    best = next(iter(drawn.values()))
    values = np.concatenate([each.values for each in drawn.values()])

    def paint(all_axes: list[Axes], wide: bool) -> None:
        (axes,) = all_axes
        # only the best source has a band, and it is drawn last, above the others
        for (source, each), colour in reversed(list(zip(drawn.items(), _COLOURS, strict=False))):
            first = each is best
            clock_axis.line(axes, each, history, wide=wide, colour=colour, label=source, band=first)
        scale(axes, values, "y")
        clock_axis.finish(axes, history, wide)
        if len(drawn) > 1 or history.outages or history.pauses:
            legend_below(axes, 4 if wide else 2)

    gaps = [
        count(len(spans), noun)
        for spans, noun in ((history.outages, "outage"), (history.pauses, "pause"))
        if spans
    ]
    return Plot(
        run=run,
        what=what,
        finding=f"RTT {percentile_text(percentiles(best.values))}",
        n=_counts(drawn),
        selection=selection,
        unit=unit,
        xlabel=clock_axis.label_of(history),
        ylabels=["RTT (ms)\nmedian, least to most"],
        heights=(3.6, 3.4),
        paint=paint,
        alt=f"{run}: the RTT in ms against clock time (UTC), of {' and '.join(drawn)}"
        + (f", with gaps at {' and '.join(gaps)}" if gaps else ""),
    )


def rtt_distribution(runs: Sequence[tuple[str, LinkHistory]]) -> Plot | None:
    """Plot the distribution of the RTT: of one run by source, of several a line for each run."""
    what, unit = "the distribution of RTT", "RTT sample"
    if len(runs) == 1:
        name, lines = runs[0][0], dict(runs[0][1].rtts)
    else:
        name, lines = "All runs", {run: history.rtt for run, history in runs if len(history.rtt)}
    if not lines:
        return None
    selection = select({label: len(each) for label, each in lines.items()})
    if not selection.drawn:
        return few_only(name, what, selection.few, unit)
    drawn = {label: lines[label].values for label in selection.drawn}

    def paint(all_axes: list[Axes], wide: bool) -> None:
        (axes,) = all_axes
        draw_distributions(axes, drawn, list(drawn))
        legend_below(axes, legend_shape(list(drawn), wide)[0])

    findings = [
        f"{shorten(label, 24)} {percentile_text(percentiles(values))}"
        for label, values in drawn.items()
    ]
    return Plot(
        run=name,
        what=what,
        finding="RTT of " + ("; ".join(findings) if len(findings) < 4 else "each run"),
        n=_counts({label: lines[label] for label in drawn}),
        selection=selection,
        unit=unit,
        xlabel="RTT (ms)",
        ylabels=["samples up to this RTT (%)"],
        heights=(3.6, 3.9 + legend_shape(list(drawn))[1]),
        paint=paint,
        alt=f"{name}: the % of RTT samples up to each RTT in ms, a line for each of "
        f"{', '.join(drawn)}",
    )


def draw_distributions(
    axes: Axes,
    lines: dict[str, Array],
    labels: Sequence[str],
    colours: Sequence[str] = PALETTE,
) -> None:
    """Draw the distribution of each line's values (%), up to percentile 99.5 of the widest.

    labels: all lines, for their colours.
    """
    for label, values in lines.items():
        index = labels.index(label)
        ordered, share = distribution(values)
        axes.step(
            np.append(ordered[:1], ordered),
            np.append(0.0, share),
            where="post",
            color=colours[index % len(colours)],
            linestyle=_DASHES[index // len(colours) % len(_DASHES)],
            linewidth=1.4,
            label=escape_math(shorten(label, 40)),
        )
    most = max(float(np.percentile(values, _MOST_DRAWN)) for values in lines.values())
    values = np.concatenate(list(lines.values()))
    scale(axes, values[values <= most], "x")
    axes.set_ylim(0, 101)
    axes.set_yticks([0, 25, 50, 75, 90, 100])


def scale(axes: Axes, values: Array, axis: str) -> None:
    """Scale an axis: logarithmic if the values have a wide range, otherwise from 0."""
    set_limits = axes.set_xlim if axis == "x" else axes.set_ylim
    positive = values[values > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (0.0, 1.0)
    if low == 0.0 or high / low < _WIDE_RANGE:
        set_limits(0.0, 1.06 * high)
        return
    (axes.set_xscale if axis == "x" else axes.set_yscale)("log")
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(decades) < 4 else (1, 3) if len(decades) < 6 else (1,)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    ticks = [tick for tick in ticks if 0.9 * low <= tick <= 1.1 * high]
    (axes.set_xticks if axis == "x" else axes.set_yticks)(ticks, [f"{t:,g}" for t in ticks])
    (axes.xaxis if axis == "x" else axes.yaxis).set_minor_locator(NullLocator())
    set_limits(0.9 * low, 1.1 * high)


def percentile_text(values: dict[str, float | None]) -> str:
    """Tell the median and the highest known percentile up to p99: ``p50 48, p99 310 ms``."""
    known = [(name, value) for name, value in values.items() if value is not None]
    upper = [pair for pair in known if pair[0] in ("p90", "p99")]
    selected = known[:1] + upper[-1:]
    return (
        ", ".join(f"{name} {value:.{0 if value >= 100 else 1}f}" for name, value in selected)
        + " ms"
    )


def _counts(lines: dict[str, Samples]) -> str:
    """Tell the number of samples of each line."""
    text = "RTT samples a line" if len(lines) > 1 else "RTT samples"
    return format_counts((len(each) for each in lines.values()), text)
