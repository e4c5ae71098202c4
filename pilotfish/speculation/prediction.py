"""Follow an answer along its prediction: the text that a request expects the answer to resemble.

In:  the prediction's ids, and the answer's tokens as they are committed. Out: the ids that are
     expected next, with a margin for their acceptance; and how many ids the answer has taken.

A cursor stands at the id that is expected next. While the answer continues as predicted, the cursor
moves with it. Where the answer differs, the prediction is searched for the answer's last tokens.
Long matches are preferred, and among equal ones the place nearest to the cursor: an edited text
mostly continues soon after the place of the edit. Without a good match, the cursor moves on by one
id per token, since an edit often replaces words by as many others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.prompt_lookup import Ids, match_lengths
from pilotfish.speculation.sequences import common_prefix

_DEEP = 16  # upper limit of the answer's last tokens that are compared with the prediction
_PLACES = 64  # number of places, the nearest ones, that are compared
_NEAR = 8.0  # distance (ids) up to which a place is hardly less likely than the cursor's


class PredictionCursor:
    """A place in a prediction that follows the answer. Not thread-safe.

    ids: the prediction u32 [n]. taken: number of ids that the answer has repeated so far, each
    counted once.
    """

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self._place = 0  # index of the id that is expected next
        self._margin = 0.0  # margin of this id, see `margins`
        self._recent: list[int] = []  # the answer's last tokens, at most `_DEEP`
        self._taken = np.zeros(len(ids), np.bool_)

    @property
    def taken(self) -> int:
        """Number of ids that the answer has repeated so far, each counted once."""
        return int(self._taken.sum())

    def expected(self, most: int) -> Ids:
        """Return the next ids that are expected, at most ``most``; none at the prediction's end."""
        return self.ids[self._place : self._place + max(0, most)]

    def margins(self, count: int) -> Sequence[float]:
        """Return the margins of the next ``count`` ids, for `AcceptanceEstimator`.

        The margin is the number of tokens before an id that match, less where the place is far from
        the cursor's last place.
        """
        return [self._margin + at for at in range(count)]

    def follow(self, tokens: Sequence[int]) -> int:
        """Follow the next committed tokens; return how many of them were expected, from the first.

        If a token was not expected, the cursor is placed anew after the last of the tokens.
        """
        if not tokens:
            return 0
        place = self._place
        agreed = common_prefix(self.expected(len(tokens)), np.array(tokens, np.uint32))
        self._taken[place : place + agreed] = True
        self._recent = [*self._recent, *tokens][-_DEEP:]
        if agreed == len(tokens):
            self._place, self._margin = place + agreed, self._margin + agreed
        else:
            self._place, self._margin = self._find(place + len(tokens))
        return agreed

    def _find(self, likely: int) -> tuple[int, float]:
        """Return the best place after the answer's last tokens, and its margin.

        likely: the place if the answer had replaced ids by as many others.
        """
        recent = np.array(self._recent, np.uint32)
        starts: NDArray[np.int64] = np.flatnonzero(self.ids == recent[-1]) + 1
        distances = np.abs(starts - likely)
        if len(starts) > _PLACES:
            nearest = np.argpartition(distances, _PLACES)[:_PLACES]
            starts, distances = starts[nearest], distances[nearest]
        best, margin = min(likely, len(self.ids)), 0.0
        if len(starts):
            margins = match_lengths(self.ids, starts, recent) - np.log2(1.0 + distances / _NEAR)
            at = int(margins.argmax())
            if margins[at] > 0.0:
                best, margin = int(starts[at]), float(np.floor(margins[at]))
        return best, margin


def count_taken(prediction: Ids, answer: Sequence[int]) -> int:
    """Count the ids of a prediction u32 [n] that an answer repeats, token by token."""
    cursor = PredictionCursor(prediction)
    for token in answer:
        cursor.follow([token])
    return cursor.taken


def remaining(prediction: Ids, answer: Sequence[int]) -> Ids:
    """Return the part of a prediction u32 [n] that is expected after the first answer tokens."""
    cursor = PredictionCursor(prediction)
    for token in answer:
        cursor.follow([token])
    return cursor.expected(len(prediction))
