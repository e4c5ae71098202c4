"""The committed tokens of a session; device and edge hold them and compare a running hash.

hash(n) = BLAKE2b-64 of the first n ids as little-endian u32. Each round names the hash of the
tokens that it extends, so that a divergence of the two ends is detected.
"""

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_U32 = np.dtype("<u4")
_EVERY = 256  # tokens between two stored copies of the running hash (448 bytes each)


class CommittedTokens:
    """A growing list of token ids that can be truncated; ``hash`` (8 bytes) is always current.

    `truncate` and `hash_at` take the same time for any length.
    """

    def __init__(self) -> None:
        self._ids = np.empty(256, dtype=_U32)
        self._bytes = self._ids.data.cast("B")  # the same memory
        self._length = 0
        self._hash = hashlib.blake2b(digest_size=8)
        self._marks = [self._hash.copy()]  # hashes of the first 0, _EVERY, 2 · _EVERY, … tokens
        self.hash = self._hash.digest()

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> NDArray[np.uint32]:
        """The committed ids u32 [n], as a view that is valid until the next change."""
        return self._ids[: self._length]

    def hash_at(self, length: int) -> bytes:
        """Return the hash of the first ``length`` tokens."""
        return self.hash if length == self._length else self._hash_at(length).digest()

    def _hash_at(self, length: int) -> "hashlib.blake2b":
        mark = min(length // _EVERY, len(self._marks) - 1)
        digest = self._marks[mark].copy()
        digest.update(self._ids[mark * _EVERY : length].tobytes())
        return digest

    def hash_after(self, ids: Sequence[int]) -> bytes:
        """Return the hash of the committed tokens followed by these ids."""
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
            self._ids, self._bytes = grown, grown.data.cast("B")
        # copied as bytes: for a round's few tokens, one numpy call takes longer than this method
        self._bytes[4 * self._length : 4 * end] = new
        hashed = self._length
        while (mark := len(self._marks) * _EVERY) <= end:
            self._hash.update(self._ids[hashed:mark].tobytes())
            self._marks.append(self._hash.copy())
            hashed = mark
        self._hash.update(new[4 * (hashed - self._length) :])
        self._length = end
        self.hash = self._hash.digest()

    def truncate(self, length: int) -> None:
        """Remove all tokens after the first ``length``."""
        if length < self._length:
            self._length = length
            self._hash = self._hash_at(length)
            del self._marks[length // _EVERY + 1 :]
            self.hash = self._hash.digest()
