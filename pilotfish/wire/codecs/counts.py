"""A whole distribution as integers that sum to a power of two (`dssd`'s P̃).

In:  counts i64 [V] ≥ 0 with sum 2^bits, most of them 0. Out: a frame. Decoding returns the counts.

The ids with counts above 0 are coded as the gaps of one row (`wire.codecs.gaps`). A count of e + 1
bits is coded as e in unary and its lower e bits (Elias' gamma code). No dense form is needed: if
most tokens have counts above 0, a gap costs a bit or two.
"""

from typing import Final

import numpy as np

from pilotfish.base.errors import MalformedError
from pilotfish.wire.codecs.bits import BitReader, BitSlots, Ints, write_frame
from pilotfish.wire.codecs.gaps import TILTS, choose_tilt, layout
from pilotfish.wire.messages import Buffer

MAX_BITS: Final = 24
_HEAD: Final = 4  # bytes: one for the tilt, three for the number of counts


def encode_counts(counts: Ints, bits: int) -> bytes:
    """Encode ``counts`` i64 [V] ≥ 0, V < 2²⁴, with sum 2^``bits``, ``bits`` ≤ 24."""
    ids = (counts != 0).nonzero()[0]
    numbers = counts[ids]
    assert int(numbers.sum()) == 1 << bits
    tilt = choose_tilt(ids, len(counts))
    laid = layout((len(ids),), len(counts), tilt)
    gaps = laid.raised_gaps(ids)
    # bit length of each number; exact, since all numbers are below 2^53
    widths = np.frexp(numbers)[1].astype(np.int64)
    lengths = np.concatenate((gaps >> laid.parameters, widths))
    exponents = widths - 1
    # [N]: in each number the gap's remainder, then the count's lower bits; `write_frame` drops
    # the bits above the width
    gaps <<= exponents
    gaps |= numbers ^ 1 << exponents
    head = bytes((tilt,)) + len(ids).to_bytes(_HEAD - 1, "little")
    return write_frame(head, lengths, gaps, BitSlots(laid.parameters + exponents))


def decode_counts(frame: Buffer, vocab_size: int, bits: int) -> Ints:
    """Decode the counts i64 [``vocab_size``] of ``frame``, which sum to 2^``bits``.

    Raises `MalformedError` for an invalid frame. The frame's length and ``vocab_size`` bound the
    time and the memory.
    """
    if len(frame) < _HEAD:
        raise MalformedError("A frame of counts ends within its head.")
    tilt = frame[0]
    if tilt >= len(TILTS):
        raise MalformedError("The first byte of a frame of counts has no defined meaning.")
    filled = int.from_bytes(frame[1:_HEAD], "little")
    if not 0 < filled <= vocab_size:
        raise MalformedError(
            f"A frame claims counts of {filled} tokens; it must have 1 to {vocab_size}."
        )
    reader = BitReader(frame, _HEAD, 2 * filled)
    exponents = reader.lengths[filled:] - 1
    if int(exponents.max()) > MAX_BITS:
        raise MalformedError(f"A count has more than {MAX_BITS} bits.")
    laid = layout((filled,), vocab_size, tilt)
    fixed = reader.fixed(BitSlots(laid.parameters + exponents))
    ids = laid.ids(reader.lengths[:filled], fixed >> exponents)
    if int(ids[-1]) >= vocab_size:
        raise MalformedError(
            f"A count belongs to no token: the vocabulary has {vocab_size} tokens."
        )
    highest = 1 << exponents
    numbers = fixed & highest - 1 | highest
    if int(numbers.sum()) != 1 << bits:
        raise MalformedError(f"The counts do not sum to 2^{bits}.")
    counts = np.zeros(vocab_size, np.int64)
    counts[ids] = numbers
    return counts
