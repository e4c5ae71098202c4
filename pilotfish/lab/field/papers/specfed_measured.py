"""Figures 2 and 3 of specfed for our models, as measured by `benchmarks/federated.py`.

All models are exports of SmolLM2-135M-Instruct (V = 49,152; origin 06bcc47f710b3cb5). A federation
has two workers (fp32 and int8; each has the weight ½) or three workers (these two, and an int8
export of the first 27 of 30 layers; weights 0.4, 0.4 and 0.2). The int4 export drafts. Each
federation answered the benchmark's eight prompts with at most 99 tokens. Values were sent as fp32;
the bytes are a worker's frame for γ + 1 = 9 positions. ONNX Runtime 1.31 ran on a CPU. The int8
kernels of another CPU give slightly different digits.
"""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path

from pilotfish.lab.field.papers.sheet import Sheet, Value, number, read_measurements

SHOWN = (64, 320, 3200)
WORKERS = {2: "fp32, int8", 3: "fp32, int8, 27 layers"}
FIGURES = {
    "specfed_figure2": ("bias", "_17", "Bias of the average", "‖p̃ − p‖₁ (probability mass)"),
    "specfed_figure3": ("vary", "_19", "Change of acceptance", "|β̃ − β| (probability)"),
}
_LEAST, _MOST = 1e-5, 60.0  # limits of the y axis; the legend takes the space above 2


ROWS: list[dict[str, Value]] = [
    {"who": WORKERS[int(number(row, "workers"))], **row}
    for row in read_measurements(
        "specfed_measured.csv", {"workers", "K", "positions", "fp16", "levels"}
    )
]


def measurements() -> Sheet:
    """Tabulate the measurements; a terminal shows only some values of K."""
    columns: dict[str, tuple[str, int | None]] = {
        "workers": ("M", 0),
        "T": ("T", 1),
        "K": ("K", 0),
        "rho_1": ("ρ₁", 3),
        "bias_5": ("bias (5)", 3),
        "bias_6": ("(6)", 3),
        "bias_17": ("≤ (17)", 3),
        "vary_5": ("Δβ (5)", 3),
        "vary_6": ("(6)", 3),
        "vary_19": ("≤ (19)", 3),
    }
    note = "; ".join(f"M = {count}: {who}" for count, who in WORKERS.items())
    note += ". Means over all positions; none exceeds its bound. JSON has bytes and more K."
    title = "Figures 2 and 3, measured on SmolLM2-135M at temperature T"
    return Sheet("measured", title, columns, ROWS, note, lambda row: row["K"] in SHOWN)


def draw(rows: Sequence[Mapping[str, Value]], folder: Path) -> list[Path]:
    """Draw figures 2 and 3 for one federation; return the files' paths."""
    from pilotfish.lab.drawing import MARKERS, PALETTE, plot

    paths = []
    temperatures = sorted({number(row, "T") for row in rows})
    for name, (what, bound, title, label) in FIGURES.items():
        path = folder / f"{name}_{rows[0]['workers']}_workers.png"
        styles = {f"{what}{bound}": ":", f"{what}_5": "--", f"{what}_6": "-"}
        with plot(path, f"{title}, measured\n{rows[0]['who']}", "kept tokens K", label) as axes:
            for temperature, colour, marker in zip(temperatures, PALETTE, MARKERS, strict=False):
                chosen = [row for row in rows if row["T"] == temperature]
                top_k = [number(row, "K") for row in chosen]
                n = chosen[0]["positions"]
                axes.plot(
                    [], [], color=colour, marker=marker, label=f"T = {temperature:g}, n = {n}"
                )
                for key, style in styles.items():
                    # a logarithmic axis has no 0
                    values = [value if (value := number(row, key)) > 0.0 else nan for row in chosen]
                    mark = marker if style == "-" else ""
                    axes.plot(top_k, values, linestyle=style, marker=mark, color=colour)
            axes.set(xscale="log", yscale="log")
            axes.set_xticks([32, 320, 3200, 32000], ["32", "320", "3200", "32000"])
            axes.set_ylim(_LEAST, _MOST)
            names = (f"bound ({bound[1:]})", "renormalised (5)", "spread (6)")
            for style, each in zip(styles.values(), names, strict=True):
                axes.plot([], [], color="#555555", linestyle=style, label=each)
            axes.legend(loc="upper left", ncols=2)
        paths.append(path)
    return paths
