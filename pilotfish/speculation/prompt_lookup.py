"""Prompt lookup: draft what followed an earlier occurrence of the text's last tokens.

In:  the ids of a text. Out: a place in it, the number of tokens before that place that equal the
     text's last ones, and the ids from there on.

This helps where an answer repeats its prompt or itself: quotations, edited code, names, tables,
loops. A match of one token is right in 2 to 4 of 10 places, one of 16 nearly always;
`AcceptanceEstimator` separates them by length, and leaving out short matches gained nothing.

There is no index that grows with the text: a search reads all of it, in microseconds (20 for 8,000
tokens, 130 for 131,072), and while the text continues as predicted no search is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]

_DEEP = 16  # most tokens of a match that are compared
_PLACES = 32  # most places that are compared, the latest


@dataclass(frozen=True)
class LookupMatch:
    """A place in the text whose continuation is expected again.

    start: index of the id that is expected next. end: length of the text. length: number of ids
    before ``start`` that equal those before ``end``; long matches are not counted to the end.
    """

    start: int
    end: int
    length: int

    def extend(self, ids: Ids) -> LookupMatch | None:
        """Continue the match in the longer text u32 [n], n ≥ `end`; None if the text differs."""
        more = len(ids) - self.end
        if ids[self.end :].tobytes() != ids[self.start : self.start + more].tobytes():
            return None
        return LookupMatch(self.start + more, len(ids), self.length + more)

    def continuation(self, ids: Ids, most: int) -> Ids:
        """Return the ``most`` ids that are expected after the text u32 [`end`].

        If the text ends too soon, the place is part of a loop, and the loop is repeated.
        """
        return np.resize(ids[self.start : self.start + most], most)


def find_match(ids: Ids, least: int = 1) -> LookupMatch | None:
    """Find the best match for the end of the text u32 [n], C-contiguous; None if there is none.

    Compares the latest 32 places after the text's last ``least`` ≥ 1 tokens, and takes the longest
    match, counted to 16 tokens; the latest of several.
    """
    starts = find_places(ids, ids, least, _PLACES)
    if not len(starts):
        return None
    lengths = match_lengths(ids, starts, ids)
    best = len(starts) - 1 - int(lengths[::-1].argmax())
    return LookupMatch(int(starts[best]), len(ids), int(lengths[best]))


def find_places(ids: Ids, text: Ids, least: int, most: int) -> NDArray[np.int64]:
    """Return the places in ``ids`` u32 [n] after the text's last ``least`` ≥ 1 tokens.

    A place is the index of the token that follows; i64 [m], ascending, each below n; only the last
    ``most`` of them.
    """
    if len(ids) <= least or len(text) < least:
        return np.empty(0, np.int64)
    # bool [n - least]: whether the `least` tokens from here on equal the text's last ones
    same = ids[least - 1 : -1] == text[-1]
    for back in range(2, least + 1):
        same &= ids[least - back : -back] == text[-back]
    return np.flatnonzero(same)[-most:] + least


def match_lengths(ids: Ids, starts: NDArray[np.int64], text: Ids) -> NDArray[np.int64]:
    """Count how many ids before each of ``starts`` [m] equal the text's last ones; at most 16."""
    back = np.arange(1, min(_DEEP, len(text)) + 1)
    at = starts[:, None] - back
    differ = ids.take(at, mode="clip") != text[-back]
    differ |= at < 0
    lengths: NDArray[np.int64] = np.where(differ.any(axis=1), differ.argmax(axis=1), len(back))
    return lengths
