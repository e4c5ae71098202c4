"""Masks of the tokens that a grammar allows, packed into bits, for rows that another process masks.

In:  a `Constraint` and the rows that it would change. Out: `Masks`, which is itself a constraint of
     exactly these rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats


@dataclass(frozen=True, eq=False)
class Masks:
    """Allowed tokens of n rows over ``vocab`` tokens.

    bits: u8 [n, ⌈vocab/8⌉], the lowest bit first; bits beyond the vocabulary mean nothing.
    """

    bits: NDArray[np.uint8]
    vocab: int

    @classmethod
    def pack(cls, allowed: NDArray[np.bool_]) -> "Masks":
        """Pack marks of allowed tokens, bool [n, V]."""
        return cls(np.packbits(allowed, axis=1, bitorder="little"), allowed.shape[1])

    @classmethod
    def unrestricted(cls, rows: int, vocab: int) -> "Masks":
        """Allow all tokens in each row."""
        return cls(np.full((rows, mask_bytes(vocab)), 0xFF, np.uint8), vocab)

    @classmethod
    def join(cls, parts: "Sequence[Masks]") -> "Masks":
        """Join the rows of masks over the same vocabulary; at least one."""
        return cls(np.concatenate([part.bits for part in parts]), parts[0].vocab)

    def __len__(self) -> int:
        return len(self.bits)

    def __getitem__(self, rows: slice) -> "Masks":
        return Masks(self.bits[rows], self.vocab)

    def unpack(self) -> NDArray[np.bool_]:
        """Return the marks of allowed tokens, bool [n, V]."""
        allowed = np.unpackbits(self.bits, axis=1, count=self.vocab, bitorder="little")
        return allowed.view(np.bool_)

    def allows(self, ids: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Mark the allowed ones of K tokens in each row; ids, result: [n, K]."""
        octets = np.take_along_axis(self.bits, (ids >> 3).astype(np.int64), axis=1)
        return (octets >> (ids & 7).astype(np.uint8) & 1).astype(np.bool_)

    def counts(self) -> NDArray[np.int64]:
        """Count the allowed tokens of each row, i64 [n]."""
        counts: NDArray[np.int64] = self.unpack().sum(axis=1, dtype=np.int64)
        return counts

    def forbid(
        self, logits: Floats, answer: NDArray[np.uint32], paths: Sequence[Sequence[int]]
    ) -> Sequence[int]:
        """Set the logits [n, V] of forbidden tokens to −∞, in place; there are no dead ends."""
        np.copyto(logits, -np.inf, where=~self.unpack())
        return ()

    def forced(self, answer: NDArray[np.uint32], path: Sequence[int]) -> Sequence[int]:
        """Return no tokens, since masks know no text."""
        return ()


def mask_bytes(vocab: int) -> int:
    """Return the bytes of a row's mask."""
    return -(-vocab // 8)
