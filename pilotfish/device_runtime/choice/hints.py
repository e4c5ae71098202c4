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

from pilotfish.device_runtime.choice.acceptance import DepthCounts, smooth
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round
from pilotfish.wire.protocols.ahead import DEVICE, EDGE, TEXT, Ahead

ALL = "all"
_FADE = 0.8  # an answer; whether a text repeats itself depends on the request
_PRIOR_ACCEPTANCE = 0.8  # α of an edge's drafter that has shown nothing
# passes that could have taken a repeat, those that did, tokens and positions of these: as if 32 had
# been seen, and one in 25 had found a token more
_PRIOR_REPEATS = np.array([32.0, 1.28, 2.56, 2.56])


def hint_source(plan: Plan) -> str:
    """Return whose hints the plan uses: "all", "device" or "edge"; "" for none."""
    exchange = plan.exchange
    if not isinstance(exchange, Ahead):
        return ""
    if exchange.device_drafts:
        return ALL if exchange.edge_drafts else DEVICE
    return EDGE


class EdgeHints:
    """Evidence on them, apart for a greedy target and one that samples."""

    def __init__(self) -> None:
        # f64 [4], as `_HOPED`
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
        for one in rounds:
            if one.source == EDGE:
                self._drafts[greedy].add(0, one.verified, one.accepted)
            elif one.source == TEXT:
                self._repeats[greedy] += [1, 1, 1 + one.accepted, 1 + one.window]
            elif not one.source:  # else it was not looked for
                self._repeats[greedy] += [1, 0, 0, 0]

    def acceptance_by_depth(self, plan: Plan) -> NDArray[np.float64]:
        """Estimate α of the edge's drafter at each depth, given that it is reached; f64 [n]."""
        seen = self._drafts[plan.sampling.sampling.greedy]
        return smooth(seen.reached, seen.agreed, _PRIOR_ACCEPTANCE)

    def repeats(self, plan: Plan) -> tuple[float, float, float]:
        """Estimate the share of tokens from passes with a repeat, and of such a pass the tokens
        and the positions.
        """
        passes, found, tokens, positions = self._repeats[plan.sampling.sampling.greedy].tolist()
        return tokens / (tokens + passes - found), tokens / found, positions / found
