"""Plots of figures 3, 4, 5 and 7 of wisv, from measured rows; they need matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotfish.lab.field.papers.sheet import Row, number

if TYPE_CHECKING:
    from pilotfish.lab.drawing import Axes

_WINDOW = "draft window L (tokens)"


def draw_accuracy(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw figure 3: right answers by threshold, a line for each link."""
    from pilotfish.lab.drawing import plot

    path = folder / "wisv_figure3_measured.png"
    title = f"Right answers by threshold\nmeasured, {rows[0]['n']} questions"
    with plot(path, title, "threshold (index)", "right answers (%)") as axes:
        for rate, chosen, style in _by_rate(rows):
            _line(axes, chosen, "threshold", "right", f"{rate:g} Mbit/s", **style)
            _band(axes, chosen, "threshold", "right", style["color"])
        axes.axhline(number(rows[0], "right"), color="#888888", linestyle="--", label="greedy")
        axes.set_ylim(0, 100)
        axes.legend()
    return [path]


def draw_latency(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw figure 4: the latency by window, a picture for each link."""
    from pilotfish.lab.drawing import MARKERS, PALETTE, plot

    paths = []
    for mbps, rtt_ms in dict.fromkeys((row["rate_mbps"], row["rtt_ms"]) for row in rows):
        chosen = [row for row in rows if (row["rate_mbps"], row["rtt_ms"]) == (mbps, rtt_ms)]
        path = folder / f"wisv_figure4_{mbps}mbps_{rtt_ms}ms_measured.png"
        title = (
            f"Latency of an answer, {mbps} Mbit/s, RTT {rtt_ms} ms\nmeasured rounds, modelled link"
        )
        with plot(path, title, _WINDOW, "latency (s)") as axes:
            # curves may coincide: the first one is thick, the later ones are broken
            dashes = ("-", "-", "--", ":")
            methods = ("greedy", "reject", "fh", "sh")
            for method, colour, marker, dash in zip(
                methods, PALETTE, MARKERS, dashes, strict=False
            ):
                width = 3.5 if method == "greedy" else 1.5
                style = {"color": colour, "marker": marker, "linestyle": dash, "linewidth": width}
                _line(axes, chosen, "window", f"{method}_s", method, **style)
            axes.set_ylim(bottom=0)
            axes.legend()
        paths.append(path)
    return paths


def draw_ablation(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw figure 5: the AAL by window with and without the link, a picture for each rate."""
    from pilotfish.lab.drawing import PALETTE, plot

    paths = []
    for rate, chosen, _ in _by_rate(rows):
        path = folder / f"wisv_figure5_{rate:g}mbps_measured.png"
        title = (
            f"A head with and without the link, {rate:g} Mbit/s\nmeasured, {rows[0]['n']} questions"
        )
        with plot(path, title, _WINDOW, "AAL (tokens per round)") as axes:
            style = {"color": PALETTE[0], "linewidth": 3}
            _line(axes, chosen, "window", "aal_with_link", "with the link", **style)
            style = {"color": PALETTE[1], "linestyle": "--"}
            _line(axes, chosen, "window", "aal_without_link", "without", **style)
            axes.set_ylim(bottom=0)
            axes.legend()
        paths.append(path)
    return paths


def draw_testbed(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw figure 7: the latency by window, of `greedy` and at both distances."""
    from pilotfish.lab.drawing import PALETTE, plot

    path = folder / "wisv_figure7_measured.png"
    title = "Latency with the upload chosen by the RTT\nmeasured rounds, modelled link"
    distances = sorted({number(row, "distance_m") for row in rows}, reverse=True)
    with plot(path, title, _WINDOW, "latency (s)") as axes:
        for distance, colour in zip(distances, PALETTE, strict=False):
            chosen = [row for row in rows if row["distance_m"] == distance]
            place = f"{distance:g} m, {chosen[0]['rate_mbps']} Mbit/s"
            style = {"color": colour, "marker": "o"}
            _line(axes, chosen, "window", "latency_s", f"wisv, {place}", **style)
            style |= {"linestyle": "--"}
            _line(axes, chosen, "window", "greedy_s", f"greedy, {place}", **style)
        axes.set_ylim(bottom=0)
        axes.legend()
    return [path]


def _by_rate(rows: Sequence[Row]) -> list[tuple[float, list[Row], dict[str, str]]]:
    """Split rows by rate; return each rate, its rows, and the style of its line."""
    from pilotfish.lab.drawing import MARKERS, PALETTE

    rates = dict.fromkeys(number(row, "rate_mbps") for row in rows)
    return [
        (rate, [row for row in rows if row["rate_mbps"] == rate], {"color": colour, "marker": mark})
        for rate, colour, mark in zip(rates, PALETTE, MARKERS, strict=False)
    ]


def _line(
    axes: "Axes", rows: Sequence[Row], across: str, name: str, label: str, **style: Any
) -> None:
    """Draw a column against another one."""
    places = [number(row, across) for row in rows]
    axes.plot(places, [number(row, name) for row in rows], label=label or None, **style)


def _band(axes: "Axes", rows: Sequence[Row], across: str, name: str, colour: str) -> None:
    """Draw a column's interval, if the rows have one."""
    if all(row[f"{name}_low"] is not None for row in rows):
        places = [number(row, across) for row in rows]
        low, high = ([number(row, f"{name}_{end}") for row in rows] for end in ("low", "high"))
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
