"""Estimate the acceptance α of drafts by depth, from past rounds.

The *depth* of a draft is the number of uncorrected tokens before it: in a window, the drafts before
it; under `ahead`, all tokens since the last correction, whether drafted or not. Only drafts that
were compared with the target's tokens count. The estimate uses, in this order: the protocol's own
data; other protocols' data at this depth, rescaled by relative acceptance; data from similar depths
(from half the depth on); an optimistic prior. A pessimistic prior would never be tried, so it would
never be corrected. Evidence loses weight from answer to answer, so that drafting is tried again
after a long time.

A lossy protocol's rounds are evidence for its whole family of protocols. They are also evidence for
the lossless protocols, without the tokens that the lossy rule gained (its counters report their
number).

The levels of a tree are counted by their number of candidates. Levels with another number inform
an estimate as other protocols do: `speculation.more_candidates` converts them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round
from pilotfish.speculation.acceptance import PRIOR_ACCEPTANCE
from pilotfish.speculation.more_candidates import acceptance_of
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SpeculationProtocol, counters

_PRIOR_WEIGHT = 4.0  # weight of the prior, in positions
_POOL_WEIGHT = 16.0  # weight of other depths or protocols, in positions
_FADE = 0.97  # factor by which the weight of the evidence shrinks with each answer
_MAX_ACCEPTANCE = 0.98  # upper bound of a rescaled α
Kind = tuple[str, bool, int]


class Lost(NamedTuple):
    """What the drafts of a level lost against others: an acceptance less that of these drafts.

    in_kind: compared with as many candidates at the protocol's default K. in_pool: compared with
    one candidate at that K.
    """

    in_kind: float = 0.0
    in_pool: float = 0.0


_NOTHING_LOST = Lost()


def _kind_of(plan: Plan, candidates: int) -> Kind:
    """Return (protocol family, greedy, candidates): levels of one kind have the same acceptance."""
    family = plan.exchange.family if plan.exchange is not None else ""
    return family or plan.protocol, plan.sampling.sampling.greedy, candidates


def level_runs(plan: Plan) -> Sequence[tuple[int, int, int]]:
    """Group the levels of a plan's window by their number of candidates.

    Returns (first level, last level + 1, candidates); for a stream, one group of all depths. A
    drafter at temperature 0 draws equal candidates, which count as one.
    """
    levels = MAX_WINDOW if plan.streams else len(plan.expansion)
    trees = plan.exchange is not None and plan.exchange.allows_trees
    if not trees or plan.drafting.sampling.greedy:
        return [(0, levels, 1)]
    runs, begin = [], 0
    for candidates, group in groupby(plan.expansion):
        end = begin + len(list(group))
        runs.append((begin, end, candidates))
        begin = end
    return runs


def _strict_agreement(exchange: SpeculationProtocol[Any], *, greedy: bool) -> float:
    """Return the protocol's α without lossy gains, as a multiple of the α of `dsd`."""
    if greedy:
        return 1.0
    return (
        exchange.relative_acceptance if exchange.lossless else exchange.strict_relative_acceptance
    )


class DepthCounts:
    """Numbers of compared and accepted drafts at each depth; f64 [`MAX_WINDOW`] each.

    reached: compared drafts. agreed: accepted drafts without the reported gains. A counter does not
    say which tokens were gained, so the gain is spread evenly over a round's accepted tokens.
    """

    def __init__(self) -> None:
        self.reached = np.zeros(MAX_WINDOW)
        self.accepted = np.zeros(MAX_WINDOW)
        self.agreed = np.zeros(MAX_WINDOW)

    def add(
        self,
        depth: int,
        compared: int,
        accepted: int,
        gained: float = 0.0,
        lost: Lost = _NOTHING_LOST,
    ) -> None:
        """Add ``compared`` drafts from this depth on, of which the first ``accepted`` agreed.

        gained: the gained share of each accepted draft. lost: what each draft lost.
        """
        self.reached[depth : depth + compared] += 1
        self.accepted[depth : depth + accepted] += 1
        if accepted:
            self.agreed[depth : depth + accepted] += max(0.0, 1 - gained)
        if lost.in_kind or lost.in_pool:
            self.accepted[depth : depth + compared] += lost.in_kind
            self.agreed[depth : depth + compared] += lost.in_pool

    def fade(self) -> None:
        """Reduce the weight of the evidence, once per answer."""
        for counts in (self.reached, self.accepted, self.agreed):
            counts *= _FADE


