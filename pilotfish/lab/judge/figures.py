"""Compute a sweep's results: accuracy and rounds of each setting, compared with its reference.

In:  the counts of n questions. Out: a `Figure` per setting. Each difference from the reference
     (`greedy`, or the lowest τ of `adaptive`) on the same questions has a confidence interval, from
     a seeded bootstrap over questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.lab.judge.costs import (
    DSD,
    GREEDY,
    JUDGED,
    RELAXED,
    Cost,
    ModelPace,
    cost,
    mismatch_share,
    relaxed_cost,
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
    """The results of one setting over the n questions that were answered under it.

    right: number of correct answers. gained: accuracy minus the reference's, on the same
    questions. The reference of `adaptive` is its lowest τ, of every other setting `greedy`, at the
    same window. aal: committed tokens per round, the correction included (AAL in the WISV paper).
    aal_gained: AAL relative to the reference's, minus 1. rounds: mean rounds per answer.
    rounds_saved: share of the reference's rounds that the setting saves. tokens: mean tokens per
    answer. forgiven: share of the decided mismatches that were forgiven. deviation, key: mean
    deviation of a verified token, and share of key tokens; None except for `adaptive`.
    gained_within, aal_within, saved_within: 95 % intervals of gained, aal_gained and rounds_saved.
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
    deviation: float | None = None
    key: float | None = None

    @property
    def accuracy(self) -> float:
        """The share of correct answers."""
        return self.right / self.n


def figures(plan: SweepHeader, question_counts: Sequence[Sequence[QuestionCounts]]) -> list[Figure]:
    """Compute the results of the settings that have an answered question, in the plan's order.

    question_counts: [questions][settings]; a question may lack the last settings.
    """
    columns = range(max(map(len, question_counts)))
    # whether a question was answered under a setting and its reference, [questions, settings]
    answered = np.array([[at < len(row) for at in columns] for row in question_counts])
    references = _references(plan.settings[: len(columns)])
    answered &= answered[:, references]

    def table(name: str) -> Doubles:
        return np.array(
            [
                [getattr(row[at], name) if at < len(row) else 0 for at in columns]
                for row in question_counts
            ],
            dtype=np.float64,
        )

    names = ("right", "tokens", "rounds", "forgiven", "decided")
    right, tokens, rounds, forgiven, decided = map(table, names)
    n = len(right)
    samples = question_resamples(n)

    def differences(weights: Doubles) -> Doubles:
        """Compute accuracy gained, AAL gained and rounds saved, [3, resamples, settings].

        weights: how often each question counts, [resamples, questions].
        """

        def sums(values: Doubles) -> tuple[Doubles, Doubles]:
            """Sum over the questions that have both: a setting's values, and its reference's."""
            return weights @ (values * answered), weights @ (values[:, references] * answered)

        count = np.maximum(weights @ answered, 1.0)
        (accuracy, before), (round_sums, rounds_before) = sums(right), sums(rounds)
        token_sums, tokens_before = sums(tokens)
        fewest = np.maximum(round_sums, 1.0), np.maximum(rounds_before, 1.0)
        aal, aal_before = token_sums / fewest[0], tokens_before / fewest[1]
        return np.stack(
            [
                (accuracy - before) / count,
                aal / np.maximum(aal_before, 1.0) - 1.0,
                1.0 - round_sums / fewest[1],
            ]
        )

    observed = differences(np.ones((1, n)))[:, 0].tolist()  # [3, settings]
    bounds = [interval_bounds(values.T) for values in differences(samples)]  # [3][settings]
    results = []
    for column in columns:
        rows = answered[:, column]
        deviation, key = _relaxed_means(
            [row[column] for row in question_counts if column < len(row)]
        )
        results.append(
            Figure(
                setting=plan.settings[column],
                n=int(rows.sum()),
                right=int(right[rows, column].sum()),
                gained=observed[0][column],
                gained_within=bounds[0][column],
                aal=float(tokens[rows, column].sum() / max(rounds[rows, column].sum(), 1.0)),
                aal_gained=observed[1][column],
                aal_within=bounds[1][column],
                rounds=float(rounds[rows, column].mean()),
                rounds_saved=observed[2][column],
                saved_within=bounds[2][column],
                tokens=float(tokens[rows, column].mean()),
                forgiven=float(forgiven[:, column].sum() / max(decided[:, column].sum(), 1.0)),
                deviation=deviation,
                key=key,
            )
        )
    return results


