"""All plots of a report, their order and their headings."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotfish.field.report import choice_plots, latency_plots, plots
from pilotfish.field.report.canvas import Picture, PlotStyle
from pilotfish.field.report.measured import MeasuredRun
from pilotfish.field.report.timeline import timeline

_KINDS = 7  # of plots of a run


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """The pictures of a report by kind, each with one per run that has it, in the runs' order.

    compared: one of all runs, where there are several.
    """

    compared: list[Picture]
    latency: list[Picture]
    stages: list[Picture]
    depths: list[Picture]
    freight: list[Picture]
    link: list[Picture]
    otherwise: list[Picture]
    predictions: list[Picture]


def draw(
    runs: Sequence[MeasuredRun], folder: Path, show: Callable[[int, int], None] = lambda *_: None
) -> Gallery:
    """Draw everything into a folder; file names begin with the run's number and its name.

    show: called after each plot with how many of how many are done.
    """
    looks = PlotStyle(f.configuration.protocol for run in runs for f in run.figures)
    done = 0

    def each(kind: str, one: Callable[[Path, MeasuredRun], Picture | None]) -> list[Picture]:
        nonlocal done
        found = []
        for at, run in enumerate(runs, 1):
            found.append(one(folder / _name(at, run, kind), run))
            done += 1
            show(done, _KINDS * len(runs))
        return [picture for picture in found if picture is not None]

    together = latency_plots.compare_runs(
        folder / "compared.png", [(run.name, run.figures) for run in runs], looks
    )
    return Gallery(
        compared=[together] if together else [],
        latency=each(
            "latency", lambda to, run: latency_plots.latency(to, run.name, run.figures, looks)
        ),
        stages=each("stages", lambda to, run: plots.stages(to, run.name, run.figures)),
        depths=each("acceptance", lambda to, run: plots.depths(to, run.name, run.figures, looks)),
        freight=each("bytes", lambda to, run: plots.freight(to, run.name, run.figures)),
        link=each("link", lambda to, run: timeline(to, run.name, run.answers)),
        otherwise=each(
            "auto",
            lambda to, run: choice_plots.alternatives(to, run.name, run.hindsight),
        ),
        predictions=each(
            "auto-predicted",
            lambda to, run: choice_plots.predictions(to, run.name, run.hindsight),
        ),
    )


def _name(number: int, run: MeasuredRun, kind: str) -> str:
    return f"{number}-{re.sub(r'[^A-Za-z0-9.]+', '-', run.name).strip('-')[:40]}-{kind}.png"
