"""When `stream`, stop-and-wait or `ahead` is fastest: a picture over RTT and the target's pace.

    python benchmarks/when.py [--drafter A,MS[,FIRST] …] [--points JSON] [--out FILE.svg]

One panel for each drafter: its α, the milliseconds of a token while the target runs and, where that
is another, its α right after a correction. A field's colour says what is fastest by the model
(`speculation.ahead`, `speculation.latency`): rounds are those of the best window from 1 to 16.
`stream` stands where nothing gains 5 %. The lines tell how many times as fast as `stream` the
fastest is. JSON has what was measured, a list of ``{"rtt_ms": 20, "pass_ms": 40, "best": "ahead",
"ratio": 1.6}``, each with the ``"panel"`` that it belongs to (0). Needs matplotlib (the extra
``field``).
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.ahead import survival
from pilotfish.speculation.speeds import GAIN, best_window, hinted_token_s
from pilotfish.wire.protocols.ahead import MOST_DRAFTS

FASTEST = ("stream", "ahead", "rounds")  # as they lie beside each other
WINDOWS = range(1, 17)
RTTS_MS = np.concatenate([np.linspace(0, 10, 11)[:-1], np.geomspace(10, 300, 35)])
PASSES_MS = np.geomspace(8, 160, 40)
LINES = (1.2, 1.5, 2.0, 2.5, 3.0)
POSITION = 0.01  # of a pass: what each further position in it takes
RTT_TICKS, PASS_TICKS = (0, 5, 10, 20, 50, 100, 200), (10, 20, 40, 80, 130)
COLOURS = ("#888888", "#0072B2", "#D55E00")  # as in `lab.drawing`
Grid = NDArray[np.float64]  # [paces, RTTs]


class Drafter(NamedTuple):
    """alpha: how often a token of it is right; first: right after a correction."""

    alpha: float
    draft_ms: float
    first: float

    @classmethod
    def read(cls, text: str) -> "Drafter":
        """An argparse type: α and milliseconds, and ``first`` where it differs."""
        alpha, draft_ms, *first = map(float, text.split(","))
        return cls(alpha, draft_ms, *first or [alpha])

    def __str__(self) -> str:
        after = f", {self.first:g} after a correction" if self.first != self.alpha else ""
        return f"α = {self.alpha:g}{after}; {self.draft_ms:g} ms a drafted token"


def speeds(drafter: Drafter, rtt_ms: float, pass_ms: float) -> dict[str, float]:
    """Tokens a second over those of `stream`, of each."""
    pass_s = [pass_ms * 1e-3 * (1 + POSITION * drafts) for drafts in range(1 + max(WINDOWS))]
    paces = {"rtt_s": rtt_ms * 1e-3, "draft_s": drafter.draft_ms * 1e-3}
    hazards = np.array([drafter.first, *[drafter.alpha] * max(WINDOWS)])
    ahead_s = hinted_token_s(hazards, pass_s=pass_s[: MOST_DRAFTS + 1], **paces)
    tokens = np.cumsum(survival(hazards)).tolist()  # of rounds, by their window
    _, round_s = best_window(tokens[1 : max(WINDOWS) + 1], pass_s=pass_s, **paces)
    return {"stream": 1.0, "ahead": pass_s[0] / ahead_s, "rounds": pass_s[0] / round_s}


def fields(drafter: Drafter) -> tuple[Grid, Grid]:
    """What is fastest, as an index into `FASTEST`, and its speed; each [paces, RTTs]."""
    best = np.zeros((len(PASSES_MS), len(RTTS_MS)))
    ratio = np.ones_like(best)
    for row, pass_ms in enumerate(PASSES_MS):
        for column, rtt_ms in enumerate(RTTS_MS):
            result = speeds(drafter, float(rtt_ms), float(pass_ms))
            name = max(result, key=result.__getitem__)
            ratio[row, column] = result[name]
            best[row, column] = FASTEST.index(name) if result[name] >= GAIN else 0
    return best, ratio


def draw(path: Path, drafters: Sequence[Drafter], points: Sequence[Mapping[str, Any]]) -> None:
    """Write the picture, as SVG in which text stays text."""
    from matplotlib import rc_context

    from pilotfish.lab.drawing import panels

    title = "What is fastest, and how many times as fast as stream"
    ylabels = ["target's pass (ms)"] * len(drafters)
    inches = (4.8, 0.8 + 2.6 * len(drafters))
    with (
        rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}),
        panels(path, title, "RTT (ms)", ylabels, inches) as drawn,
    ):
        for at, (axes, drafter) in enumerate(zip(drawn, drafters, strict=True)):
            axes.set_title(str(drafter), fontsize=8, loc="left")
            _draw_fields(axes, drafter)
            _draw_points(axes, [point for point in points if point.get("panel", 0) == at])
            axes.set_xscale("symlog", linthresh=10)
            axes.set_yscale("log")
            axes.set_xlim(-0.3, RTTS_MS[-1])  # points at 0 are whole
            axes.set_ylim(PASSES_MS[0], PASSES_MS[-1])
            axes.set_xticks(RTT_TICKS, map(str, RTT_TICKS))
            axes.set_yticks(PASS_TICKS, map(str, PASS_TICKS))
            axes.minorticks_off()
        drawn[-1].legend(loc="lower right", ncols=3, frameon=True)


def _draw_fields(axes: Any, drafter: Drafter) -> None:
    """The model: fields, and lines of equal gain."""
    best, ratio = fields(drafter)
    levels = [at - 0.5 for at in range(len(FASTEST) + 1)]
    axes.contourf(RTTS_MS, PASSES_MS, best, levels=levels, colors=COLOURS, alpha=0.3)
    lines = axes.contour(RTTS_MS, PASSES_MS, ratio, levels=LINES, colors="#444444", linewidths=0.7)
    axes.clabel(lines, fmt="%g ×", fontsize=7, inline_spacing=2)


def _draw_points(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    """What was measured; without any, the markers still name the fields' colours."""
    for name, colour, marker in zip(FASTEST, COLOURS, "osD", strict=True):
        there = [(point["rtt_ms"], point["pass_ms"]) for point in points if point["best"] == name]
        x, y = zip(*there, strict=True) if there else ((), ())
        axes.plot(x, y, marker, color=colour, markeredgecolor="#000000", label=name)
    for point in points:
        axes.annotate(
            f"{point['ratio']:.2f}",
            (point["rtt_ms"], point["pass_ms"]),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=7,
        )


def main() -> int:
    """Draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=Path, metavar="JSON", help="what was measured")
    parser.add_argument(
        "--drafter",
        type=Drafter.read,
        action="append",
        metavar="A,MS[,FIRST]",
        help="a panel (default: 0.7,6 and 0.9,6)",
    )
    parser.add_argument("--out", type=Path, default=Path("docs/when.svg"), metavar="FILE")
    args = parser.parse_args()
    if find_spec("matplotlib") is None:
        parser.error("it needs matplotlib: pip install 'pilotfish[field]'")
    points = json.loads(args.points.read_text()) if args.points else []
    drafters = args.drafter or [Drafter.read("0.7,6"), Drafter.read("0.9,6")]
    draw(args.out, drafters, points)
    return 0


if __name__ == "__main__":
    sys.exit(main())
