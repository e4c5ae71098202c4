"""Encode hidden states: n vectors of width d in one frame, quantised by blocks (wisv §III-B).

In:  float32 [n, d] and a format: "int8" (default), "int4", "fp16" or "fp32".
Out: a frame of n · `hidden_bytes` bytes. Decoding returns float32 [n, d] close to the input
     ("fp32": equal). A state's bytes do not depend on the other states of the frame.

"int8" and "int4" cut a state into blocks of 32 numbers (the last may be shorter). A block has a
step s, and an integer q from −L to L for each number x, with L = 127 or 7; x is decoded as
x̂ = q · s. The step is a bfloat16, the upper half of a float32. It has float32's range, so that no
block over- or underflows it; and its product with q is exact. It is rounded up, so that |q| ≤ L.

**Error.** Let m be the largest magnitude of the block. Then

    int8   |x̂ − x| ≤ 0.504 · max(m/127, 2⁻¹²⁶)       int4   |x̂ − x| ≤ 0.504 · max(m/7, 2⁻¹²⁶)
    fp16   |x̂ − x| ≤ max(2⁻¹¹ · |x|, 2⁻²⁵)                   fp32   none, bit for bit

The factor 0.504 has two parts: half a step is at most ½(1 + 2⁻⁷) = 0.5039 times the unrounded step,
and 10⁻⁴ covers the rounding of x/s to float32. Steps below 2⁻¹²⁶ would be subnormal, and some
processors are configured to flush these to zero. Zeros stay zeros. Magnitudes above `LARGEST` are
refused, not clipped.
"""

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError
from pilotfish.wire.messages import Buffer

HiddenFormat = Literal["int8", "fp16", "int4", "fp32"]
HIDDEN_FORMATS: Final = ("int8", "fp16", "int4", "fp32")  # the first is the default
BLOCK: Final = 32  # numbers per block; 64 would save 3 % of the bytes and add a third to the error
LARGEST: Final = {
    "int8": 2.0**127,
    "fp16": 65504.0,
    "int4": 2.0**127,
    "fp32": float(np.finfo(np.float32).max),
}

_FLOATS: Final = {"fp16": "<f2", "fp32": "<f4"}

_LEVELS: Final = {"int8": 127, "int4": 7}
_LEAST_STEP: Final = 2.0**-126
# The largest allowed step, as the bits of a bfloat16: its product with −128 or −8, the smallest q
# that a frame can contain, is finite. The bits of infinity, NaN and negative steps are larger
# numbers.
_GREATEST_STEP: Final = {"int8": 0x7BFF, "int4": 0x7DFF}


def hidden_bytes(width: int, form: str) -> int:
    """Return the size in bytes of a state of ``width`` numbers in ``form`` (`HIDDEN_FORMATS`)."""
    if form in _FLOATS:
        return (2 if form == "fp16" else 4) * width
    return 2 * _blocks(width) + (width if form == "int8" else (width + 1) // 2)


def encode_hidden(states: NDArray[np.float32], form: str) -> bytes:
    """Encode ``states`` f32 [n, d], d ≥ 1; ``form``: one of `HIDDEN_FORMATS`.

    Raises `ValueError` for a NaN, an infinity, or a magnitude above ``LARGEST[form]``.
    """
    # [n, blocks]; a NaN in a state makes the maximum NaN, so that the comparison fails
    peaks = np.maximum.reduceat(np.abs(states), _starts(states.shape[1]), axis=1)
    if not peaks.max(initial=0.0) <= LARGEST[form]:
        raise ValueError(
            f"A hidden state has a number that is not finite, or beyond ±{LARGEST[form]:g}, "
            f"which {form} cannot hold."
        )
    if form in _FLOATS:
        return states.astype(_FLOATS[form]).tobytes()
    least = np.maximum(peaks / _LEVELS[form], _LEAST_STEP)
    # [n, blocks], rounded up to the next bfloat16
    steps = ((least.view(np.uint32) >> 16) + 1).astype(np.uint16)
    quanta = np.rint(states / _spread_steps(steps, states.shape[1])).astype(np.int8)
    return (
        steps.astype("<u2").tobytes()
        + (quanta if form == "int8" else _pack_nibbles(quanta)).tobytes()
    )


def decode_hidden(frame: Buffer, count: int, width: int, form: str) -> NDArray[np.float32]:
    """Decode the states f32 [``count``, ``width``] of ``frame``, all finite.

    Raises `MalformedError` for a wrong length (before memory is allocated), for numbers or steps
    that are not finite, and for steps that are negative or too large.
    """
    size = hidden_bytes(width, form)
    if len(frame) != count * size:
        raise MalformedError(
            f"A frame of hidden states has {len(frame)} bytes; {count * size} are expected."
        )
    if form in _FLOATS:
        states = np.frombuffer(frame, _FLOATS[form]).astype(np.float32).reshape(count, width)
        if not np.isfinite(states).all():
            raise MalformedError("A hidden state has a number that is not finite.")
        return states
    octets, blocks = np.frombuffer(frame, np.uint8), _blocks(width)
    # [n, blocks]
    steps = octets[: 2 * count * blocks].view("<u2").reshape(count, blocks)
    if steps.max(initial=0) > _GREATEST_STEP[form]:
        raise MalformedError("A block of a hidden state has a step that is negative or too large.")
    # [n, d], or [n, d/2 rounded up]
    quanta = octets[2 * count * blocks :].view(np.int8).reshape(count, size - 2 * blocks)
    states = _spread_steps(steps, width)
    states *= quanta if form == "int8" else _unpack_nibbles(quanta, width)
    return states


def _blocks(width: int) -> int:
    return -(-width // BLOCK)


def _starts(width: int) -> NDArray[np.int64]:
    """Return the start of each block of a state, i64 [blocks]."""
    return np.arange(0, width, BLOCK, dtype=np.int64)


def _spread_steps(steps: NDArray[np.uint16], width: int) -> NDArray[np.float32]:
    """Return each number's step, f32 [n, width], from the blocks' bfloat16 steps [n, blocks]."""
    exact = (steps.astype(np.uint32) << 16).view(np.float32)
    return exact.repeat(np.diff(_starts(width), append=width), axis=1)


def _pack_nibbles(quanta: NDArray[np.int8]) -> NDArray[np.int8]:
    """Pack two numbers into a byte, the first in the low half: [n, d] to [n, ⌈d/2⌉]."""
    count, width = quanta.shape
    pairs = np.zeros((count, (width + 1) // 2), np.int8)
    pairs[:, : width // 2] = quanta[:, 1::2] << 4
    pairs |= quanta[:, ::2] & 15
    return pairs


def _unpack_nibbles(pairs: NDArray[np.int8], width: int) -> NDArray[np.int8]:
    """Unpack ``pairs`` [n, ⌈width/2⌉] to numbers [n, width]: two's complement, 4 bits."""
    quanta = np.empty((len(pairs), 2 * pairs.shape[1]), np.int8)
    quanta[:, 1::2] = pairs
    np.left_shift(pairs, 4, out=quanta[:, ::2])
    quanta >>= 4
    if quanta[:, width:].any():
        raise MalformedError("The padding of a hidden state is not zero.")
    return quanta[:, :width]
