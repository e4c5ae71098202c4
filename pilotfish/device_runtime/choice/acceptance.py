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
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round
from pilotfish.speculation.acceptance import PRIOR_ACCEPTANCE
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SpeculationProtocol, counters

_PRIOR_WEIGHT = 4.0  # weight of the prior, in positions
_POOL_WEIGHT = 16.0  # weight of other depths or protocols, in positions
_FADE = 0.97  # factor by which the weight of the evidence shrinks with each answer
_MAX_ACCEPTANCE = 0.98  # upper bound of a rescaled α
Kind = tuple[str, bool]


def _kind_of(plan: Plan) -> Kind:
    """Return (protocol family, greedy): plans with the same key have the same acceptance."""
    family = plan.exchange.family if plan.exchange is not None else ""
    return family or plan.protocol, plan.sampling.sampling.greedy


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
        self, depth: int, compared: int, accepted: int, gained: float = 0.0, lost: float = 0.0
    ) -> None:
        """Add ``compared`` drafts from this depth on, of which the first ``accepted`` agreed.

        lost: the acceptance of each draft at the default K, less that at the K of these drafts.
        """
        self.reached[depth : depth + compared] += 1
        self.accepted[depth : depth + accepted] += 1
        if accepted:
            self.agreed[depth : depth + accepted] += max(0.0, 1 - gained / accepted)
        if lost:
            self.accepted[depth : depth + compared] += lost
            self.agreed[depth : depth + compared] += lost

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
        self._by_depth: dict[Kind, NDArray[np.float64]] = {}  # cached estimates

    def add(self, plan: Plan, rounds: Iterable[Round], lost: float = 0.0) -> None:
        """Add the rounds of an answer, complete or not; lost: see `DepthCounts.add`."""
        self._by_depth.clear()
        for counts in self._counts.values():
            counts.fade()
        if plan.exchange is None:
            return
        counts = self._counts[_kind_of(plan)]
        gains = [name for name, counter in counters().items() if counter.is_lossy_gain]
        for round_ in rounds:
            if round_.run is None and plan.streams:
                continue  # no draft of the device was compared
            depth, compared, accepted = round_.run or (0, round_.verified, round_.accepted)
            gained = sum(round_.notes.get(name, 0) for name in gains)
            counts.add(depth, compared, accepted, gained, lost)

    def acceptance_by_depth(self, plan: Plan) -> NDArray[np.float64]:
        """Estimate α at each depth, for drafts that reach this depth; f64 [`MAX_WINDOW`]."""
        kind = _kind_of(plan)
        if kind not in self._by_depth:
            self._by_depth[kind] = self._estimate(*kind)
        return self._by_depth[kind]

    def _estimate(self, kind: str, greedy: bool) -> NDArray[np.float64]:
        members = {
            protocol.family or name: protocol for name, protocol in PROTOCOL_REGISTRY.items()
        }
        # protocols share only evidence without lossy gains
        scale = {
            name: _strict_agreement(protocol, greedy=greedy) for name, protocol in members.items()
        }
        reached, agreed = np.zeros(MAX_WINDOW), np.zeros(MAX_WINDOW)
        for (name, was_greedy), counts in self._counts.items():
            if was_greedy == greedy:
                reached += counts.reached
                agreed += counts.agreed / scale[name]
        own_counts = self._counts[kind, greedy]
        expected = np.minimum(
            _MAX_ACCEPTANCE,
            smooth(reached, agreed, self._prior)
            * (scale[kind] if members[kind].lossless else members[kind].relative_acceptance),
        )
        return (_POOL_WEIGHT * expected + own_counts.accepted) / (_POOL_WEIGHT + own_counts.reached)


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
