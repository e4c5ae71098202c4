"""Plot the choices of `auto`: its time next to every fixed choice's, and its predictions.

In: the `Hindsight` of one run. Out: files, and descriptions of them in words.
"""

from pathlib import Path

from pilotfish.lab.drawing import MARKERS, PALETTE, MaxNLocator, escape_math, legend_below, plot
from pilotfish.lab.field.report.canvas import (
    WIDTH,
    format_counts,
    title,
    whiskers,
)
from pilotfish.lab.field.report.hindsight import Alternative, Hindsight
from pilotfish.lab.page import Picture

_ROW = 0.27  # height of a row (inches)
_ROWS = 7  # minimum height of the plot, in rows


def alternatives(path: Path, run: str, hindsight: Hindsight | None) -> Picture | None:
    """Plot the time of `auto` as a line, and each alternative's measured and predicted times."""
    if hindsight is None:
        return None
    rows = [a for a in hindsight.alternatives if a.fixed is not None or a.forecast_ms is not None]
    if hindsight.auto is None or not rows:
        return None
    rows.sort(key=_cost)
    finding = f"auto took {hindsight.auto.median:.1f} ms per token" + _against_best(hindsight)
    n = f"auto: n = {hindsight.auto.n} answers"
    if fixed := [a.fixed.n for a in rows if a.fixed is not None]:
        n += f"; fixed: {format_counts(fixed, 'each')}"
    with plot(
        path,
        title(run, finding, n),
        "time per committed token (ms)",
        "protocol and window γ (tokens)",
        (WIDTH, 1.8 + _ROW * max(len(rows), _ROWS)),
    ) as axes:
        axes.axvline(hindsight.auto.median, color=PALETTE[6], linewidth=1.4, label="auto, measured")
        measured = [(a.fixed, row) for row, a in enumerate(rows) if a.fixed is not None]
        for spread, row in measured:
            axes.errorbar(spread.median, row, xerr=whiskers(spread), color=PALETTE[0], capsize=2)
        if measured:
            medians = [spread.median for spread, _ in measured]
            axes.scatter(
                medians,
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
                color=PALETTE[1],
                marker=MARKERS[3],
                facecolors="none",
                s=30,
                zorder=3,
                label="auto's forecast",
            )
        axes.set_yticks(range(len(rows)), [_row_name(a) for a in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.set_xlabel(
            axes.get_xlabel(), loc="right"
        )  # placed here because long row names leave no space further left
        legend_below(axes)
    return Picture(
        path=path,
        alt=f"{run}: time per committed token (ms) of each protocol and window γ (tokens), as "
        f"measured and as predicted by auto, and the time that auto took; {finding} ({n}).",
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


def predictions(path: Path, run: str, hindsight: Hindsight | None) -> Picture | None:
    """Plot each answer's measured time against its predicted time; None without predictions."""
    if hindsight is None or not hindsight.predicted or hindsight.error is None:
        return None
    finding = f"predictions of auto are off by {100 * hindsight.error:.0f} % in the median"
    n = f"n = {len(hindsight.predicted)} answers"
    with plot(
        path,
        title(run, finding, n),
        "predicted time per token (ms)",
        "measured time per token (ms)",
        (WIDTH, 3.4),
    ) as axes:
        top = 1.08 * max(max(pair) for pair in hindsight.predicted)
        axes.plot([0, top], [0, top], color="#999999", linewidth=1, label="as predicted")
        axes.fill_between(
            [0, top], [0, 0.9 * top], [0, 1.1 * top], color="#dddddd", label="within 10 %"
        )
        predicted, measured = zip(*hindsight.predicted, strict=True)
        axes.scatter(predicted, measured, color=PALETTE[0], s=16, label="an answer")
        axes.set(xlim=(0, top), ylim=(0, top), aspect="equal")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5))
        legend_below(axes)
    return Picture(
        path=path,
        alt=f"{run}: measured against predicted time per committed token in ms of auto's answers; "
        f"{finding} ({n}).",
    )
