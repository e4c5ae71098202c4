"""Plot the choices of `auto` against clock time.

In: counted answers, and the run's `LinkHistory`. Out: a plot.
"""

from collections.abc import Sequence

import numpy as np

from pilotfish.lab.drawing import Axes, legend_below
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.report import clock_axis
from pilotfish.lab.field.report.answer_values import choice_shares, chosen_protocols
from pilotfish.lab.field.report.canvas import Plot, PlotStyle, few_only, select
from pilotfish.lab.field.report.link_history import LinkHistory


def choices_over_time(
    run: str, answers: Sequence[Answer], history: LinkHistory, styles: PlotStyle
) -> Plot | None:
    """Plot what `auto` chose against clock time, a row for each protocol; None without choices."""
    chosen = chosen_protocols(answers)
    if not chosen:
        return None
    what, unit = "the picture of auto's choices", "answer"
    selection = select({"": len(chosen)})
    if not selection.drawn:
        return few_only(run, what, selection.few, unit)
    shares = choice_shares(answers)
    begins = history.answers_s[[at for at, _ in chosen]]
    order = np.argsort(begins, kind="stable")
    begins, protocols = begins[order], np.array([name for _, name in chosen])[order]
    # a choice holds until the next one, but not over a gap
    usual_s = 2.0 * float(np.median(np.diff(begins)))
    gaps = [*(outage.began_s for outage in history.outages), *(gap for gap, _ in history.pauses)]
    absences = np.sort(np.array(gaps, np.float64))
    until = np.append(begins[1:], np.inf)
    at = np.searchsorted(absences, begins)
    away = np.append(absences, np.inf)[at]
    ends = np.minimum(np.minimum(until, away), begins + max(usual_s, 1e-3))

    def paint(all_axes: list[Axes], wide: bool) -> None:
        (axes,) = all_axes
        for row, protocol in enumerate(shares):
            mine = protocols == protocol
            spans = list(zip(begins[mine], (ends - begins)[mine], strict=True))
            axes.broken_barh(
                spans,
                (row - 0.38, 0.76),
                facecolors=styles.colour_of(protocol),
                linewidth=0,
                snap=False,
            )
        names = [f"{protocol}\n{100 * share:.0f} %" for protocol, share in shares.items()]
        axes.set_yticks(range(len(shares)), names)
        axes.set_ylim(len(shares) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        clock_axis.finish(axes, history, wide)
        if history.outages or history.pauses:
            legend_below(axes)

    texts = ", ".join(f"{protocol} {100 * share:.0f} %" for protocol, share in shares.items())
    return Plot(
        run=run,
        what=what,
        finding=f"auto chose {texts}",
        n=f"n = {len(chosen):,} answers",
        selection=selection,
        unit=unit,
        xlabel=clock_axis.label_of(history),
        ylabels=["chosen protocol"],
        heights=(1.7 + 0.42 * len(shares), 2.1 + 0.42 * len(shares)),
        paint=paint,
        alt=f"{run}: the protocol that auto chose for each answer against clock time (UTC), % of "
        f"the choices in each row",
    )
