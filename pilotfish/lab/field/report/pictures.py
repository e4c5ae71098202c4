"""Draw all plots of a report."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from pilotfish.lab.field.report import choice_plots, latency_plots, plots
from pilotfish.lab.field.report.canvas import MOST_ROWS, MOST_SERIES, PlotStyle
from pilotfish.lab.field.report.figures import Figures, by_series
from pilotfish.lab.field.report.measured import MeasuredRun
from pilotfish.lab.field.report.timeline import timeline
from pilotfish.lab.page import Picture

_KINDS = 7  # number of plots for each run


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """The pictures of a report, by kind.

    Each list has one picture for each run with this kind, in the order of the runs; a run with many
    varied options has several, each with a part of them. compared: one picture that compares all
    runs; empty for a single run.
    """

    compared: list[Picture]
    latency: list[Picture]
    stages: list[Picture]
    depths: list[Picture]
    bytes_per_token: list[Picture]
    link: list[Picture]
    alternatives: list[Picture]
    predictions: list[Picture]


def draw(
    runs: Sequence[MeasuredRun], folder: Path, show: Callable[[int, int], None] = lambda *_: None
) -> Gallery:
    """Draw all plots into a folder; file names begin with the run's number and its name.

    show: callback after each plot; arguments: number of finished plots, number of all plots.
    """
    styles = PlotStyle(f.configuration.protocol for run in runs for f in run.figures)
    series = PlotStyle(label for run in runs for label in by_series(run.figures))
    done = 0

    def each(
        kind: str,
        plot: Callable[[Path, MeasuredRun], Picture | None],
        split: Callable[[MeasuredRun], list[MeasuredRun]] = lambda run: [run],
    ) -> list[Picture]:
        nonlocal done
        drawn = []
        for number, run in enumerate(runs, 1):
            for index, part in enumerate(split(run)):
                name = f"{kind}-{index + 1}" if index else kind
                drawn.append(plot(folder / _name(number, run, name), part))
            done += 1
            show(done, _KINDS * len(runs))
        return [picture for picture in drawn if picture is not None]

    comparison = latency_plots.compare_runs(
        folder / "compared.png", [(run.name, run.figures) for run in runs], styles
    )
    return Gallery(
        compared=[comparison] if comparison else [],
        latency=each(
            "latency",
            lambda path, run: latency_plots.latency(path, run.name, run.figures, series),
            _split_by_series,
        ),
        stages=each(
            "stages", lambda path, run: plots.stages(path, run.name, run.figures), _split_by_rows
        ),
        depths=each(
            "acceptance",
            lambda path, run: plots.depths(path, run.name, run.figures, series),
            _split_by_series,
        ),
        bytes_per_token=each(
            "bytes",
            lambda path, run: plots.bytes_per_token(path, run.name, run.figures),
            _split_by_rows,
        ),
        link=each("link", lambda path, run: timeline(path, run.name, run.answers)),
        alternatives=each(
            "auto",
            lambda path, run: choice_plots.alternatives(path, run.name, run.hindsight),
        ),
        predictions=each(
            "auto-predicted",
            lambda path, run: choice_plots.predictions(path, run.name, run.hindsight),
        ),
    )


def _split_by_series(run: MeasuredRun) -> list[MeasuredRun]:
    """Split a run into parts of at most `MOST_SERIES` protocols with their varied options."""
    return _split(run, list(by_series(run.figures).values()), MOST_SERIES)


def _split_by_rows(run: MeasuredRun) -> list[MeasuredRun]:
    """Split a run into parts of at most `MOST_ROWS` configurations."""
    return _split(run, [[figures] for figures in run.figures], MOST_ROWS)


def _split(run: MeasuredRun, groups: Sequence[list[Figures]], most: int) -> list[MeasuredRun]:
    """Split a run into parts of at most ``most`` groups; several parts have numbers in the name."""
    parts = [list(chain(*groups[at : at + most])) for at in range(0, len(groups), most)]
    if len(parts) == 1:
        return [run]
    return [
        replace(run, name=f"{run.name}, {number} of {len(parts)}", figures=part)
        for number, part in enumerate(parts, 1)
    ]


def _name(number: int, run: MeasuredRun, kind: str) -> str:
    return f"{number}-{re.sub(r'[^A-Za-z0-9.]+', '-', run.name).strip('-')[:40]}-{kind}.png"
