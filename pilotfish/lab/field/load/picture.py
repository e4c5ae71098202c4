"""The picture of a load: milliseconds per token by number of devices, and the limit."""

from collections.abc import Sequence
from pathlib import Path

from pilotfish.lab.drawing import MARKERS, PALETTE, MaxNLocator, legend_below, plot
from pilotfish.lab.field.load.figures import TAIL, PointFigures, capacity

_TOP = 4.0  # multiple of the limit above which nothing is drawn: else one slow point hides all


def draw(path: Path, measured: Sequence[PointFigures], limit_s: float, where: str) -> bool:
    """Draw a line for each method; returns whether there was anything to draw.

    Points with fewer than `FEWEST_VALUES` answers are not drawn. where: the link, for the title.
    """
    methods = list(dict.fromkeys(each.method for each in measured))
    drawn = {
        method: [
            (each.devices, each.token_ms.p90)
            for each in sorted(measured, key=lambda each: each.devices)
            if each.method == method and each.token_ms is not None
        ]
        for method in methods
    }
    counts = [each.n for each in measured if each.token_ms is not None]
    if not counts:
        return False
    title = f"Devices an edge carries at {limit_s * 1e3:g} ms a token\n{where}"
    fewest, most = min(counts), max(counts)
    number = str(most) if fewest == most else f"{fewest} to {most}"
    title += f" (n = {number} answers a point)"
    label = f"ms a token, p{TAIL} over answers"
    highest, top = max(y for line in drawn.values() for _, y in line), _TOP * limit_s * 1e3
    if highest > top:
        label += f"\nabove {top:g} ms not drawn"
    with plot(path, title, "devices", label, (4.8, 3.9)) as axes:
        for index, method in enumerate(methods):
            if not drawn[method]:
                continue
            x, y = zip(*drawn[method], strict=True)
            axes.plot(
                x,
                y,
                color=PALETTE[index % len(PALETTE)],
                marker=MARKERS[index % len(MARKERS)],
                label=f"{method}: {capacity(method, measured, limit_s)}",
            )
        axes.axhline(limit_s * 1e3, color="#888888", linestyle="--")
        axes.set_ylim(bottom=0.0, top=top if highest > top else None)
        axes.set_xlim(left=0.0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend_below(axes, columns=2)
    return True
