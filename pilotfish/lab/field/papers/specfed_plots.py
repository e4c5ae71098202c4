"""Draw figures 2 and 3 of specfed from measured rows."""

from collections.abc import Sequence
from math import nan
from pathlib import Path

from pilotfish.lab.field.papers.sheet import Row, number

# for each figure: name of its value, suffix of its bound, title, label of the axis
FIGURES = {
    "figure2": ("bias", "_17", "Bias of the average", "‖p̃ − p‖₁ (probability mass)"),
    "figure3": ("vary", "_19", "Change of acceptance", "|β̃ − β| (probability)"),
}
_LEAST, _MOST = 1e-5, 60.0  # limits of the y axis; the legend takes the space above 2


def draw_figure(figure: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw figure2 or figure3, one picture for each worker; return the files' paths."""
    workers = dict.fromkeys(str(row["worker"]) for row in rows)
    return [
        _draw(figure, at, [row for row in rows if row["worker"] == worker], folder)
        for at, worker in enumerate(workers, 1)
    ]


def _draw(figure: str, worker: int, rows: Sequence[Row], folder: Path) -> Path:
    from pilotfish.lab.drawing import MARKERS, PALETTE, plot

    what, bound, title, label = FIGURES[figure]
    path = folder / f"specfed_{figure}_worker{worker}_measured.png"
    styles = {f"{what}{bound}": ":", f"{what}_5": "--", f"{what}_6": "-"}
    title = (
        f"{title}, measured\ntarget, and a worker of {rows[0]['worker']}; {rows[0]['n']} prompts"
    )
    with plot(path, title, "K, tokens that a worker sends", label) as axes:
        temperatures = sorted({number(row, "T") for row in rows})
        for temperature, colour, marker in zip(temperatures, PALETTE, MARKERS, strict=False):
            chosen = [row for row in rows if row["T"] == temperature]
            name = f"T = {temperature:g}, {chosen[0]['positions']} positions"
            axes.plot([], [], color=colour, marker=marker, label=name)
            for key, style in styles.items():
                # a logarithmic axis has no 0
                values = [value if (value := number(row, key)) > 0.0 else nan for row in chosen]
                mark = marker if style == "-" else ""
                sizes = [number(row, "K") for row in chosen]
                axes.plot(sizes, values, linestyle=style, marker=mark, color=colour)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks([32, 320, 3200], ["32", "320", "3200"])
        axes.set_ylim(_LEAST, _MOST)
        names = (f"bound ({bound[1:]})", "renormalised (5)", "spread (6)")
        for style, each in zip(styles.values(), names, strict=True):
            axes.plot([], [], color="#555555", linestyle=style, label=each)
        axes.legend(loc="upper left", ncols=2)
    return path
