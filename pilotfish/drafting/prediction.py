"""Draft from a request's prediction: the text that the answer is expected to resemble.

In:  the prediction's ids, and the committed tokens of the answer. Out: drafts with acceptances.

The acceptance is learnt within the answer, from all expected ids, whether drafted or not. It starts
low and rises with the length of the match. So a right prediction soon fills whole windows, and a
wrong one is hardly ever drafted from.
"""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.drafting.ahead import Proposal
from pilotfish.speculation.acceptance import REPEAT_PRIOR, AcceptanceEstimator
from pilotfish.speculation.prediction import PredictionCursor
from pilotfish.speculation.prompt_lookup import Ids


class PredictionHints:
    """Proposes the ids that the prediction has after the answer's last tokens.

    prediction: u32 [n]. Not thread-safe.
    """

    def __init__(self, prediction: Ids) -> None:
        self._cursor = PredictionCursor(prediction)
        self._estimator = AcceptanceEstimator(REPEAT_PRIOR)

    def propose(self, limit: int) -> Proposal:
        """Return at most ``limit`` drafts that follow the committed tokens; may be empty."""
        ids = self._cursor.expected(limit).tolist()
        return Proposal(ids, self._estimator.estimate_each(self._cursor.margins(len(ids))))

    def record_tokens(self, ids: Sequence[int]) -> None:
        """Follow the committed tokens, and learn which of the expected ids were right."""
        expected = self._cursor.expected(len(ids)).tolist()
        margins = self._cursor.margins(len(expected))
        agreed = self._cursor.follow(ids)
        for at, margin in enumerate(margins[: agreed + 1]):
            self._estimator.update(margin, at < agreed)
