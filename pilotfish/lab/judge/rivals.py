"""Compare a head with the baselines that forgive as much as it does (`judge.baselines`).

In:  a sweep's counts. Out: for each baseline, the differences "head minus baseline" on the same
     questions, with 95 % intervals by a seeded bootstrap over questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pilotfish.lab.judge.baselines import RuleName
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

    question_counts: [questions][settings].
    """
    column = {setting: index for index, setting in enumerate(plan.settings)}
    samples = question_resamples(len(question_counts))
    # [questions, settings] each
    right, tokens, rounds, forgiven, decided = (
        np.array([[getattr(each, name) for each in row] for row in question_counts], np.float64)
        for name in ("right", "tokens", "rounds", "forgiven", "decided")
    )
    compared = []
    for rival, setting in enumerate(plan.settings):
        if setting.baseline is None:
            continue
        judged = setting._replace(baseline=None)
        pair = [column[judged], rival]

        def differences(weights: Doubles, pair: Sequence[int] = pair) -> Doubles:
            """Compute accuracy gained and AAL gained, [2, resamples]."""
            accuracy = weights @ right[:, pair] / len(right)
            aal = (weights @ tokens[:, pair]) / (weights @ rounds[:, pair])
            return np.stack([accuracy[:, 0] - accuracy[:, 1], aal[:, 0] / aal[:, 1] - 1.0])

        gained, aal_gained = differences(np.ones((1, len(right))))[:, 0].tolist()
        gained_within, aal_within = interval_bounds(differences(samples))
        compared.append(
            Rivalry(
                setting=judged,
                rule=setting.baseline.rule,
                bound=setting.baseline.bound,
                n=len(right),
                accuracy=float(right[:, rival].mean()),
                forgiven=float(forgiven[:, rival].sum() / max(decided[:, rival].sum(), 1.0)),
                aal=float(tokens[:, rival].sum() / rounds[:, rival].sum()),
                gained=gained,
                gained_within=gained_within,
                aal_gained=aal_gained,
                aal_within=aal_within,
            )
        )
    return compared
