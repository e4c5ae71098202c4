"""A corpus of earlier texts, searched for the last two tokens of another text.

In:  the ids of texts. Out: the places after a pair of tokens, found in microseconds whatever the
     number of texts.

All texts are in one array that grows at its end. Most places are sorted by the two tokens before
them; the newest part is searched linearly. When the array is full, the oldest quarter is dropped. A
token takes 4 bytes, and 12 in the index.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.prompt_lookup import Ids, find_places

BREAK = np.uint32(0xFFFF_FFFF)  # separates texts; no token has this id
MOST_TOKENS = 1_000_000  # 16 MB, and 24 MB more while places are being sorted
_PAIR = 2
_UNSORTED = 8192  # most tokens in the linearly searched part


@dataclass(frozen=True)
class CorpusSnapshot:
    """The earlier texts at one moment.

    ids: u32 [n], all texts, each followed by `BREAK`. order: u32 [k], the places below ``sorted``,
    sorted by the two tokens before them. keys: u64 [k], ascending, these pairs of tokens.
    """

    ids: Ids
    keys: NDArray[np.uint64]
    order: NDArray[np.uint32]
    sorted: int

    def find_places(self, text: Ids, most: int) -> NDArray[np.int64]:
        """Return the places after the last two tokens of a text u32 [m], i64 [k], ascending.

        At most ``most`` of them, the last ones.
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
    """Earlier texts, at most ``most`` tokens of them. Thread-safe.

    begin: u32 [n], initial texts, each followed by `BREAK`.
    """

    def __init__(self, most: int = MOST_TOKENS, begin: Ids | None = None) -> None:
        self._most = most
        self._lock = threading.Lock()
        # has spare room at its end
        self._ids = np.empty(0, np.uint32) if begin is None else begin[-most:].copy()
        self._snapshot = _sort(self._ids) if len(self._ids) else EMPTY_SNAPSHOT

    def snapshot(self) -> CorpusSnapshot:
        """Return all texts as they are now."""
        return self._snapshot

    def add(self, text: Ids) -> None:
        """Add a text u32 [m]; only the end of a very long one."""
        with self._lock:
            text = text[-(self._most // 2) :]
            end = self._reserve(len(text) + 1)
            self._ids[end : end + len(text)] = text
            self._ids[end + len(text)] = BREAK
            self._publish(end + len(text) + 1)

    def drop_oldest(self) -> None:
        """Forget the oldest quarter."""
        with self._lock:
            rest = self._snapshot.ids[-(-len(self._snapshot.ids) // 4) :]
            self._ids = rest.copy()
            self._snapshot = _sort(self._ids)

    def _reserve(self, more: int) -> int:
        """Make room for ``more`` tokens; returns where they begin.

        Published tokens are never overwritten, since other threads read them.
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
    """Return texts with all of their places sorted."""
    if len(ids) <= _PAIR:
        return CorpusSnapshot(ids, EMPTY_SNAPSHOT.keys, EMPTY_SNAPSHOT.order, 0)
    # u64 [n - 2], the two tokens before each place
    keys = (ids[:-2].astype(np.uint64) << np.uint64(32)) | ids[1:-1]
    order = keys.argsort(kind="stable")
    return CorpusSnapshot(ids, keys[order], (order + _PAIR).astype(np.uint32), len(ids))
