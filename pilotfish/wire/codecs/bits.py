"""A frame with two sections of bits: numbers in unary, then numbers of fixed width.

In:  non-negative integers. Out: a frame. Decoding returns the integers. A frame is a head of whole
bytes, then bits, the most significant bit of a byte first:

    unary section   each number v as v zeros and a one
    fixed section   each number in its width of bits, most significant first
    padding         fewer than 8 zeros

With separate sections, both can be read without a loop. The 1 bits of the first section mark the
ends of its numbers. The widths then give the position of every number in the second section.
`docs/wire.md`, "Codecs", is the specification.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError
from pilotfish.wire.messages import Buffer

Ints = NDArray[np.int64]

MAX_BITS_PER_NUMBER: Final = 64  # maximum of the average bits per number; real rows have far fewer
_LARGE: Final = 2**14  # frame length (bytes) from which `BitReader` bounds its search

# By slot size: bool [widths, bits], the bits of a slot that a number of each width uses.
_USED: Final = {w: np.arange(w) >= w - np.arange(w + 1)[:, None] for w in (16, 32, 64)}
_DTYPES: Final = {w: np.dtype(f">u{w // 8}") for w in _USED}


class BitSlots:
    """The positions of numbers' used bits, if each number has a slot of 16, 32 or 64 bits."""

    def __init__(self, widths: Ints) -> None:
        """``widths``: the numbers' widths in bits, [N ≥ 1], each from 0 to 64."""
        widest = int(widths.max())
        bits = 16 if widest <= 16 else 32 if widest <= 32 else 64
        self.dtype = _DTYPES[bits]
        self.index: Ints = _USED[bits].take(widths, 0).ravel().nonzero()[0]
        self.bits = len(widths) * bits


def write_frame(head: bytes, lengths: Ints, fixed: Ints, slots: BitSlots) -> bytes:
    """Return a frame: ``head``, then two sections of at least one number each.

    lengths: length of each unary number in bits, which is the number plus 1. fixed: the numbers of
    fixed width; bits above the width are dropped.
    """
    # positions of the 1 bits, counted from one extra bit before the first section
    ones = lengths.cumsum()
    begin = int(ones[-1]) + 1
    bits = np.zeros(begin + len(slots.index), np.uint8)
    bits[ones] = 1
    spread = np.unpackbits(fixed.astype(slots.dtype).view(np.uint8))
    # "clip" avoids numpy's check of the indices
    spread.take(slots.index, mode="clip", out=bits[begin:])
    return head + np.packbits(bits[1:]).tobytes()


class BitReader:
    """A reader of a frame's numbers; refuses a frame that `write_frame` cannot write."""

    def __init__(self, frame: Buffer, head: int, numbers: int) -> None:
        """Read ``numbers`` ≥ 1 unary numbers after a head of ``head`` bytes.

        ``lengths`` i64 [numbers]: length of each unary number in bits: the number plus 1.
        """
        if 8 * (len(frame) - head) > MAX_BITS_PER_NUMBER * numbers:
            raise MalformedError(
                f"A coded frame has {len(frame)} bytes, too many for {numbers} numbers."
            )
        # a byte that ends with a 1 bit is put in front: it marks the start of the first number
        octets = np.frombuffer(b"\1" + frame[head:], np.uint8)
        self._bits = np.unpackbits(octets)
        unary = self._bits
        if len(octets) > _LARGE:  # the index of a bit takes much more memory than the bit
            ones_before = np.bitwise_count(octets).cumsum(dtype=np.int64)
            unary = unary[: 8 * (int(ones_before.searchsorted(numbers + 1)) + 1)]
        ones = unary.view(np.bool_).nonzero()[0][: numbers + 1]
        if len(ones) <= numbers:
            raise MalformedError("A coded frame ends within its unary section.")
        self.lengths: Ints = ones[1:] - ones[:-1]
        self._begin = int(ones[-1]) + 1

    def fixed(self, slots: BitSlots) -> Ints:
        """Return the numbers of the fixed section, after which the frame must end."""
        end = self._begin + len(slots.index)
        if end + 7 >> 3 << 3 != len(self._bits):
            raise MalformedError(
                f"A coded frame has {len(self._bits) - 8} bits; {end - 8} are expected."
            )
        if any(self._bits[end:].tolist()):
            raise MalformedError("The padding of a coded frame is not zero.")
        bits = np.zeros(slots.bits, np.uint8)
        bits[slots.index] = self._bits[self._begin : end]
        return np.packbits(bits).view(slots.dtype).astype(np.int64)
