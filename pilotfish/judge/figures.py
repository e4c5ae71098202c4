"""What a sweep shows: accuracy and rounds of each setting, held against `greedy`.

In:  the tallies of n questions. Out: figures with intervals: of differences to `greedy` on the same
     questions, by a bootstrap over questions, seeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.judge.costs import DSD, GREEDY, JUDGED, Cost, Pace, cost, missed_share
from pilotfish.judge.sweeping import LinkProfile, QuestionTally, SweepHeader, SweepSetting
from pilotfish.wire.protocols.exchange import Sizes

RESAMPLES = 2000
_TAIL = 2.5  # per cent at either end of a 95 % interval
_SEED = 0

Doubles = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One setting over n questions.

    accuracy: the share answered rightly. gained: that minus `greedy`'s. aal: committed tokens a
    round, the correction included (wisv's AAL). aal_gained, rounds_saved: shares of `greedy`'s at
    the same window. forgiven: of the mismatches that were decided on. rounds and tokens: means of
    an answer. Each difference has its 95 % interval.
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
        """The share answered rightly."""
        return self.right / self.n


class _Held(NamedTuple):
    """A difference to `greedy` of each setting, [settings] each, and the ends of its interval."""

    differences: Doubles
    low: Doubles
    high: Doubles

    def value(self, at: int) -> float:
        return float(self.differences[at])

    def within(self, at: int) -> Interval:
        return float(self.low[at]), float(self.high[at])


def figures(plan: SweepHeader, tallies: Sequence[Sequence[QuestionTally]]) -> list[Figure]:
    """Of all settings, in their order; ``tallies``: of each question those of all settings."""
    # [questions, settings] each
    right, tokens, rounds, forgiven, decided = (
        np.array([[getattr(one, name) for one in line] for line in tallies], dtype=np.float64)
        for name in ("right", "tokens", "rounds", "forgiven", "decided")
    )
    n = len(right)
    # [resamples, questions]: how often each question was drawn
    drawn = np.random.default_rng(_SEED).multinomial(n, [1 / n] * n, RESAMPLES).astype(np.float64)
    base = {one.window: at for at, one in enumerate(plan.settings) if one.head is None}
    against = [base[one.window] for one in plan.settings]
    everyone = np.ones((1, n))

    def differences(weights: Doubles) -> tuple[Doubles, Doubles, Doubles]:
        """[resamples, settings] each: accuracy gained, AAL gained, rounds saved."""
        rightly, said, went = weights @ right / n, weights @ tokens, weights @ rounds
        aal = said / went
        return (
            rightly - rightly[:, against],
            aal / aal[:, against] - 1.0,
            1.0 - went / went[:, against],
        )

    gained, aal_gained, saved = (
        _Held(one[0], *np.percentile(some, [_TAIL, 100.0 - _TAIL], axis=0))
        for one, some in zip(differences(everyone), differences(drawn), strict=True)
    )
    return [
        Figure(
            setting=setting,
            n=n,
            right=int(right[:, at].sum()),
            gained=gained.value(at),
            gained_within=gained.within(at),
            aal=float(tokens[:, at].sum() / rounds[:, at].sum()),
            aal_gained=aal_gained.value(at),
            aal_within=aal_gained.within(at),
            rounds=float(rounds[:, at].mean()),
            rounds_saved=saved.value(at),
            saved_within=saved.within(at),
            tokens=float(tokens[:, at].mean()),
            forgiven=float(forgiven[:, at].sum() / max(decided[:, at].sum(), 1.0)),
        )
        for at, setting in enumerate(plan.settings)
    ]


def costs(
    plan: SweepHeader, tallies: Sequence[Sequence[QuestionTally]], pace: Pace
) -> dict[tuple[int, LinkProfile], dict[str, Cost]]:
    """What an answer takes, by setting (its number) and link, under each protocol that it is.

    The rounds of `greedy` are also `dsd`'s, whose acceptance at temperature 0 is the same.
    """
    sizes = Sizes(plan.target["vocabulary"], plan.drafter["hidden"])
    missed = missed_share(one for line in tallies for one in line)
    found = {}
    for at, setting in enumerate(plan.settings):
        own = [line[at] for line in tallies]
        form = plan.heads[setting.head]["form"] if setting.head else "int8"
        for profile in [setting.profile] if setting.profile else plan.profiles:
            found[at, profile] = {
                protocol: _mean(
                    cost(own, protocol, profile.link, pace, sizes, form=form, missed=missed),
                    len(own),
                )
                for protocol in (JUDGED if setting.head else (GREEDY, DSD))
            }
    return found


def _mean(total: Cost, n: int) -> Cost:
    return Cost(*(value / n for value in total))


def curve(
    plan: SweepHeader, found: Sequence[Figure], head: str, window: int
) -> Mapping[float, Figure]:
    """By threshold, what the head does at this window over the worst link of the sweep.

    The worst is that of the least quality, where heads forgive most.
    """
    poorest = min(plan.profiles, key=lambda one: one.channel.quality())
    return {
        one.setting.threshold: one
        for one in found
        if one.setting.threshold is not None
        and (one.setting.head, one.setting.window) == (head, window)
        and one.setting.profile == poorest
    }
