"""Read a run for a report: facts, the counted answers, and the number of skipped answers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pilotfish.base.errors import RunFileError
from pilotfish.lab.field.report.figures import Figures, figures, flatten
from pilotfish.lab.field.report.hindsight import Hindsight, hindsight
from pilotfish.lab.field.report.link import unmeasured_names
from pilotfish.lab.field.report.plausible import expect_plausible
from pilotfish.lab.field.run import Answer, Facts, Run
from pilotfish.lab.statistics import LEVEL, RESAMPLES


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

    def as_json(self) -> dict[str, Any]:
        """Return the results for ``--json``; the keys contain the units of times."""
        first, last = self.answers[0], self.answers[-1]
        return {
            "run": self.name,
            "file": str(self.path),
            "began_unix_s": first.started_unix_s,
            "ended_unix_s": last.started_unix_s + last.total_s,
            "answers": len(self.answers),
            "left_out": {"warm_up": self.warm_up, "unfinished": self.unfinished},
            "not_measured": unmeasured_names(self.answers),
            "figures": [flatten(asdict(figures)) for figures in self.figures],
            "auto": None if self.hindsight is None else _auto_json(self.hindsight),
            "interval": {"level": LEVEL, "bootstrap_resamples": RESAMPLES},
        }


def read_run(path: str | Path) -> MeasuredRun:
    """Read a run file; raise `RunFileError` if it is not a run file or has no answer."""
    path = Path(path)
    with Run.open(path) as run:
        every = list(run.answers(warm_up=True, finished=False))
        facts = run.facts
    expect_plausible(path, every)
    answers = [answer for answer in every if answer.finished and not answer.warm_up]
    if not any(answer.rounds for answer in answers):
        raise RunFileError(
            f"{path} has no finished answer: resume the run with `pilotfish field measure "
            "--resume`."
        )
    answers = [answer for answer in answers if answer.rounds]
    return MeasuredRun(
        name=path.stem.encode(errors="replace").decode(),
        path=path,
        facts=facts,
        answers=answers,
        warm_up=sum(answer.warm_up for answer in every),
        unfinished=sum(not answer.finished and not answer.warm_up for answer in every),
        figures=figures(answers),
        hindsight=hindsight(answers),
    )


def with_unique_names(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Append numbers to the names of runs that have the same name."""
    renamed: dict[str, MeasuredRun] = {}
    for run in runs:
        name, number = run.name, 1
        while name in renamed:
            number += 1
            name = f"{run.name} ({number})"
        renamed[name] = replace(run, name=name)
    return list(renamed.values())


def _auto_json(hindsight: Hindsight) -> dict[str, Any]:
    values = asdict(hindsight)
    values["alternatives"] = [flatten(alternative) for alternative in values["alternatives"]]
    best = hindsight.best.configuration if hindsight.best is not None else None
    values["best_fixed"] = None if best is None else best.to_json()
    return {**values, "behind_best_fixed": hindsight.excess, "median_error": hindsight.error}
