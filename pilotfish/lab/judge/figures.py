"""Compute a sweep's results: accuracy and rounds of each setting, compared with `greedy`.

In:  the counts of n questions. Out: a `Figure` per setting. Each difference from `greedy` on the
     same questions has a confidence interval, from a seeded bootstrap over questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pilotfish.lab.judge.costs import (
    DSD,
    GREEDY,
    JUDGED,
    SELECTIVE,
    Cost,
    ModelPace,
    cost,
    mismatch_share,
)
from pilotfish.lab.judge.sweep_file import LinkProfile, QuestionCounts, SweepHeader, SweepSetting
from pilotfish.wire.protocols.decision_head import CERTAIN_THRESHOLDS
from pilotfish.wire.protocols.protocol import PairSizes

RESAMPLES = 2000
_TAIL = 2.5  # share (per cent) outside a 95 % interval at each end
_SEED = 0

Doubles = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The results of one setting over n questions. `greedy`: the same window without a head.

    right: number of correct answers. gained: accuracy minus the accuracy of `greedy`. aal:
    committed tokens per round, the correction included (AAL in the WISV paper). aal_gained: AAL
    relative to `greedy`, minus 1. rounds: mean rounds per answer. rounds_saved: share of the rounds
    of `greedy` that the setting saves. tokens: mean tokens per answer. forgiven: share of the
    decided mismatches that were forgiven. gained_within, aal_within, saved_within: 95 % intervals
    of gained, aal_gained and rounds_saved.
    """

    setting: SweepSetting
    n: int
    right: int
    gained: float
    gained_within: Interval
    aal: float
    aal_gained: float
    aal_within: Interval
    rounds: float
    rounds_saved: float
    saved_within: Interval
    tokens: float
    forgiven: float

    @property
    def accuracy(self) -> float:
        """The share of correct answers."""
        return self.right / self.n


def figures(plan: SweepHeader, question_counts: Sequence[Sequence[QuestionCounts]]) -> list[Figure]:
    """Compute the results of all settings, in the plan's order.

    question_counts: [questions][settings].
    """
    # five arrays, each [questions, settings]
    right, tokens, rounds, forgiven, decided = (
        np.array(
            [[getattr(counts, name) for counts in row] for row in question_counts], dtype=np.float64
        )
        for name in ("right", "tokens", "rounds", "forgiven", "decided")
    )
    n = len(right)
    samples = question_resamples(n)
    greedy = {s.window: column for column, s in enumerate(plan.settings) if s.head is None}
    baselines = [greedy[setting.window] for setting in plan.settings]

    def differences(weights: Doubles) -> Doubles:
        """Compute accuracy gained, AAL gained and rounds saved, [3, resamples, settings].

        weights: how often each question counts, [resamples, questions].
        """
        accuracy, token_sums, round_sums = weights @ right / n, weights @ tokens, weights @ rounds
        aal = token_sums / round_sums
        gained = accuracy - accuracy[:, baselines]
        return np.stack(
            [gained, aal / aal[:, baselines] - 1.0, 1.0 - round_sums / round_sums[:, baselines]]
        )

    observed = differences(np.ones((1, n)))[:, 0].tolist()  # [3, settings]
    bounds = [interval_bounds(values.T) for values in differences(samples)]  # [3][settings]
    return [
        Figure(
            setting=setting,
            n=n,
            right=int(right[:, column].sum()),
            gained=observed[0][column],
            gained_within=bounds[0][column],
            aal=float(tokens[:, column].sum() / rounds[:, column].sum()),
            aal_gained=observed[1][column],
            aal_within=bounds[1][column],
            rounds=float(rounds[:, column].mean()),
            rounds_saved=observed[2][column],
            saved_within=bounds[2][column],
            tokens=float(tokens[:, column].mean()),
            forgiven=float(forgiven[:, column].sum() / max(decided[:, column].sum(), 1.0)),
        )
        for column, setting in enumerate(plan.settings)
    ]


def question_resamples(n: int) -> Doubles:
    """Draw how often each resample of a bootstrap has each question, [resamples, questions]."""
    draws = np.random.default_rng(_SEED).multinomial(n, [1 / n] * n, RESAMPLES)
    return draws.astype(np.float64)


def interval_bounds(values: Doubles) -> list[Interval]:
    """Return the 95 % interval of each row of a bootstrap's values, [rows, resamples]."""
    low, high = np.percentile(values, [_TAIL, 100.0 - _TAIL], axis=1).tolist()
    return list(zip(low, high, strict=True))


def costs(
    plan: SweepHeader, question_counts: Sequence[Sequence[QuestionCounts]], pace: ModelPace
) -> dict[tuple[int, LinkProfile], dict[str, Cost]]:
    """Compute the mean cost of an answer, by (index of the setting, link) and protocol.

    `dsd` has the same rounds as `greedy`, because both accept the same tokens at temperature 0.
    """
    sizes = PairSizes(plan.target["vocabulary"], plan.drafter["hidden"])
    missed = mismatch_share(counts for row in question_counts for counts in row)
    results = {}
    for index, setting in enumerate(plan.settings):
        setting_counts = [row[index] for row in question_counts]
        form = plan.heads[setting.head]["form"] if setting.head else "int8"
        answer_cost = partial(
            cost, setting_counts, pace=pace, sizes=sizes, form=form, mismatch_share=missed
        )
        # no states are asked for, so a round costs as much as one of `greedy`
        certain = setting.threshold in CERTAIN_THRESHOLDS
        for profile in [setting.profile] if setting.profile else plan.profiles:
            results[index, profile] = {
                name: Cost(
                    *(
                        total / len(setting_counts)
                        for total in answer_cost(
                            protocol=GREEDY if name == SELECTIVE and certain else name,
                            link=profile.link,
                        )
                    )
                )
                # a baseline needs no states, so its rounds cost as much as those of greedy
                for name in (JUDGED if setting.head and not setting.baseline else (GREEDY, DSD))
            }
    return results


def curve(
    plan: SweepHeader, figures: Sequence[Figure], head: str, window: int
) -> Mapping[float, Figure]:
    """Select a head's results at this window over the worst link; return them by threshold.

    The worst link has the lowest quality. Heads forgive the most mismatches over this link.
    """
    poorest = min(plan.profiles, key=lambda figure: figure.channel.quality())
    return {
        figure.setting.threshold: figure
        for figure in figures
        if figure.setting.threshold is not None
        and figure.setting.baseline is None
        and (figure.setting.head, figure.setting.window) == (head, window)
        and figure.setting.profile == poorest
    }
