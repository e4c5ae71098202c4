"""The committed tokens of a session, which both ends hold and compare by a running hash.

hash(n) = BLAKE2b-64 of the first n ids as little-endian u32. A round names the hash of what it
builds on, so that the two ends cannot part ways unseen.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_U32 = np.dtype("<u4")
_EVERY = 256  # tokens: a copy of the running hash, 448 bytes, is kept after each so many


class CommittedTokens:
    """An append-only list of token ids that may be cut back; ``hash`` (8 bytes) follows it.

    Cutting it back, or asking for an earlier hash, costs the same however long it is.
    """

    def __init__(self) -> None:
        self._ids = np.empty(256, dtype=_U32)
        self._length = 0
        self._hash = hashlib.blake2b(digest_size=8)
        self._marks = [self._hash.copy()]  # of the first 0, 1, 2, … times _EVERY tokens
        self.hash = self._hash.digest()

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> NDArray[np.uint32]:
        """The committed ids u32 [n], as a view that the next change may outdate."""
        return self._ids[: self._length]

    def hash_at(self, length: int) -> bytes:
        """The hash of the first ``length`` tokens."""
        return self.hash if length == self._length else self._hash_at(length).digest()

    def _hash_at(self, length: int) -> "hashlib.blake2b":
        mark = min(length // _EVERY, len(self._marks) - 1)
        digest = self._marks[mark].copy()
        digest.update(self._ids[mark * _EVERY : length].tobytes())
        return digest

    def hash_after(self, ids: Sequence[int]) -> bytes:
        """The hash of all tokens with these, not committed, behind them."""
        longer = self._hash.copy()
        longer.update(array("I", ids).tobytes())
        return longer.digest()

    def extend(self, ids: Sequence[int] | NDArray[np.integer]) -> None:
        """Commit more tokens."""
        if isinstance(ids, np.ndarray):
            new = ids.astype(_U32).tobytes()
        else:
            new = array("I", ids).tobytes()
        end = self._length + len(ids)
        if end > len(self._ids):
            grown = np.empty(max(end, 2 * len(self._ids)), dtype=_U32)
            grown[: self._length] = self.ids
            self._ids = grown
        # by bytes: of a round's few tokens each call of numpy's would take longer than all of this
        self._ids.data.cast("B")[4 * self._length : 4 * end] = new
        hashed = self._length
        while (mark := len(self._marks) * _EVERY) <= end:
            self._hash.update(self._ids[hashed:mark].tobytes())
            self._marks.append(self._hash.copy())
            hashed = mark
        self._hash.update(new[4 * (hashed - self._length) :])
        self._length = end
        self.hash = self._hash.digest()

    def truncate(self, length: int) -> None:
        """Forget all tokens after the first ``length``."""
        if length < self._length:
            self._length = length
            self._hash = self._hash_at(length)
            del self._marks[length // _EVERY + 1 :]
            self.hash = self._hash.digest()


def common_prefix(a: NDArray[np.integer[Any]], b: NDArray[np.integer[Any]]) -> int:
    """How many ids, from the first on, are the same in a [n] and b [m]."""
    shorter = min(len(a), len(b))
    a, b = a[:shorter], b[:shorter]
    if a.tobytes() == b.tobytes():  # mostly so, and far sooner seen than by numpy's comparison
        return shorter
    differing = (a != b).nonzero()[0]
    return int(differing[0]) if len(differing) else shorter
