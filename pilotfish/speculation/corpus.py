"""Corpus of earlier texts: finds the places that follow the last two tokens of another text.

In:  the ids of texts. Out: the places after a pair of tokens, found in microseconds for any number
     of texts.

All texts are in one array that grows at its end. Most places are sorted by the two tokens before
them; the newest part is searched linearly. When the array is full, its oldest quarter is dropped.
Each token takes 4 bytes in the array and 12 in the index.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.prompt_lookup import Ids, find_places

BREAK = np.uint32(0xFFFF_FFFF)  # id that ends a text; no token has it
MOST_TOKENS = 1_000_000  # upper limit of a corpus (tokens): 16 MB, and 24 MB more during a sort
_PAIR = 2
_UNSORTED = 8192  # upper limit of the linearly searched part (tokens)


@dataclass(frozen=True)
class CorpusSnapshot:
    """The earlier texts at one moment.

    ids: all texts, each followed by `BREAK`, u32 [n]. sorted: length of the part of ``ids`` that is
    in the index. order: the places in this part, sorted by the two tokens before them, u32 [k].
    keys: these pairs of tokens as numbers, ascending, u64 [k].
    """

    ids: Ids
    keys: NDArray[np.uint64]
    order: NDArray[np.uint32]
    sorted: int

    def find_places(self, text: Ids, most: int) -> NDArray[np.int64]:
        """Return the places that follow the last two tokens of a text u32 [m]; i64 [k], ascending.

        If there are more than ``most`` places, return only the last ones.
        """
        if len(text) < _PAIR:
            return np.empty(0, np.int64)
        key = np.uint64((int(text[-2]) << 32) | int(text[-1]))
        first, last = self.keys.searchsorted(key, "left"), self.keys.searchsorted(key, "right")
        places = self.order[max(first, last - most) : last].astype(np.int64)
        begin = max(0, self.sorted - _PAIR)
        new = find_places(self.ids[begin:], text, _PAIR, most) + begin
        return np.concatenate([places, new])[-most:] if len(new) else places


EMPTY_SNAPSHOT = CorpusSnapshot(
    np.empty(0, np.uint32), np.empty(0, np.uint64), np.empty(0, np.uint32), 0
)


class Corpus:
    """Earlier texts, together at most ``most`` tokens. Thread-safe.

    begin: initial texts, each followed by `BREAK`, u32 [n].
    """

    def __init__(self, most: int = MOST_TOKENS, begin: Ids | None = None) -> None:
        self._most = most
        self._lock = threading.Lock()
        # may be longer than the texts: the rest is spare room
        self._ids = np.empty(0, np.uint32) if begin is None else begin[-most:].copy()
        self._snapshot = _sort(self._ids) if len(self._ids) else EMPTY_SNAPSHOT

    def snapshot(self) -> CorpusSnapshot:
        """Return the present texts; later additions do not change the result."""
        return self._snapshot

    def add(self, text: Ids) -> None:
        """Add a text u32 [m]; add only the end of a text that is longer than ``most`` / 2."""
        with self._lock:
            text = text[-(self._most // 2) :]
            end = self._reserve(len(text) + 1)
            self._ids[end : end + len(text)] = text
            self._ids[end + len(text)] = BREAK
            self._publish(end + len(text) + 1)

    def drop_oldest(self) -> None:
        """Drop the oldest quarter of all tokens."""
        with self._lock:
            rest = self._snapshot.ids[-(-len(self._snapshot.ids) // 4) :]
            self._ids = rest.copy()
            self._snapshot = _sort(self._ids)

    def _reserve(self, more: int) -> int:
        """Make room for ``more`` tokens; return the index of the first.

        Tokens of a published snapshot are never overwritten, since other threads read them.
        """
        used = len(self._snapshot.ids)
        if used + more > self._most:
            rest = self._snapshot.ids[max(used // 4, used + more - self._most) :]
            self._ids = rest.copy()
            self._snapshot = _sort(self._ids)
            used = len(rest)
        if used + more > len(self._ids):
            grown = np.empty(min(2 * (used + more), self._most + 1), np.uint32)
            grown[:used] = self._snapshot.ids
            self._ids = grown
        return used

    def _publish(self, length: int) -> None:
        now, ids = self._snapshot, self._ids[:length]
        if length - now.sorted > _UNSORTED:
            self._snapshot = _sort(ids)
        else:
            self._snapshot = CorpusSnapshot(ids, now.keys, now.order, now.sorted)


def _sort(ids: Ids) -> CorpusSnapshot:
    """Return a snapshot of the texts ``ids`` u32 [n] with all places sorted."""
    if len(ids) <= _PAIR:
        return CorpusSnapshot(ids, EMPTY_SNAPSHOT.keys, EMPTY_SNAPSHOT.order, 0)
    # u64 [n - 2], the two tokens before each place
    keys = (ids[:-2].astype(np.uint64) << np.uint64(32)) | ids[1:-1]
    order = keys.argsort(kind="stable")
    return CorpusSnapshot(ids, keys[order], (order + _PAIR).astype(np.uint32), len(ids))
