"""How forecasts of `ahead` came true: seconds a token as they were, over those of the model.

The model knows neither what an edge with more to do leaves out, nor jitter, nor that hints are
gathered, nor a drafter beside the target that gives nothing. So each kind of plan, with the
device's drafts and without, has the ratio of its last answers. It fades towards 1 from answer to
answer, of whatever protocol, so that what was tried in vain is tried again after a long time.
"""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.choice.hints import hint_source
from pilotfish.device_runtime.plan import Plan
from pilotfish.wire.protocols.ahead import EDGE

_LEAST, _MOST = 0.5, 2.5  # of one answer
_HOPE_WEIGHT = 2.0  # answers as forecast
_WHOLE = 16  # rounds of an answer that counts as one; a shorter one for its part
_FADE = 0.95  # an answer


class ForecastErrors:
    """The ratios of the last answers under `ahead`."""

    def __init__(self) -> None:
        # f64 [2], by whether the device drafts: answers, and the sum of their ratios
        self._seen: dict[bool, NDArray[np.float64]] = defaultdict(lambda: np.zeros(2))

    def fade(self) -> None:
        """Note an answer."""
        for seen in self._seen.values():
            seen *= _FADE

    def add(self, plan: Plan, rounds: int, token_s: float, expected_s: float) -> None:
        """Add seconds a token over so many rounds, and those that the model has for them."""
        if token_s > 0.0 and expected_s > 0.0:
            ratio = min(_MOST, max(_LEAST, token_s / expected_s))
            self._seen[hint_source(plan) != EDGE] += min(1.0, rounds / _WHOLE) * np.array(
                [1.0, ratio]
            )

    def factor(self, plan: Plan) -> float:
        """Return by how much a forecast of this plan is to be multiplied."""
        answers, ratios = self._seen[hint_source(plan) != EDGE].tolist()
        return float((_HOPE_WEIGHT + ratios) / (_HOPE_WEIGHT + answers))
