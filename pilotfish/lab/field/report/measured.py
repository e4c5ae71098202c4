"""Read a run for a report: facts, the counted answers, and the number of skipped answers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.base.errors import RunFileError
from pilotfish.base.prose import one_line
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.report.answer_values import (
    MEASURES,
    Values,
    choice_shares,
    values_by_configuration,
)
from pilotfish.lab.field.report.figures import Figures, figures, flatten
from pilotfish.lab.field.report.hindsight import Hindsight, hindsight
from pilotfish.lab.field.report.link_history import QUANTITIES, LinkHistory, history
from pilotfish.lab.field.report.plausible import expect_plausible
from pilotfish.lab.field.report.samples import Array, percentiles
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_facts import Facts
from pilotfish.lab.statistics import LEVEL, RESAMPLES

_NAME_LETTERS = 40  # longest name of a device in a report


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """The content and the results of a run file. name: name of the run, unique in a report."""

    name: str
    path: Path
    facts: Facts
    answers: list[Answer]  # all finished answers, without warm-up answers
    warm_up: int
    unfinished: int
    figures: list[Figures]
    hindsight: Hindsight | None
    history: LinkHistory
    values: Values

    def as_json(self) -> dict[str, Any]:
        """Return the results for ``--json``; the keys contain the units of times."""
        return {
            "run": self.name,
            "file": str(self.path),
            "device": self.facts.device,
            "watch": None if self.facts.watch is None else asdict(self.facts.watch),
            "began_unix_s": self.history.began_s,
            "ended_unix_s": self.history.ended_s,
            "answers": len(self.answers),
            "left_out": {"warm_up": self.warm_up, "unfinished": self.unfinished},
            "not_measured": self.history.unmeasured,
            "figures": [flatten(asdict(figures)) for figures in self.figures],
            "percentiles": [
                {
                    **f.configuration.to_json(),
                    **{
                        m.key: _percentiles(values.get(f.configuration))
                        for m, values in self.values.items()
                    },
                }
                for f in self.figures
            ],
            "link": _link_json(self.history),
            "choices": choice_shares(self.answers),
            "auto": None if self.hindsight is None else _auto_json(self.hindsight),
            "interval": {"level": LEVEL, "bootstrap_resamples": RESAMPLES},
        }


def read_run(path: str | Path) -> MeasuredRun:
    """Read a run file; raise `RunFileError` if it is not a run file or has nothing to report."""
    path = Path(path)
    with Run.open(path) as run:
        every = list(run.answers(warm_up=True, finished=False))
        probes, outages = list(run.probes()), list(run.outages())
        facts = run.facts
    expect_plausible(path, [facts, *every, *probes, *outages])
    answers = [a for a in every if a.finished and not a.warm_up and a.rounds]
    if not answers and not probes and not outages:
        remedy = (
            "resume the run with `pilotfish field measure --resume`"
            if facts.watch is None
            else "report it after the first round of the watch. If the watch has ended, start it "
            "again by the same command; it goes on in this file"
        )
        raise RunFileError(f"{path} has no finished answer: {remedy}.")
    return MeasuredRun(
        name=path.stem.encode(errors="replace").decode(),
        path=path,
        facts=facts,
        answers=answers,
        warm_up=sum(answer.warm_up for answer in every),
        unfinished=sum(not answer.finished and not answer.warm_up for answer in every),
        figures=figures(answers),
        hindsight=hindsight(answers),
        history=history(facts, every, answers, probes, outages),
        values={m: values_by_configuration(answers, m) for m in MEASURES},
    )


def with_unique_names(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Name runs of several devices by their devices, and number those of the same name."""
    devices = {run.facts.device for run in runs}
    if len(devices) > 1 and "" not in devices:
        several = len(devices) < len(runs)
        runs = [replace(run, name=_device_name(run, with_file=several)) for run in runs]
    renamed: dict[str, MeasuredRun] = {}
    for run in runs:
        name, number = run.name, 1
        while name in renamed:
            number += 1
            name = f"{run.name} ({number})"
        renamed[name] = replace(run, name=name)
    return list(renamed.values())


def _device_name(run: MeasuredRun, *, with_file: bool) -> str:
    """Return the name of a run's device; with_file: also the file's, as devices have several."""
    device = one_line(run.facts.device, _NAME_LETTERS)
    return f"{device}, {run.name}" if with_file else device


def _link_json(history: LinkHistory) -> dict[str, Any]:
    return {
        "rtt_ms": {source: _percentiles(each.values) for source, each in history.rtts.items()},
        "lost_pings": history.lost,
        **{
            name.replace(" ", "_"): {**_percentiles(series[0].values), "bounds": len(series[1])}
            for name in QUANTITIES
            if name != "RTT" and (series := history.series(name)) is not None
        },
        "rounds": history.rounds,
        "slots": history.slots,
        "observed_s": history.observed_s,
        "away_s": history.away_s,
        "available": history.available,
        "outages": [
            {
                "began_unix_s": outage.began_s,
                "ended_unix_s": outage.ended_s if outage.ended else None,
                "length_s": outage.lasted_s,
                "reason": outage.reason,
            }
            for outage in history.outages
        ],
        "pauses": [{"began_unix_s": begin, "ended_unix_s": end} for begin, end in history.pauses],
        "clock_steps": [{"unix_s": step.unix_s, "by_s": step.by_s} for step in history.steps],
        "bytes": asdict(history.traffic),
        "power_w": history.power_w,
    }


def _percentiles(values: Array | None) -> dict[str, float | int | None]:
    values = np.zeros(0) if values is None else values
    return {"n": len(values), **percentiles(values)}


def _auto_json(hindsight: Hindsight) -> dict[str, Any]:
    values = asdict(hindsight)
    values["alternatives"] = [flatten(alternative) for alternative in values["alternatives"]]
    best = hindsight.best.configuration if hindsight.best is not None else None
    values["best_fixed"] = None if best is None else best.to_json()
    return {**values, "behind_best_fixed": hindsight.excess, "median_error": hindsight.error}
