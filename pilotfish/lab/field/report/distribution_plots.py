"""Plot distributions over answers: time per token, first token, energy.

In: measured runs. Out: plots, with descriptions in words.
"""

from collections.abc import Sequence

import numpy as np

from pilotfish.lab.drawing import Axes, legend_below
from pilotfish.lab.field.report.answer_values import MEASURES, Values, best_windows
from pilotfish.lab.field.report.canvas import (
    Plot,
    PlotStyle,
    few_only,
    format_counts,
    legend_shape,
    select,
)
from pilotfish.lab.field.report.figures import Figures
from pilotfish.lab.field.report.link_plots import draw_distributions
from pilotfish.lab.field.report.samples import Array
from pilotfish.lab.statistics import FEWEST_VALUES

_MOST_PROTOCOLS = 5  # panels of the comparison between runs


def distributions(
    run: str, measured: Values, all_figures: Sequence[Figures], styles: PlotStyle
) -> Plot | None:
    """Plot the distribution of each measure, a line for each protocol at its best window."""
    best = best_windows(all_figures, FEWEST_VALUES)
    what, unit = "the distribution over answers", "answer"
    if not best:
        return None
    tokens = measured[MEASURES[0]]
    selection = select({str(each): len(tokens.get(each, ())) for each in best})
    if not selection.drawn:
        return few_only(run, what, selection.few, unit)
    configurations = [each for each in best if str(each) in selection.drawn]
    lines = {
        measure: select({str(each): len(values[each]) for each in configurations if each in values})
        for measure, values in measured.items()
    }
    panels = {
        measure: {
            str(each): measured[measure][each]
            for each in configurations
            if str(each) in lines[measure].drawn
        }
        for measure in MEASURES
    }
    panels = {measure: curves for measure, curves in panels.items() if curves}
    for measure, selected in lines.items():
        selection.few.update({f"{k}, {measure.name}": n for k, n in selected.few.items()})
    labels = [str(each) for each in configurations]
    colours = [styles.colour_of(str(each._replace(window=None))) for each in configurations]

    def paint(all_axes: list[Axes], wide: bool) -> None:
        for axes, curves in zip(all_axes, panels.values(), strict=True):
            draw_distributions(axes, curves, labels, colours)
        legend_below(all_axes[0], legend_shape(labels, wide)[0])

    fastest = min(configurations, key=lambda each: float(np.median(tokens[each])))
    slow = float(np.percentile(tokens[fastest], 90))
    return Plot(
        run=run,
        what=what,
        finding=f"90 % of the answers under {fastest} took up to {slow:.1f} ms a token",
        n=format_counts((len(tokens[each]) for each in configurations), "answers a line"),
        selection=selection,
        unit=unit,
        xlabel=[measure.heading for measure in panels],
        ylabels=["answers up to this (%)" if i == 0 else "" for i in range(len(panels))],
        heights=(3.6, 1.4 + 2.1 * len(panels) + legend_shape(labels)[1]),
        paint=paint,
        alt=f"{run}: the % of answers up to each value, of {', '.join(m.name for m in panels)}, a "
        f"line for each of {', '.join(labels)}",
        side_by_side=True,
    )


def compare_distributions(
    runs: Sequence[tuple[str, Values, Sequence[Figures]]],
) -> Plot | None:
    """Plot the distribution of ms a token of several runs, a panel for each of their protocols."""
    panels: dict[str, dict[str, Array]] = {}
    for run, values, all_figures in runs:
        for best in best_windows(all_figures, FEWEST_VALUES):
            label = str(best._replace(window=None))
            panels.setdefault(label, {})[run] = values[MEASURES[0]][best]
    panels = {label: lines for label, lines in panels.items() if len(lines) > 1}
    if not panels:
        return None
    what, unit = "the distribution of ms a token", "answer"
    selection = select(
        {f"{run} {label}": len(v) for label, lines in panels.items() for run, v in lines.items()}
    )
    enough = {
        label: {run: v for run, v in lines.items() if f"{run} {label}" in selection.drawn}
        for label, lines in panels.items()
    }
    enough = {label: lines for label, lines in enough.items() if lines}
    drawn = dict(list(enough.items())[:_MOST_PROTOCOLS])
    names = list(dict.fromkeys(run for lines in drawn.values() for run in lines))
    if len(names) < 2:
        return few_only("All runs", what, selection.few, unit)
    part = f"{len(drawn)} of {len(enough)} protocols, " if len(drawn) < len(enough) else ""

    def paint(all_axes: list[Axes], wide: bool) -> None:
        for axes, lines in zip(all_axes, drawn.values(), strict=True):
            draw_distributions(axes, lines, names)
        legend_below(all_axes[0], legend_shape(names, wide)[0])

    return Plot(
        run="All runs",
        what=what,
        finding=f"ms a token by protocol, {part}{len(names)} runs",
        n=format_counts(
            (len(v) for lines in drawn.values() for v in lines.values()), "answers a line"
        ),
        selection=selection,
        unit=unit,
        xlabel=[f"{label}: time per token (ms)" for label in drawn],
        ylabels=["answers up to this (%)" if i == 0 else "" for i in range(len(drawn))],
        heights=(3.4, 1.4 + 2.1 * len(drawn)),
        paint=paint,
        alt=f"The % of answers up to each time per token in ms, a panel for each of "
        f"{', '.join(drawn)}, a line for each run: {', '.join(names)}",
        side_by_side=True,
    )
