"""Draw decentralized's node scaling from measured rows."""

from collections.abc import Sequence
from pathlib import Path

from pilotfish.lab.field.papers.sheet import Row, number


def draw_nodes(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the time of a round against N, and the gain against t₁; return the files' paths."""
    return [_draw_rounds(rows, folder), _draw_gain(rows, folder)]


def _draw_rounds(rows: Sequence[Row], folder: Path) -> Path:
    from pilotfish.lab.drawing import MARKERS, PALETTE, plot

    path, window = folder / "decentralized_nodes_rounds_measured.png", 4
    title = f"A round over N stages, γ = {window}, medians over {rows[0]['n']} prompts"
    title += "\npoints: measured; solid: model; dotted: equation 4"
    with plot(path, title, "nodes N", "round (ms)") as axes:
        ratios = sorted({number(row, "t1_over_c") for row in rows})
        for ratio, colour, marker in zip(ratios, PALETTE, MARKERS, strict=False):
            chosen = [row for row in rows if (row["window"], row["t1_over_c"]) == (window, ratio)]
            nodes = [number(row, "nodes") for row in chosen]
            label = f"t₁ = {ratio:g} c"
            axes.plot(
                nodes, [number(r, "round_ms") for r in chosen], marker, color=colour, label=label
            )
            axes.plot(nodes, [number(r, "model_ms") for r in chosen], "-", color=colour)
            axes.plot(nodes, [number(r, "eq4_ms") for r in chosen], ":", color=colour)
        axes.set_xticks(sorted({number(row, "nodes") for row in rows}))
        axes.set_ylim(bottom=0)
        axes.legend(ncols=2)
    return path


def _draw_gain(rows: Sequence[Row], folder: Path) -> Path:
    from pilotfish.lab.drawing import MARKERS, PALETTE, plot

    path = folder / "decentralized_nodes_gain_measured.png"
    nodes = max(number(row, "nodes") for row in rows)
    title = f"Speculation over {nodes:g} stages, medians over {rows[0]['n']} prompts"
    title += "\nsolid: measured; dotted: equation 9"
    with plot(
        path, title, "t₁ / compute time of a stage", "tokens/s relative to token by token (×)"
    ) as axes:
        windows = sorted({number(row, "window") for row in rows} - {0.0})
        for window, colour, marker in zip(windows, PALETTE, MARKERS, strict=False):
            chosen = [row for row in rows if (row["nodes"], row["window"]) == (nodes, window)]
            ratios = [number(row, "t1_over_c") for row in chosen]
            k = number(chosen[0], "tokens")
            gains = [number(row, "gain") for row in chosen]
            axes.plot(
                ratios, gains, f"-{marker}", color=colour, label=f"γ = {window:g}, k = {k:.1f}"
            )
            axes.plot(ratios, [number(row, "eq9") for row in chosen], ":", color=colour)
        axes.axhline(1.0, color="#888888", linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.legend()
    return path
