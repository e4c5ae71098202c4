"""Draw figures 2 and 3 of specfed from the measured rows that this version ships."""

from math import nan
from pathlib import Path

from pilotfish.lab.field.papers.figure_file import shipped_figure
from pilotfish.lab.field.papers.sheet import number

# for each figure: name of its value, suffix of its bound, title, label of the axis
FIGURES = {
    "figure2": ("bias", "_17", "Bias of the average", "‖p̃ − p‖₁ (probability mass)"),
    "figure3": ("vary", "_19", "Change of acceptance", "|β̃ − β| (probability)"),
}
_LEAST, _MOST = 1e-5, 60.0  # limits of the y axis; the legend takes the space above 2


def draw(folder: Path) -> list[Path]:
    """Draw the figures that are shipped, for the last worker; return the files' paths."""
    return [path for figure in FIGURES if (path := _draw(figure, folder)) is not None]


def _draw(figure: str, folder: Path) -> Path | None:
    from pilotfish.lab.drawing import MARKERS, PALETTE, plot

    shipped = shipped_figure("specfed", figure)
    if shipped is None:
        return None
    what, bound, title, label = FIGURES[figure]
    worker = shipped.rows[-1]["worker"]
    rows = [row for row in shipped.rows if row["worker"] == worker]
    path = folder / f"specfed_{figure}.png"
    styles = {f"{what}{bound}": ":", f"{what}_5": "--", f"{what}_6": "-"}
    title = f"{title}, measured\ntarget, and a worker of {worker}; {rows[0]['n']} prompts"
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
