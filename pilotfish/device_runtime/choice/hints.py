"""Estimate the gain from the edge's own hints under `ahead`: repeats of the text, and a drafter.

Finding a repeat takes no time. So the gain from repeats follows from the share of passes with a
repeat, and from their number of tokens. The gain from the edge's drafter follows from its
acceptance by depth within a pass, and from its pace. The prior for repeats is low but not 0: to
search for them costs nothing.
"""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.choice.acceptance import DepthCounts, smooth
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round
from pilotfish.speculation.acceptance import PRIOR_ACCEPTANCE
from pilotfish.wire.protocols.ahead import DEVICE, EDGE, TEXT, Ahead

ALL = "all"
# factor by which old evidence shrinks with each answer; low, since requests differ in their repeats
_FADE = 0.8
# Four counts: passes that could use a repeat; passes with a repeat; tokens of the passes with a
# repeat; positions (drafts plus one) of the same passes. The prior: one pass in 25 has a repeat of
# one token, with the weight of 32 passes.
_PRIOR_REPEATS = np.array([32.0, 1.28, 2.56, 2.56])


def hint_source(plan: Plan) -> str:
    """Return the source of the plan's hints: "all", "device" or "edge"; "" without hints."""
    exchange = plan.exchange
    if not isinstance(exchange, Ahead):
        return ""
    if exchange.device_drafts:
        return ALL if exchange.edge_drafts else DEVICE
    return EDGE


class EdgeHints:
    """Evidence on the edge's hints, separately for greedy and sampling targets."""

    def __init__(self) -> None:
        # whether the target is greedy → counts f64 [4], like `_PRIOR_REPEATS`
        self._repeats: dict[bool, NDArray[np.float64]] = defaultdict(_PRIOR_REPEATS.copy)
        self._drafts: dict[bool, DepthCounts] = defaultdict(DepthCounts)

    def add(self, plan: Plan, rounds: Iterable[Round]) -> None:
        """Add the rounds of an answer."""
        for repeats in self._repeats.values():
            repeats += (1 - _FADE) * (_PRIOR_REPEATS - repeats)
        for drafts in self._drafts.values():
            drafts.fade()
        if hint_source(plan) not in (ALL, EDGE):
            return
        greedy = plan.sampling.sampling.greedy
        for round_ in rounds:
            if round_.source == EDGE:
                self._drafts[greedy].add(0, round_.verified, round_.accepted)
            elif round_.source == TEXT:
                self._repeats[greedy] += [1, 1, 1 + round_.accepted, 1 + round_.window]
            elif not round_.source:  # a pass with other hints cannot use a repeat
                self._repeats[greedy] += [1, 0, 0, 0]

    def acceptance_by_depth(self, plan: Plan) -> NDArray[np.float64]:
        """Estimate α of the edge's drafter for drafts that reach each depth; f64 [n]."""
        counts = self._drafts[plan.sampling.sampling.greedy]
        return smooth(counts.reached, counts.agreed, PRIOR_ACCEPTANCE)

    def repeats(self, plan: Plan) -> tuple[float, float, float]:
        """Estimate the share of tokens that come from passes with a repeat.

        Also returns the mean tokens and the mean positions of these passes.
        """
        passes, with_repeat, tokens, positions = self._repeats[
            plan.sampling.sampling.greedy
        ].tolist()
        return (
            tokens / (tokens + passes - with_repeat),
            tokens / with_repeat,
            positions / with_repeat,
        )
