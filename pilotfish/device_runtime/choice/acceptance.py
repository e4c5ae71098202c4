"""How often drafts are accepted, by how many before them were: what past rounds tell of it.

The *depth* of a draft is the number of tokens before it that nothing corrected: in a window the
drafts before it, under `ahead` all tokens since the last correction, those included that came
before the device had drafted them. Only drafts that were compared count. What a protocol accepts at
a depth is its own so far; with little evidence, that of all protocols there, scaled by how they
compare (`agreement`); with none, that of the depths from half as deep on, which are alike; and with
none at all a high one: an optimistic estimate gets tried and corrected, a pessimistic one never
would. Evidence fades from answer to answer, so that drafting is tried again after a long time
without it.

A lossy protocol's rounds are evidence for its whole family and, without the tokens that its
counters report as gained, for the lossless protocols.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SpeculationProtocol, counters

PRIOR_ACCEPTANCE = 0.8  # α of a pair without evidence, where a model drafts
_PRIOR_WEIGHT = 4.0  # positions, or rounds, that this counts for
_POOL_WEIGHT = 16.0  # and the evidence on other depths or protocols
_FADE = 0.97  # an answer
_MAX_ACCEPTANCE = 0.98  # α, however the protocols scale
Kind = tuple[str, bool]


def _kind_of(plan: Plan) -> Kind:
    """Return the key of plans that accept alike: family, and whether the target is greedy."""
    family = plan.exchange.family if plan.exchange is not None else ""
    return family or plan.protocol, plan.sampling.sampling.greedy


def _strict_agreement(exchange: SpeculationProtocol[Any], *, greedy: bool) -> float:
    """Return the protocol's lossless α as a multiple of that of `dsd`."""
    if greedy:
        return 1.0
    return (
        exchange.relative_acceptance if exchange.lossless else exchange.strict_relative_acceptance
    )


class DepthCounts:
    """How often each depth was reached and accepted; f64 [`MAX_WINDOW`] each.

    agreed: accepted without those that the protocol's counters report as gained. Which tokens were
    gained is not known, so each accepted one counts as a share.
    """

    def __init__(self) -> None:
        self.reached = np.zeros(MAX_WINDOW)
        self.accepted = np.zeros(MAX_WINDOW)
        self.agreed = np.zeros(MAX_WINDOW)

    def add(self, depth: int, compared: int, accepted: int, gained: float = 0.0) -> None:
        """Add drafts from this depth on, ``accepted`` of ``compared`` in a row."""
        self.reached[depth : depth + compared] += 1
        self.accepted[depth : depth + accepted] += 1
        if accepted:
            self.agreed[depth : depth + accepted] += max(0.0, 1 - gained / accepted)

    def fade(self) -> None:
        """Let the evidence count for a little less."""
        for counts in (self.reached, self.accepted, self.agreed):
            counts *= _FADE


class Acceptance:
    """What past rounds tell of the acceptance of the device's own drafts.

    hope: α where they tell nothing yet.
    """

    def __init__(self, prior: float = PRIOR_ACCEPTANCE) -> None:
        self._prior = prior
        self._counts: dict[Kind, DepthCounts] = defaultdict(DepthCounts)
        self._by_depth: dict[Kind, NDArray[np.float64]] = {}  # computed from these

    def add(self, plan: Plan, rounds: Iterable[Round]) -> None:
        """Add the rounds of an answer, complete or not."""
        self._by_depth.clear()
        for seen in self._counts.values():
            seen.fade()
        if plan.exchange is None:
            return
        seen = self._counts[_kind_of(plan)]
        gains = [name for name, counter in counters().items() if counter.is_lossy_gain]
        for one in rounds:
            if one.run is None and plan.streams:
                continue  # nothing of the device's was there to compare
            depth, compared, accepted = one.run or (0, one.verified, one.accepted)
            gained = sum(one.notes.get(name, 0) for name in gains)
            seen.add(depth, compared, accepted, gained)

    def acceptance_by_depth(self, plan: Plan) -> NDArray[np.float64]:
        """Estimate α at each depth, given that it is reached; f64 [`MAX_WINDOW`]."""
        kind = _kind_of(plan)
        if kind not in self._by_depth:
            self._by_depth[kind] = self._estimate(*kind)
        return self._by_depth[kind]

    def _estimate(self, kind: str, greedy: bool) -> NDArray[np.float64]:
        members = {one.family or name: one for name, one in PROTOCOL_REGISTRY.items()}
        # only the lossless part is pooled
        scale = {name: _strict_agreement(one, greedy=greedy) for name, one in members.items()}
        reached, agreed = np.zeros(MAX_WINDOW), np.zeros(MAX_WINDOW)
        for (name, was_greedy), seen in self._counts.items():
            if was_greedy == greedy:
                reached += seen.reached
                agreed += seen.agreed / scale[name]
        own = self._counts[kind, greedy]
        expected = np.minimum(
            _MAX_ACCEPTANCE,
            smooth(reached, agreed, self._prior)
            * (scale[kind] if members[kind].lossless else members[kind].relative_acceptance),
        )
        return (_POOL_WEIGHT * expected + own.accepted) / (_POOL_WEIGHT + own.reached)


def smooth(
    reached: NDArray[np.float64], agreed: NDArray[np.float64], prior: float
) -> NDArray[np.float64]:
    """Estimate α at each depth, f64 [n], from counts there and of the depths alike.

    Alike are those from half as deep on: at any depth, evidence of these counts for `_POOL_WEIGHT`
    positions at most, and so on from half to half. hope: what is expected without any.
    """
    found = np.full(
        len(reached), (_PRIOR_WEIGHT * prior + agreed.sum()) / (_PRIOR_WEIGHT + reached.sum())
    )
    half = np.arange(len(reached)) // 2
    reached_on, agreed_on = (np.cumsum(counts[::-1])[::-1][half] for counts in (reached, agreed))
    for _ in range(len(reached).bit_length()):  # from depth 0 on, twice as deep each time
        found = (_POOL_WEIGHT * found[half] + agreed_on) / (_POOL_WEIGHT + reached_on)
    return (_POOL_WEIGHT * found + agreed) / (_POOL_WEIGHT + reached)
