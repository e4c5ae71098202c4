"""Plot the state of the link during a run: the device's estimates when each answer began.

In: the link state of each answer. Out: a plot with a panel for each measured quantity.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from pilotfish.lab.drawing import PALETTE, Axes, panels
from pilotfish.lab.field.report.canvas import WIDTH, title
from pilotfish.lab.field.report.link import Quantity, measured_quantities
from pilotfish.lab.field.run import Answer
from pilotfish.lab.page import Picture

_PAUSE_S = 600.0  # gap between two answers (s) above which the run counts as interrupted


def timeline(path: Path, run: str, answers: Sequence[Answer]) -> Picture | None:
    """Draw the plot; return None if no quantity was measured."""
    measured = measured_quantities(answers)
    if not measured:
        return None
    labels = list(dict.fromkeys(quantity.panel for quantity in measured))
    n = f"n = {sum(a.link is not None for a in answers)} answers"
    finding = _finding(measured[0], answers)
    elapsed, pauses = _elapsed_s([answer.started_unix_s for answer in answers])
    scale, unit = (60.0, "minutes") if elapsed[-1] > 180.0 else (1.0, "seconds")
    with panels(
        path,
        title(run, finding, n),
        f"time in the run ({unit}{', pauses cut out' if pauses else ''})",
        labels,
        (WIDTH, 1.5 + 1.25 * len(labels)),
    ) as stacked_axes:
        for axes, label in zip(stacked_axes, labels, strict=True):
            lines = [quantity for quantity in measured if quantity.panel == label]
            for line, colour in zip(lines, PALETTE, strict=False):
                points = line.points(answers)
                axes.plot(
                    [elapsed[index] / scale for index, _ in points],
                    [value for _, value in points],
                    color=colour,
                    marker=".",
                    markersize=3,
                    linewidth=0.8,
                    label=line.name,
                )
            for pause in pauses:
                axes.axvline(pause / scale, color="#666666", linestyle=":", linewidth=1)
            _finish(axes, label, len(lines))
    return Picture(
        path=path,
        alt=f"{run}: against time in {unit}, {', '.join(line.name for line in measured)} of the "
        f"link ({', '.join(label.split(chr(10))[-1] for label in labels)}); {finding} ({n}).",
    )


def _finish(axes: Axes, label: str, lines: int) -> None:
    """Start the y axis just below zero, so that a line at zero is visible; not if it is in dBm."""
    if "dBm" not in label:
        top = axes.get_ylim()[1] if axes.dataLim.ymax > 0 else 1.0
        axes.set_ylim(-0.04 * top, top)
    if lines > 1:
        axes.legend(loc="best", ncols=lines, handlelength=1.2)


def _finding(quantity: Quantity, answers: Sequence[Answer]) -> str:
    """Describe the range of a quantity's values in words."""
    values = [value for _, value in quantity.points(answers)]
    unit = quantity.panel.split("(")[1].rstrip(")")
    low, high = (f"{v:.0f}" if v >= 100 else f"{v:.3g}" for v in (min(values), max(values)))
    return f"{quantity.name} from {low} to {high} {unit}"


def _elapsed_s(started_s: Sequence[float]) -> tuple[list[float], list[float]]:
    """Compute each answer's seconds since the first, without pauses, and the pauses' times."""
    elapsed, pauses = [0.0], []
    for before, after in pairwise(started_s):
        if 0.0 <= after - before < _PAUSE_S:
            elapsed.append(elapsed[-1] + after - before)
        else:
            pauses.append(elapsed[-1])
            elapsed.append(elapsed[-1])
    return elapsed, pauses
