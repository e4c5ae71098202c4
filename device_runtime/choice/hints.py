"""What the edge's own hints brought under `ahead`: repeats of the text, and a drafter's beside it.

A repeat costs no time to find, so all that matters of it is how many tokens the passes had that
could have taken one. What a drafter beside the target brings follows from how often it is right, by
depth within a pass, and from its pace. Of repeats little is expected until they were seen, but a
little: it costs nothing to let the edge look for them.
"""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.choice.acceptance import DepthCounts, smoothed
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round
from pilotfish.wire.protocols.ahead import DEVICE, EDGE, TEXT, Ahead

ALL = "all"
_FADE = 0.97  # an answer, of the pair's acceptance
_REPEATS_FADE = 0.8  # and of what depends on the request: whether its text repeats itself
_HOPE = 0.8  # α of an edge's drafter that has shown nothing
_REPEATS_HOPE, _REPEATS_WEIGHT = 0.04, 32.0  # passes, and what share of them finds one more token


def whose(plan: Plan) -> str:
    """Return whose hints the plan uses: "all", "device" or "edge"; "" for none."""
    exchange = plan.exchange
    if not isinstance(exchange, Ahead):
        return ""
    if exchange.device_drafts:
        return ALL if exchange.edge_drafts else DEVICE
    return EDGE


class _Repeats:
    """Counts passes that could have taken a repeat, those that did, and what these had."""

    def __init__(self) -> None:
        self.passes, self.found = _REPEATS_WEIGHT, _REPEATS_HOPE * _REPEATS_WEIGHT
        self.tokens = self.positions = 2 * self.found

    def add(self, one: Round) -> None:
        self.passes += 1
        if one.source == TEXT:
            self.found += 1
            self.tokens += 1 + one.accepted
            self.positions += 1 + one.window

    def fade(self) -> None:
        fresh = _Repeats()
        for name, before in vars(fresh).items():
            kept = _REPEATS_FADE * getattr(self, name)
            setattr(self, name, kept + (1 - _REPEATS_FADE) * before)


class EdgeHints:
    """Evidence on them, apart for a greedy target and one that samples."""

    def __init__(self) -> None:
        self._repeats: dict[bool, _Repeats] = defaultdict(_Repeats)
        self._drafts: dict[bool, DepthCounts] = defaultdict(DepthCounts)

    def add(self, plan: Plan, rounds: Iterable[Round]) -> None:
        """Add the rounds of an answer."""
        for repeats in self._repeats.values():
            repeats.fade()
        for drafts in self._drafts.values():
            drafts.fade()
        if whose(plan) not in (ALL, EDGE):
            return
        greedy = plan.law.sampling.greedy
        for one in rounds:
            if one.source == EDGE:
                self._drafts[greedy].add(0, one.verified, one.accepted)
            elif one.source in (TEXT, ""):  # with another source's, nobody looked
                self._repeats[greedy].add(one)

    def hazards(self, plan: Plan) -> NDArray[np.float64]:
        """Estimate α of the edge's drafter at each depth, given that it is reached; f64 [n]."""
        seen = self._drafts[plan.law.sampling.greedy]
        return smoothed(seen.reached, seen.agreed, _HOPE)

    def repeats(self, plan: Plan) -> tuple[float, float, float]:
        """Estimate the share of tokens from passes with a repeat, and of such a pass the tokens
        and the positions.
        """
        seen = self._repeats[plan.law.sampling.greedy]
        share = seen.tokens / (seen.tokens + seen.passes - seen.found)
        return share, seen.tokens / seen.found, seen.positions / seen.found