class Acceptance:
    """Acceptance of the device's own drafts, from past rounds.

    prior: α before any evidence.
    """

    def __init__(self, prior: float = PRIOR_ACCEPTANCE) -> None:
        self._prior = prior
        self._counts: dict[Kind, DepthCounts] = defaultdict(DepthCounts)
        # cached estimates: of one candidate under `dsd`, by greedy; of each kind at a σ
        self._pooled: dict[bool, NDArray[np.float64]] = {}
        self._by_depth: dict[tuple[Kind, float], list[float]] = {}

    def add(
        self, plan: Plan, rounds: Iterable[Round], lost: Mapping[int, Lost] | None = None
    ) -> None:
        """Add the rounds of an answer, complete or not; lost: by number of candidates."""
        self._pooled.clear()
        self._by_depth.clear()
        for counts in self._counts.values():
            counts.fade()
        if plan.exchange is None:
            return
        lost = lost or {}
        levels = [
            (begin, end, self._counts[_kind_of(plan, k)], lost.get(k, _NOTHING_LOST))
            for begin, end, k in level_runs(plan)
        ]
        gains = [name for name, counter in counters().items() if counter.is_lossy_gain]
        for round_ in rounds:
            if round_.run is None and plan.streams:
                continue  # no draft of the device was compared
            depth, compared, accepted = round_.run or (0, round_.verified, round_.accepted)
            gained = sum(round_.notes.get(name, 0) for name in gains) / max(1, accepted)
            for begin, end, counts, loss in levels:
                first = max(begin, depth)
                drafts = min(end, depth + compared) - first
                if drafts > 0:
                    agreed = min(drafts, max(0, depth + accepted - first))
                    counts.add(first, drafts, agreed, gained, loss)

    def by_depth(self, plan: Plan, candidates: int = 1, sigma: float = 0.0) -> list[float]:
        """Estimate the acceptance of so many candidates at each depth, if drafts reach it.

        The estimate is for the protocol's default K, at which truncation cuts off ``sigma``. It has
        `MAX_WINDOW` values.
        """
        key = _kind_of(plan, candidates), sigma if candidates > 1 else 0.0
        if key not in self._by_depth:
            self._by_depth[key] = self._estimate(*key).tolist()
        return self._by_depth[key]

    def _estimate(self, kind: Kind, sigma: float) -> NDArray[np.float64]:
        family, greedy, candidates = kind
        member = _members()[family]
        scale = _strict_agreement(member, greedy=greedy)
        if greedy not in self._pooled:
            self._pooled[greedy] = self._pool(greedy)
        single = self._pooled[greedy] * (scale if member.lossless else member.relative_acceptance)
        expected = acceptance_of(candidates, np.minimum(_MAX_ACCEPTANCE, single), sigma)
        counts = self._counts[kind]
        return (_POOL_WEIGHT * expected + counts.accepted) / (_POOL_WEIGHT + counts.reached)

    def _pool(self, greedy: bool) -> NDArray[np.float64]:
        """Estimate α under `dsd` from all protocols, without lossy gains; f64 [`MAX_WINDOW`]."""
        members = _members()
        reached, agreed = np.zeros(MAX_WINDOW), np.zeros(MAX_WINDOW)
        for (family, was_greedy, _), counts in self._counts.items():
            if was_greedy == greedy:
                reached += counts.reached
                agreed += counts.agreed / _strict_agreement(members[family], greedy=greedy)
        return smooth(reached, agreed, self._prior)


def _members() -> dict[str, SpeculationProtocol[Any]]:
    """Return a protocol of each family."""
    return {protocol.family or name: protocol for name, protocol in PROTOCOL_REGISTRY.items()}


def smooth(
    reached: NDArray[np.float64], agreed: NDArray[np.float64], prior: float
) -> NDArray[np.float64]:
    """Estimate α at each depth, f64 [n], from the counts at this depth and at similar depths.

    The counts from depth d/2 on inform depth d, with a weight of at most `_POOL_WEIGHT` positions.
    The estimate at d/2 is informed by the counts from d/4 on, and so forth. prior: α without any
    counts.
    """
    estimate = np.full(
        len(reached), (_PRIOR_WEIGHT * prior + agreed.sum()) / (_PRIOR_WEIGHT + reached.sum())
    )
    half = np.arange(len(reached)) // 2
    reached_on, agreed_on = (np.cumsum(counts[::-1])[::-1][half] for counts in (reached, agreed))
    for _ in range(len(reached).bit_length()):  # each pass reaches twice the depth
        estimate = (_POOL_WEIGHT * estimate[half] + agreed_on) / (_POOL_WEIGHT + reached_on)
    return (_POOL_WEIGHT * estimate + agreed) / (_POOL_WEIGHT + reached)
