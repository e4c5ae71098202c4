"""A frame of two bit sections: numbers in unary, then numbers in fixed width.

In:  non-negative integers. Out: bytes, and back. A frame is a head of whole bytes, then bits, the
most significant bit of a byte first:

    unary section   each number v as v zeros and a one
    fixed section   each number in as many bits as its width says, most significant first
    padding         fewer than 8 zeros

With separate sections both can be read without a loop: the ones of the first section mark the ends
of its numbers, and the widths then give the position of every number in the second. `docs/wire.md`,
"Codecs", is the specification.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError
from pilotfish.wire.messages import Buffer

Ints = NDArray[np.int64]

MAX_BITS_PER_NUMBER: Final = 64  # both sections, on average; far above any real row
_LARGE: Final = 2**14  # bytes from which it pays to search the wanted ones only

# bool [widths, bits]: the bits of a slot that a number of each width uses
_USED: Final = {w: np.arange(w) >= w - np.arange(w + 1)[:, None] for w in (16, 32, 64)}
_DTYPES: Final = {w: np.dtype(f">u{w // 8}") for w in _USED}


class BitSlots:
    """The used bits of numbers that are spread over slots of 16, 32 or 64 bits."""

    def __init__(self, widths: Ints) -> None:
        """``widths`` [N ≥ 1] from 0 to 64."""
        widest = int(widths.max())
        bits = 16 if widest <= 16 else 32 if widest <= 32 else 64
        self.dtype = _DTYPES[bits]
        self.index: Ints = _USED[bits].take(widths, 0).ravel().nonzero()[0]
        self.bits = len(widths) * bits


def write_frame(head: bytes, lengths: Ints, fixed: Ints, slots: BitSlots) -> bytes:
    """Return the frame of ``head`` and two sections of at least one number each.

    lengths: bits of the unary numbers, one more than each number. fixed: the numbers of fixed
    width; higher bits are dropped.
    """
    # positions of the ones, with one bit before the first section
    ones = lengths.cumsum()
    begin = int(ones[-1]) + 1
    bits = np.zeros(begin + len(slots.index), np.uint8)
    bits[ones] = 1
    spread = np.unpackbits(fixed.astype(slots.dtype).view(np.uint8))
    # "clip" skips a check of the index
    spread.take(slots.index, mode="clip", out=bits[begin:])
    return head + np.packbits(bits[1:]).tobytes()


class BitReader:
    """The numbers of a frame after its head; a frame that `write_frame` cannot write is refused."""

    def __init__(self, frame: Buffer, head: int, numbers: int) -> None:
        """Read ``numbers`` ≥ 1 unary numbers after a head of ``head`` bytes.

        ``lengths`` i64 [numbers]: their lengths in bits, one more than each number.
        """
        if 8 * (len(frame) - head) > MAX_BITS_PER_NUMBER * numbers:
            raise MalformedError(f"A coded frame has {len(frame)} bytes for {numbers} numbers.")
        # a byte with a one in front marks the start of the first number
        octets = np.frombuffer(b"\1" + frame[head:], np.uint8)
        self._bits = np.unpackbits(octets)
        unary = self._bits
        if len(octets) > _LARGE:  # an index takes 64 times the memory of its bit
            ones_before = np.bitwise_count(octets).cumsum(dtype=np.int64)
            unary = unary[: 8 * (int(ones_before.searchsorted(numbers + 1)) + 1)]
        ones = unary.view(np.bool_).nonzero()[0][: numbers + 1]
        if len(ones) <= numbers:
            raise MalformedError("A coded frame ends within its unary section.")
        self.lengths: Ints = ones[1:] - ones[:-1]
        self._begin = int(ones[-1]) + 1

    def fixed(self, slots: BitSlots) -> Ints:
        """Return the numbers of the fixed section, which must end the frame."""
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
