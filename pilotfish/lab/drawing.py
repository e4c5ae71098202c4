"""Draw plots in one style: one palette, and letters that are legible at a phone's width.

Modules that draw import matplotlib's names from here. So if matplotlib is not installed, the same
error arises in all of them.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.extras import install_command
from pilotfish.base.files import write_output

try:
    from matplotlib import style
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("matplotlib"):
        raise
    raise UnsupportedError(
        f"Drawing needs matplotlib, which is not installed: {install_command('field')}."
    ) from error

__all__ = [
    "MARKERS",
    "PALETTE",
    "Axes",
    "FuncFormatter",
    "MaxNLocator",
    "NullFormatter",
    "NullLocator",
    "escape_math",
    "legend_below",
    "panels",
    "plot",
]

INCHES = (4.8, 3.4)  # width and height of a figure (inches); it fits a phone almost unscaled
DPI = 200
# Colours that the common colour blindnesses do not confuse (Okabe and Ito, 2008), darkest first
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE = {
    "font.size": 9,
    "figure.titlesize": 10,
    "figure.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 4.5,
    "figure.constrained_layout.use": True,
}


@contextmanager
def plot(
    path: Path, title: str, xlabel: str, ylabel: str, inches: tuple[float, float] = INCHES
) -> Iterator[Axes]:
    """Yield axes in Pilotfish's style; on exit, write the plot to ``path`` as a PNG.

    xlabel, ylabel: quantity and unit. The title must state the number of samples (n). If n differs
    between the lines, their labels state it instead.
    """
    with panels(path, title, xlabel, [ylabel], inches) as (axes,):
        yield axes


@contextmanager
def panels(
    path: Path,
    title: str,
    xlabel: str | Sequence[str],
    ylabels: Sequence[str],
    inches: tuple[float, float] = INCHES,
    *,
    side_by_side: bool = False,
) -> Iterator[list[Axes]]:
    """Yield axes, one for each of ``ylabels``; otherwise do the same as `plot`.

    xlabel: one label, if all axes share the x axis; otherwise a label for each. side_by_side:
    whether the axes are side by side, not stacked.
    """
    with style.context(_STYLE):
        figure = Figure(figsize=inches, dpi=DPI)
        FigureCanvasAgg(figure)
        rows, columns = (1, len(ylabels)) if side_by_side else (len(ylabels), 1)
        axes: list[Axes] = list(
            figure.subplots(rows, columns, sharex=isinstance(xlabel, str), squeeze=False).flat
        )
        for each, ylabel in zip(axes, ylabels, strict=True):
            each.set_ylabel(ylabel)
            each.set_axisbelow(True)
        figure.suptitle(title, x=0.01, horizontalalignment="left")
        if isinstance(xlabel, str):
            axes[-1].set_xlabel(xlabel)
        else:
            for each, label in zip(axes, xlabel, strict=True):
                each.set_xlabel(label)
        yield axes
        figure.align_ylabels(axes)
        with warnings.catch_warnings():
            # suppress a warning, since a run's name may have letters that the font lacks
            warnings.filterwarnings("ignore", "Glyph")
            picture = BytesIO()
            figure.savefig(picture, format=path.suffix[1:] or "png")
        write_output(path, picture.getvalue())


def legend_below(axes: Axes, columns: int = 3) -> None:
    """Put the legend below the axes, where it does not hide the lines.

    The legend has the labels of all axes of the figure, each once.
    """
    figure = axes.get_figure()
    assert figure is not None
    entries = [zip(*each.get_legend_handles_labels(), strict=True) for each in figure.axes]
    handles = {label: handle for each in reversed(entries) for handle, label in each}
    labels = dict.fromkeys(
        label for each in figure.axes for label in each.get_legend_handles_labels()[1]
    )
    if labels:
        figure.legend(
            [handles[label] for label in labels],
            list(labels),
            loc="outside lower center",
            ncols=columns,
            handletextpad=0.4,
            columnspacing=1.0,
        )


def escape_math(text: str) -> str:
    """Escape text from a file, so that matplotlib does not interpret it as a formula."""
    return text.replace("$", r"\$")
