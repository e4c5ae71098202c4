"""Draw all plots of a report."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from pilotfish.lab.field.report import (
    canvas,
    choice_plots,
    choice_times,
    distribution_plots,
    latency_plots,
    link_plots,
    plots,
    quantity_plots,
)
from pilotfish.lab.field.report.answer_values import choice_shares
from pilotfish.lab.field.report.canvas import MOST_ROWS, MOST_SERIES, Plot, PlotStyle
from pilotfish.lab.field.report.figures import Figures, by_series
from pilotfish.lab.field.report.measured import MeasuredRun
from pilotfish.lab.page import Picture

_KINDS = 10  # number of plots for each run


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The pictures of a kind, and a sentence for each plot of it that lacks points."""

    pictures: list[Picture]
    few: list[str]

    def __bool__(self) -> bool:
        return bool(self.pictures or self.few)


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """The pictures of a report, by kind.

    Each kind has one picture for each run that measured it, in the order of the runs; a run with
    many varied options has several, each with a part of them. compared, distribution_compared: one
    picture that compares all runs; none for a single run. rtt_distribution: one picture of all
    runs.
    """

    rtt: Shown
    rtt_distribution: Shown
    link: Shown
    compared: Shown
    distribution_compared: Shown
    distribution: Shown
    latency: Shown
    stages: Shown
    depths: Shown
    bytes_per_token: Shown
    choices: Shown
    alternatives: Shown
    predictions: Shown


def draw(
    runs: Sequence[MeasuredRun], folder: Path, show: Callable[[int, int], None] = lambda *_: None
) -> Gallery:
    """Draw all plots into a folder; file names begin with the run's number and its name.

    show: callback after each plot; arguments: number of finished plots, number of all plots.
    """
    styles = PlotStyle(chain.from_iterable(map(_protocols, runs)))
    series = PlotStyle(label for run in runs for label in by_series(run.figures))
    done = 0

    def each(
        kind: str,
        plot: Callable[[MeasuredRun], Plot | None],
        split: Callable[[MeasuredRun], list[MeasuredRun]] = lambda run: [run],
    ) -> Shown:
        nonlocal done
        drawn = Shown(pictures=[], few=[])
        for number, run in enumerate(runs, 1):
            for index, part in enumerate(split(run)):
                name = f"{kind}-{index + 1}" if index else kind
                _add(drawn, plot(part), folder / _name(number, run, name))
            done += 1
            show(done, _KINDS * len(runs))
        return drawn

    def once(kind: str, plot: Plot | None) -> Shown:
        drawn = Shown(pictures=[], few=[])
        _add(drawn, plot, folder / f"{kind}.png")
        return drawn

    return Gallery(
        rtt=each("rtt", lambda run: link_plots.rtt_over_time(run.name, run.history)),
        rtt_distribution=once(
            "rtt-distribution",
            link_plots.rtt_distribution([(run.name, run.history) for run in runs]),
        ),
        link=each("link", lambda run: quantity_plots.quantities_over_time(run.name, run.history)),
        compared=once(
            "compared",
            latency_plots.compare_runs([(run.name, run.figures) for run in runs], styles),
        ),
        distribution_compared=once(
            "compared-distribution",
            distribution_plots.compare_distributions(
                [(run.name, run.values, run.figures) for run in runs]
            ),
        ),
        distribution=each(
            "distribution",
            lambda run: distribution_plots.distributions(run.name, run.values, run.figures, series),
            _split_by_series,
        ),
        latency=each(
            "latency",
            lambda run: latency_plots.latency(run.name, run.figures, series),
            _split_by_series,
        ),
        stages=each("stages", lambda run: plots.stages(run.name, run.figures), _split_by_rows),
        depths=each(
            "acceptance",
            lambda run: plots.depths(run.name, run.figures, series),
            _split_by_series,
        ),
        bytes_per_token=each(
            "bytes", lambda run: plots.bytes_per_token(run.name, run.figures), _split_by_rows
        ),
        choices=each(
            "auto-choices",
            lambda run: choice_times.choices_over_time(run.name, run.answers, run.history, styles),
        ),
        alternatives=each("auto", lambda run: choice_plots.alternatives(run.name, run.hindsight)),
        predictions=each(
            "auto-predicted", lambda run: choice_plots.predictions(run.name, run.hindsight)
        ),
    )


def _add(kind: Shown, plot: Plot | None, path: Path) -> None:
    """Draw a plot, if there is one; add its picture, and what it leaves out."""
    if plot is None:
        return
    if (picture := canvas.draw(plot, path)) is not None:
        kind.pictures.append(picture)
    if (words := canvas.left_out(plot)) is not None:
        kind.few.append(words)


def _protocols(run: MeasuredRun) -> Iterable[str]:
    """Return the protocols that a run requested, and those that `auto` chose."""
    return [*(f.configuration.protocol for f in run.figures), *choice_shares(run.answers)]


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
