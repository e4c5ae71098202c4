"""Draw a comparison of drafters in three panels: α by depth, survival, and tokens/s by RTT."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from pilotfish.lab.drawing import Axes, escape_math, legend_below, panels
from pilotfish.lab.field.comparison import DrafterComparison
from pilotfish.lab.field.drafter_figures import DrafterFigures
from pilotfish.lab.field.report.canvas import PlotStyle
from pilotfish.lab.field.resampling import Estimate

_INCHES = (4.8, 8.0)
_LETTERS = 34
_CAPTION_LETTERS = 56
_XLABELS = ("accepted drafts right before it", "k, drafts in a row", "RTT (ms)")
_YLABELS = ("α at this depth", "S(k), share of runs", "tokens/s after\nthe first round")
_APART = 0.06  # horizontal distance (data units) between drafters' marks, so that none is hidden


def draw(path: Path, comparison: DrafterComparison) -> None:
    """Draw a comparison into a PNG file."""
    title = f"Drafters for one target\n(n = {comparison.prompts} prompts, bars: 95 % intervals)"
    xlabels = list(_XLABELS)
    if comparison.warning:
        xlabels[-1] += "\n\n" + fill(comparison.warning, _CAPTION_LETTERS)
    with panels(path, title, xlabels, _YLABELS, _INCHES) as (depths, runs, speeds):
        styles = PlotStyle(figures.name for figures in comparison.drafters)
        for index, figures in enumerate(comparison.drafters):
            style = {
                "color": styles.colour_of(figures.name),
                "marker": styles.marker_of(figures.name),
            }
            _draw(depths, runs, speeds, figures, style, index)
        _label(
            depths,
            [
                _depth_range(figures.first, figures.end)
                for figures in comparison.drafters[0].by_depth
            ],
        )
        _label(runs, [str(length) for length in comparison.drafters[0].survival])
        for axes in (depths, runs):
            axes.set_ylim(0.0, 1.0)
        speeds.axhline(
            comparison.streamed_per_s, color="#888888", linestyle="--", label="stream alone"
        )
        speeds.set_ylim(bottom=0.0)
        legend_below(speeds, columns=2)


def _draw(
    depths: Axes,
    runs: Axes,
    speeds: Axes,
    figures: DrafterFigures,
    style: dict[str, Any],
    index: int,
) -> None:
    """Draw one drafter's results into all three panels."""
    for axes, estimates in (
        (depths, [depth.reliable_acceptance for depth in figures.by_depth]),
        (runs, list(figures.survival.values())),
    ):
        _points(
            axes,
            [position + _APART * index for position in range(len(estimates))],
            estimates,
            style,
        )
    rates = [
        expected.tokens_per_s if figures.prompts else Estimate(None)
        for expected in figures.expected
    ]
    rtts_ms = [expected.rtt_s * 1e3 for expected in figures.expected]
    _points(speeds, rtts_ms, rates, style | {"label": escape_math(_last_letters(figures.name))})


def _points(
    axes: Axes, positions: Sequence[float], estimates: Sequence[Estimate], style: dict[str, Any]
) -> None:
    """Draw each estimate that has a value, with its confidence interval."""
    x, y, below, above = [], [], [], []
    for position, (value, low, high) in zip(positions, estimates, strict=True):
        if value is not None:
            x.append(position)
            y.append(value)
            below.append(0.0 if low is None else max(0.0, value - low))
            above.append(0.0 if high is None else max(0.0, high - value))
    axes.errorbar(x, y, yerr=[below, above], capsize=2, linewidth=1.2, **style)


def _last_letters(name: str) -> str:
    """Shorten a name to its last letters, because paths differ most at the end."""
    return name if len(name) <= _LETTERS else "…" + name[1 - _LETTERS :]


def _depth_range(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first}–{end - 1}"


def _label(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_xticks(range(len(labels)), labels)
