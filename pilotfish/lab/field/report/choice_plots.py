"""Plot the choices of `auto`: its time next to every fixed choice's, and its predictions.

In: the `Hindsight` of one run. Out: plots, with descriptions in words (alternative texts).
"""

from collections.abc import Sequence
from dataclasses import replace

from pilotfish.lab.drawing import MARKERS, PALETTE, Axes, MaxNLocator, escape_math, legend_below
from pilotfish.lab.field.report.canvas import (
    ROW,
    Plot,
    few_only,
    format_counts,
    select,
    whiskers,
)
from pilotfish.lab.field.report.hindsight import Alternative, Hindsight
from pilotfish.wire.request import AUTO

_ROWS = 7  # minimum height of a narrow plot, in rows


def alternatives(run: str, hindsight: Hindsight | None) -> Plot | None:
    """Plot the time of `auto` as a line, and each alternative's measured and predicted times."""
    if hindsight is None:
        return None
    if hindsight.auto is None or not _with_times(hindsight.alternatives):
        return None
    auto = hindsight.auto
    selection = select({AUTO: auto.n, **_numbers(hindsight.alternatives)})
    what, unit = "the comparison of auto with its alternatives", "answer"
    hindsight = replace(
        hindsight, alternatives=_with_enough(hindsight.alternatives, selection.drawn)
    )
    rows = sorted(_with_times(hindsight.alternatives), key=_cost)
    if AUTO not in selection.drawn or not rows:
        return few_only(run, what, selection.few, unit)
    fixed = [a.fixed.n for a in rows if a.fixed is not None]
    n = f"auto: n = {auto.n} answers"
    if fixed:
        n += f"; fixed: {format_counts(fixed, 'each')}"

    def paint(all_axes: list[Axes], _: bool) -> None:
        (axes,) = all_axes
        axes.axvline(auto.median, color=PALETTE[6], linewidth=1.4, label="auto, measured")
        _alternatives(axes, rows)
        axes.set_yticks(range(len(rows)), [_row_name(a) for a in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.set_xlabel(
            axes.get_xlabel(), loc="right"
        )  # placed here because long row names leave no space further left
        legend_below(axes)

    return Plot(
        run=run,
        what=what,
        finding=f"auto took {auto.median:.1f} ms per token" + _against_best(hindsight),
        n=n,
        selection=selection,
        unit=unit,
        xlabel="time per committed token (ms)",
        ylabels=["protocol and\nwindow γ (tokens)"],
        heights=(1.5 + ROW * max(len(rows), 4), 1.8 + ROW * max(len(rows), _ROWS)),
        paint=paint,
        alt=f"{run}: time per committed token (ms) of each protocol and window γ (tokens), as "
        f"measured and as predicted by auto, and the time that auto took",
    )


def _with_times(alternatives: Sequence[Alternative]) -> list[Alternative]:
    """Return the alternatives with a measured or a predicted time."""
    return [a for a in alternatives if a.fixed is not None or a.forecast_ms is not None]


def _numbers(alternatives: Sequence[Alternative]) -> dict[str, int]:
    """Return the number of answers behind each measured and each predicted time, by its name."""
    measured = {_fixed(a): a.fixed.n for a in alternatives if a.fixed is not None}
    return measured | {_forecast(a): a.forecasts for a in alternatives if a.forecasts}


def _with_enough(alternatives: Sequence[Alternative], names: Sequence[str]) -> list[Alternative]:
    """Remove the times whose names are not among these."""
    return [
        replace(
            a,
            fixed=a.fixed if _fixed(a) in names else None,
            forecast_ms=a.forecast_ms if _forecast(a) in names else None,
        )
        for a in alternatives
    ]


def _fixed(alternative: Alternative) -> str:
    return f"fixed {alternative.configuration}"


def _forecast(alternative: Alternative) -> str:
    return f"{alternative.configuration}'s forecast"


def _alternatives(axes: Axes, rows: Sequence[Alternative]) -> None:
    """Draw the times of the fixed choices and the forecasts, each in its row."""
    measured = [(a.fixed, row) for row, a in enumerate(rows) if a.fixed is not None]
    for spread, row in measured:
        axes.errorbar(spread.median, row, xerr=whiskers(spread), color=PALETTE[0], capsize=2)
    if measured:
        axes.scatter(
            [spread.median for spread, _ in measured],
            [row for _, row in measured],
            color=PALETTE[0],
            s=24,
            label="fixed, measured",
        )
    expected = [(a.forecast_ms, row) for row, a in enumerate(rows) if a.forecast_ms is not None]
    if expected:
        axes.scatter(
            [ms for ms, _ in expected],
            [row for _, row in expected],
            edgecolors=PALETTE[1],
            marker=MARKERS[3],
            facecolors="none",
            s=30,
            zorder=3,
            label="auto's forecast",
        )


def _cost(alternative: Alternative) -> float:
    if alternative.fixed is not None:
        return alternative.fixed.median
    return alternative.forecast_ms or 0.0


def _row_name(alternative: Alternative) -> str:
    chosen = f" (chosen {alternative.chosen}×)" if alternative.chosen else ""
    return escape_math(f"{alternative.configuration}{chosen}")


def _against_best(hindsight: Hindsight) -> str:
    if hindsight.best is None or hindsight.best.fixed is None:
        return ""
    best = hindsight.best
    return f", the best fixed choice ({best.configuration}) {hindsight.best.fixed.median:.1f}"


def predictions(run: str, hindsight: Hindsight | None) -> Plot | None:
    """Plot each answer's measured time against its predicted time; None without predictions."""
    if hindsight is None or not hindsight.predicted or hindsight.error is None:
        return None
    predicted, measured = zip(*hindsight.predicted, strict=True)
    selection = select({"": len(predicted)})
    what, unit = "the picture of auto's predictions", "answer"
    if not selection.drawn:
        return few_only(run, what, selection.few, unit)
    top = 1.08 * max(*predicted, *measured)

    def paint(all_axes: list[Axes], wide: bool) -> None:
        (axes,) = all_axes
        axes.plot([0, top], [0, top], color="#999999", linewidth=1, label="as predicted")
        axes.fill_between(
            [0, top], [0, 0.9 * top], [0, 1.1 * top], color="#dddddd", label="within 10 %"
        )
        axes.scatter(predicted, measured, color=PALETTE[0], s=16, label="an answer")
        axes.set(xlim=(0, top), ylim=(0, top))
        if not wide:
            axes.set_aspect("equal")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5))
        legend_below(axes)

    return Plot(
        run=run,
        what=what,
        finding=f"predictions of auto are off by {100 * hindsight.error:.0f} % in the median",
        n=f"n = {len(predicted):,} answers",
        selection=selection,
        unit=unit,
        xlabel="predicted time per token (ms)",
        ylabels=["measured time per token (ms)"],
        heights=(3.6, 3.4),
        paint=paint,
        alt=f"{run}: measured against predicted time per committed token in ms of auto's answers",
    )
