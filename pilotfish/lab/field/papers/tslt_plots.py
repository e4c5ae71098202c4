"""Plots of figures 3 to 6 of tslt, from measured rows; they need matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pilotfish.lab.field.papers.sheet import Row, number

if TYPE_CHECKING:
    from pilotfish.lab.drawing import Axes

_TICKS = (8, 32, 128, 320, 1024, 3200)


def draw_mass(printed: Sequence[Row], rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw figure 3: the retained mass by K, with its interval; printed: the paper's rows."""
    from pilotfish.lab.drawing import PALETTE, plot

    path = folder / "tslt_figure3_measured.png"
    title = f"Mass of the drafter's top K tokens\nmeasured, {rows[0]['n']} prompts"
    with plot(path, title, "K, tokens kept", "mass, 1 − σ") as axes:
        _line(axes, rows, "mass", PALETTE[0], "mean, 95 % interval")
        points = [[number(row, key) for row in printed] for key in ("kept", "mass_printed")]
        axes.plot(*points, "D", color=PALETTE[1], markersize=8, label="paper, its own pair")
        _scale(axes, rows)
        axes.set_ylim(0.5, 1.0)
        axes.legend(loc="lower right")
    return [path]


def draw_acceptance(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw figure 4: the acceptance by K, of a chain and of a tree."""
    from pilotfish.lab.drawing import PALETTE, plot

    path = folder / "tslt_figure4_measured.png"
    title = f"Acceptance under truncation\nmeasured, {rows[0]['n']} prompts"
    with plot(path, title, "K, tokens kept", "acceptance α") as axes:
        sizes = [number(row, "kept") for row in rows]
        for name, colour, label in (
            ("tree", PALETTE[1], "MC, two candidates"),
            ("chain", PALETTE[0], "SC, one candidate"),
        ):
            _line(axes, rows, name, colour, label)
            sent = [number(row, f"{name}_shipped") for row in rows]
            axes.plot(sizes, sent, "x", color=colour, label=f"{label[:2]}, as sent")
        _scale(axes, rows)
        axes.set_ylim(0.5, 1.0)
        axes.legend(loc="lower right")
    return [path]


def draw_speed_up(figure: int, name: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw figure 5 or 6: the speed-up by uplink rate, a line for each K. name: the setting's."""
    from pilotfish.lab.drawing import MARKERS, PALETTE, plot

    path = folder / f"tslt_figure{figure}_measured.png"
    title = f"Speed-up of {name}\nmeasured rounds, modelled uplink"
    with plot(path, title, "uplink rate (Mbit/s)", "speed-up over the target alone (×)") as axes:
        sizes = sorted({number(row, "kept") for row in rows})
        for size, colour, marker in zip(sizes, PALETTE, MARKERS, strict=False):
            chosen = [row for row in rows if row["kept"] == size]
            rates = [number(row, "uplink_mbps") for row in chosen]
            values = [number(row, "speed_up") for row in chosen]
            axes.plot(rates, values, marker=marker, color=colour, label=f"K = {size:,.0f}")
        axes.axhline(1.0, color="#888888", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
        axes.set_ylim(bottom=0)
        axes.legend()
    return [path]


def _line(axes: "Axes", rows: Sequence[Row], name: str, colour: str, label: str) -> None:
    """Draw a column by K, and its interval as a band if the rows have one."""
    sizes = [number(row, "kept") for row in rows]
    axes.plot(sizes, [number(row, name) for row in rows], "o-", color=colour, label=label)
    if all(row[f"{name}_low"] is not None for row in rows):
        low, high = ([number(row, f"{name}_{end}") for row in rows] for end in ("low", "high"))
        axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)


def _scale(axes: "Axes", rows: Sequence[Row]) -> None:
    """Make the axis of K logarithmic, from the smallest K to the vocabulary."""
    most = number(rows[-1], "kept")
    ticks = [*(tick for tick in _TICKS if tick < most / 2), int(most)]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