def _references(settings: Sequence[SweepSetting]) -> list[int]:
    """Return the index of the setting with which each setting is compared."""
    greedy = {setting.window: at for at, setting in enumerate(settings) if setting.is_greedy}
    strictest: dict[int, int] = {}
    relaxed = [at for at, setting in enumerate(settings) if setting.tau is not None]
    for at in sorted(relaxed, key=lambda at: settings[at].tau or 0.0):
        strictest.setdefault(settings[at].window, at)
    return [(greedy if setting.tau is None else strictest)[setting.window] for setting in settings]


def _relaxed_means(questions: Sequence[QuestionCounts]) -> tuple[float | None, float | None]:
    """Compute the mean deviation and the share of key tokens; None except for `adaptive`."""
    counts = [question.relaxed for question in questions if question.relaxed]
    verified = sum(count.verified for count in counts)
    if not verified:
        return None, None
    return (
        sum(count.deviation for count in counts) / verified,
        sum(count.key for count in counts) / verified,
    )


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
    missed = mismatch_share(
        counts for row in question_counts for counts in row if counts.relaxed is None
    )
    results = {}
    for index, setting in enumerate(plan.settings):
        setting_counts = [row[index] for row in question_counts if index < len(row)]
        if not setting_counts:
            continue
        for profile in [setting.profile] if setting.profile else plan.profiles:
            results[index, profile] = {
                name: Cost(*(total / len(setting_counts) for total in whole))
                for name, whole in total_costs(
                    plan, setting, setting_counts, profile, pace, missed
                ).items()
            }
    return results


def total_costs(
    plan: SweepHeader,
    setting: SweepSetting,
    counts: Sequence[QuestionCounts],
    profile: LinkProfile,
    pace: ModelPace,
    missed: float,
) -> dict[str, Cost]:
    """Compute the total cost of a setting's answers over a link, by protocol.

    missed: share of mismatches among the drafted tokens after a rejection, as for `cost`.
    """
    sizes = PairSizes(plan.target["vocabulary"], plan.drafter["hidden"])
    if setting.tau is not None:
        return {RELAXED: relaxed_cost(counts, profile.link, pace)}
    form = plan.heads[setting.head]["form"] if setting.head else "int8"
    # no states are sent, so a round costs as much as one of `greedy`
    certain = setting.threshold in CERTAIN_THRESHOLDS
    return {
        name: cost(
            counts,
            GREEDY if certain else name,
            profile.link,
            pace,
            sizes,
            form=form,
            mismatch_share=missed,
        )
        # a rule needs no states, so its rounds cost as much as those of greedy
        for name in (JUDGED if setting.head and not setting.baseline else (GREEDY, DSD))
    }


def curve(
    plan: SweepHeader, figures: Sequence[Figure], head: str, window: int
) -> Mapping[float, Figure]:
    """Select a head's results at this window over the worst link; return them by threshold.

    The worst link has the lowest quality. Heads forgive the most mismatches over this link.
    """
    judged = [setting.profile for setting in plan.settings if setting.head == head]
    poorest = min(filter(None, judged), key=lambda profile: profile.channel.quality())
    return {
        figure.setting.threshold: figure
        for figure in figures
        if figure.setting.threshold is not None
        and figure.setting.baseline is None
        and (figure.setting.head, figure.setting.window) == (head, window)
        and figure.setting.profile == poorest
    }
