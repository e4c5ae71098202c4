"""Drafts without a model: what followed the last time that the text's last tokens stood in it.

In:  the ids of a text. Out: a place in it, how many tokens before that place equal the text's last
     ones, and the ids from there on.

Good where an answer repeats its prompt or itself: quotations, code that is changed in places,
names, tables, loops. A match of one token is right in 2 to 4 of 10 places, one of 16 nearly always,
and `AcceptanceEstimator` by the length tell them apart: leaving the short ones out gained nothing.

There is no index that would grow with the text: one search reads it all, which takes microseconds
(20 in 8,000 tokens, 130 in 131,072), and where the text goes on as foretold, none is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]

_DEEP = 16  # tokens of a match that are counted when places are compared
_PLACES = 32  # latest ones that are compared


@dataclass(frozen=True)
class LookupMatch:
    """A place whose text is expected again.

    start: index of the id that is expected next. end: length of the text. length: of the ids before
    `start`, how many equal those before ``end``, or a little less: not all are counted.
    """

    start: int
    end: int
    length: int

    def extend(self, ids: Ids) -> LookupMatch | None:
        """Go on along the same place in the text's continuation u32 [n], n ≥ `end`.

        None if the text took another way.
        """
        more = len(ids) - self.end
        if ids[self.end :].tobytes() != ids[self.start : self.start + more].tobytes():
            return None
        return LookupMatch(self.start + more, len(ids), self.length + more)

    def continuation(self, ids: Ids, most: int) -> Ids:
        """Return the ``most`` ids that are expected after the text u32 [`end`].

        A place so near that its text ends too soon is one of a loop: this goes round again.
        """
        return np.resize(ids[self.start : self.start + most], most)


def find_match(ids: Ids, least: int = 1) -> LookupMatch | None:
    """Find what may be repeated after the text u32 [n], C-contiguous; None if nothing is.

    Of the latest 32 places at which the text's last ``least`` ≥ 1 tokens stood before, it is the
    one with most tokens before it as at the end, counted to 16, and of several the latest.
    """
    starts = find_places(ids, ids, least, _PLACES)
    if not len(starts):
        return None
    lengths = match_lengths(ids, starts, ids)
    best = len(starts) - 1 - int(lengths[::-1].argmax())
    return LookupMatch(int(starts[best]), len(ids), int(lengths[best]))


def find_places(ids: Ids, text: Ids, least: int, most: int) -> NDArray[np.int64]:
    """Return where ``ids`` u32 [n] goes on behind the text's last ``least`` ≥ 1 tokens.

    A place is the index of the token that follows, i64 [m], each below n, ascending: the last
    ``most`` of them.
    """
    if len(ids) <= least or len(text) < least:
        return np.empty(0, np.int64)
    # bool [n - least]: whether the `least` tokens from here on are the last ones
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
