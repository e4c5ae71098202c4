"""A frame of two bit sections: numbers in unary, then numbers in fixed width.

In:  non-negative integers. Out: bytes, and back. A frame is a head of whole bytes, then bits, the
most significant bit of a byte first:

    unary section   each number v as v zeros and a one
    fixed section   each number in as many bits as its width says, most significant first
    padding         fewer than 8 zeros

The sections are apart so that both read without a loop: the ones of the first section say where
every number ends, and after them the widths say where every number stands in the second.
`docs/wire.md`, "Codecs", is the specification.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError
from pilotfish.wire.messages import Buffer

Ints = NDArray[np.int64]

MAX_BITS_PER_NUMBER: Final = 64  # unary and fixed together, on average; far beyond any real row
_LARGE: Final = 2**14  # bytes from which it pays to look only at the ones that are wanted

# bits of a slot: [widths, bits], which of them belong to a number of each width
_USED: Final = {w: np.arange(w) >= w - np.arange(w + 1)[:, None] for w in (16, 32, 64)}
_DTYPES: Final = {w: np.dtype(f">u{w // 8}") for w in _USED}


class BitSlots:
    """Which bits count of numbers that each stand in a slot of 16, 32 or 64 bits."""

    def __init__(self, widths: Ints) -> None:
        """``widths`` [N ≥ 1] from 0 to 64."""
        widest = int(widths.max())
        bits = 16 if widest <= 16 else 32 if widest <= 32 else 64
        self.dtype = _DTYPES[bits]
        self.index: Ints = _USED[bits].take(widths, 0).ravel().nonzero()[0]
        self.bits = len(widths) * bits


def write_frame(head: bytes, lengths: Ints, fixed: Ints, slots: BitSlots) -> bytes:
    """The frame of ``head`` and of two sections of at least one number each.

    lengths: those of the unary numbers in bits, one more than each number. fixed: the numbers of
    fixed width, whose bits above that width are dropped.
    """
    # where each one stands, if a bit stood before the first
    ones = lengths.cumsum()
    begin = int(ones[-1]) + 1
    bits = np.zeros(begin + len(slots.index), np.uint8)
    bits[ones] = 1
    spread = np.unpackbits(fixed.astype(slots.dtype).view(np.uint8))
    # "clip" only to skip a check of the index
    spread.take(slots.index, mode="clip", out=bits[begin:])
    return head + np.packbits(bits[1:]).tobytes()


class BitReader:
    """The numbers of a frame behind its head; whatever `write` does not write is refused."""

    def __init__(self, frame: Buffer, head: int, numbers: int) -> None:
        """Read ``numbers`` ≥ 1 unary numbers behind a head of ``head`` bytes.

        ``lengths`` i64 [numbers] are their lengths in bits, one more than each number.
        """
        if 8 * (len(frame) - head) > MAX_BITS_PER_NUMBER * numbers:
            raise MalformedError(f"A coded frame has {len(frame)} bytes for {numbers} numbers.")
        # with a one before the first number, in a byte of its own
        octets = np.frombuffer(b"\1" + frame[head:], np.uint8)
        self._bits = np.unpackbits(octets)
        unary = self._bits
        if len(octets) > _LARGE:  # a place costs 64 times as much as its bit
            ones_before = np.bitwise_count(octets).cumsum(dtype=np.int64)
            unary = unary[: 8 * (int(ones_before.searchsorted(numbers + 1)) + 1)]
        ones = unary.view(np.bool_).nonzero()[0][: numbers + 1]
        if len(ones) <= numbers:
            raise MalformedError("A coded frame ends within its unary section.")
        self.lengths: Ints = ones[1:] - ones[:-1]
        self._begin = int(ones[-1]) + 1

    def fixed(self, slots: BitSlots) -> Ints:
        """The numbers of the fixed section; the frame must end behind them."""
        end = self._begin + len(slots.index)
        if end + 7 >> 3 << 3 != len(self._bits):
            raise MalformedError(
                f"A coded frame has {len(self._bits) - 8} bits where {end - 8} are due."
            )
        if any(self._bits[end:].tolist()):
            raise MalformedError("The padding of a coded frame is not zero.")
        bits = np.zeros(slots.bits, np.uint8)
        bits[slots.index] = self._bits[self._begin : end]
        return np.packbits(bits).view(slots.dtype).astype(np.int64)
