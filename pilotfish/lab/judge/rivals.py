"""Compare a head with the baselines that forgive as much as it does (`judge.baselines`).

In:  a sweep's counts. Out: for each baseline, the differences "head minus baseline" on the same
     questions, with 95 % intervals by a seeded bootstrap over questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pilotfish.lab.judge.baselines import Baseline, RuleName
from pilotfish.lab.judge.figures import Doubles, Interval, interval_bounds, question_resamples
from pilotfish.lab.judge.sweep_file import QuestionCounts, SweepHeader, SweepSetting


@dataclass(frozen=True, kw_only=True)
class Rivalry:
    """A head's setting against one baseline.

    setting: the head's. rule, bound: the baseline. n: number of questions. accuracy, forgiven, aal:
    the baseline's. gained: the head's accuracy minus the baseline's. aal_gained: the head's AAL
    relative to the baseline's, minus 1. gained_within, aal_within: 95 % intervals.
    """

    setting: SweepSetting
    rule: RuleName
    bound: float
    n: int
    accuracy: float
    forgiven: float
    aal: float
    gained: float
    gained_within: Interval
    aal_gained: float
    aal_within: Interval

    @property
    def is_won(self) -> bool:
        """Whether the head answers more questions correctly; the interval excludes 0."""
        return self.gained_within[0] > 0


def rivalries(
    plan: SweepHeader, question_counts: Sequence[Sequence[QuestionCounts]]
) -> list[Rivalry]:
    """Compare each head's setting with its baselines, in the plan's order.

    question_counts: [questions][settings]; a question may lack the last settings.
    """
    column = {setting: index for index, setting in enumerate(plan.settings)}
    compared = []
    for rival, setting in enumerate(plan.settings):
        if setting.baseline is None:
            continue
        judged = setting._replace(baseline=None)
        pairs = [
            (row[column[judged]], row[rival])
            for row in question_counts
            if len(row) > max(column[judged], rival)
        ]
        if pairs:
            compared.append(_rivalry(judged, setting.baseline, pairs))
    return compared


def _rivalry(
    judged: SweepSetting, baseline: Baseline, pairs: Sequence[tuple[QuestionCounts, QuestionCounts]]
) -> Rivalry:
    """Compare a head's setting with one baseline; pairs: the counts of both, for each question."""
    n = len(pairs)
    right, tokens, rounds, forgiven, decided = (
        np.array([[getattr(counts, name) for counts in pair] for pair in pairs], np.float64)
        for name in ("right", "tokens", "rounds", "forgiven", "decided")
    )  # [questions, 2] each

    def differences(weights: Doubles) -> Doubles:
        """Compute accuracy gained and AAL gained, [2, resamples]."""
        accuracy = weights @ right / n
        aal = (weights @ tokens) / (weights @ rounds)
        return np.stack([accuracy[:, 0] - accuracy[:, 1], aal[:, 0] / aal[:, 1] - 1.0])

    gained, aal_gained = differences(np.ones((1, n)))[:, 0].tolist()
    gained_within, aal_within = interval_bounds(differences(question_resamples(n)))
    return Rivalry(
        setting=judged,
        rule=baseline.rule,
        bound=baseline.bound,
        n=n,
        accuracy=float(right[:, 1].mean()),
        forgiven=float(forgiven[:, 1].sum() / max(decided[:, 1].sum(), 1.0)),
        aal=float(tokens[:, 1].sum() / rounds[:, 1].sum()),
        gained=gained,
        gained_within=gained_within,
        aal_gained=aal_gained,
        aal_within=aal_within,
    )
