"""Convert GGUF's blocks to `Quantized`: the same codes, in the order and width for kernels.

In: the bytes of a tensor's rows. Out: codes of 4 bits for Q4_0, Q4_1 and Q4_K, and for Q2_K and
Q3_K in blocks of 16; codes of 8 bits for Q8_0, and for Q5_0, Q5_1, Q5_K and Q6_K, because there are
no kernels for 5 or 6 bits. Scales of super-blocks are multiplied into the blocks' scales; minima
become offsets. Weights change only by rounding in float32. ggml-common.h in ggml defines the layout
of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.blocks import Quantized

BYTES_AT_ONCE = 1 << 22

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class _BlockValues(NamedTuple):
    """The content of n blocks: codes u8 [n, weights]; scales and minima f32 [n, blocks].

    w = (code − zero) · scale without minima, else code · scale + minimum.
    """

    codes: Bytes
    scales: Floats
    minima: Floats | None = None

    def by_row(self, rows: int) -> _BlockValues:
        """Reshape so that the first axis has the tensor's rows: u8 [rows, …] and f32 [rows, …]."""
        minima = None if self.minima is None else self.minima.reshape(rows, -1)
        return _BlockValues(self.codes.reshape(rows, -1), self.scales.reshape(rows, -1), minima)


class BlockFormat(NamedTuple):
    """Conversion of a GGUF block type.

    `middle` is the code that becomes 2^(bits−1). Without minima it is the code of weight 0. A code
    in the middle of the range keeps the factors small in kernels that round activations.
    """

    bits: int
    block: int
    middle: int
    read: Callable[[Bytes], _BlockValues]


def keep_blocks(rows: Bytes, form: BlockFormat) -> Quantized:
    """Convert rows of blocks, u8 [N, bytes], a few rows at a time."""
    first = form.read(rows[:1]).by_row(1)
    codes = np.empty((len(rows), first.codes.shape[1]), np.uint8)
    scales = np.empty((len(rows), first.scales.shape[1]), np.float32)
    offsets = None if first.minima is None else np.empty_like(scales)
    step = max(1, BYTES_AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), step):
        some = slice(start, min(start + step, len(rows)))
        part = form.read(rows[some]).by_row(some.stop - start)
        codes[some] = part.codes + np.uint8(2 ** (form.bits - 1) - form.middle)
        scales[some] = part.scales
        if offsets is not None and part.minima is not None:
            offsets[some] = part.minima + np.float32(form.middle) * part.scales
    return Quantized(form.bits, codes, scales, offsets, block=form.block)


def _split(rows: Bytes, *sizes: int) -> list[Bytes]:
    """Split blocks into fields of these sizes in bytes; u8 [n, size] each."""
    blocks = rows.reshape(-1, sum(sizes))
    return np.split(blocks, np.cumsum(sizes)[:-1], axis=1)


def _half(field: Bytes) -> Floats:
    """Read half-precision numbers, f32 [n, 1]."""
    return np.ascontiguousarray(field).view(np.float16).astype(np.float32)


def _bits(field: Bytes, run: int, width: int) -> Bytes:
    """Unpack codes of `width` bits: first the lowest bits of `run` bytes, then their next bits, ….

    u8 [n, bytes] → u8 [n, bytes · 8 / width].
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(1, 1, -1, 1)
    runs = field.reshape(len(field), -1, 1, run) >> shifts
    codes: Bytes = (runs & np.uint8(2**width - 1)).reshape(len(field), -1)
    return codes


def _q4_0(rows: Bytes) -> _BlockValues:
    d, codes = _split(rows, 2, 16)
    return _BlockValues(_bits(codes, 16, 4), _half(d))


def _q4_1(rows: Bytes) -> _BlockValues:
    d, m, codes = _split(rows, 2, 2, 16)
    return _BlockValues(_bits(codes, 16, 4), _half(d), _half(m))


def _fifth_bits(high: Bytes) -> Bytes:
    """Return the fifth bits of 32 codes, u8 [n, 32], each 0 or 16."""
    bits: Bytes = np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return bits


def _q5_0(rows: Bytes) -> _BlockValues:
    d, high, codes = _split(rows, 2, 4, 16)
    return _BlockValues(_bits(codes, 16, 4) | _fifth_bits(high), _half(d))


def _q5_1(rows: Bytes) -> _BlockValues:
    d, m, high, codes = _split(rows, 2, 2, 4, 16)
    return _BlockValues(_bits(codes, 16, 4) | _fifth_bits(high), _half(d), _half(m))


def _q8_0(rows: Bytes) -> _BlockValues:
    d, codes = _split(rows, 2, 32)
    return _BlockValues(codes ^ np.uint8(128), _half(d))


def _q2_k(rows: Bytes) -> _BlockValues:
    scales, codes, d, low = _split(rows, 16, 64, 2, 2)
    minima = _half(low) * -(scales >> 4).astype(np.float32)
    return _BlockValues(_bits(codes, 32, 2), _half(d) * (scales & 15).astype(np.float32), minima)


def _q3_k(rows: Bytes) -> _BlockValues:
    high, codes, packed, d = _split(rows, 32, 64, 12, 2)
    scales = _bits(packed[:, :8], 8, 4) | _bits(packed[:, 8:], 4, 2) << np.uint8(4)
    whole = _bits(codes, 32, 2) | _bits(high, 32, 1) << np.uint8(2)
    return _BlockValues(whole, _half(d) * (scales.astype(np.float32) - 32))


def _scales_and_minima(packed: Bytes) -> tuple[Floats, Floats]:
    """Unpack the 6-bit scales and minima of Q4_K and Q5_K, u8 [n, 12] → f32 [n, 8] each."""
    first, second, third = np.split(packed, 3, axis=1)
    scales = [first & 63, (third & 15) | ((first >> 2) & 48)]
    minima = [second & 63, (third >> 4) | ((second >> 2) & 48)]
    both = (np.concatenate(pair, axis=1).astype(np.float32) for pair in (scales, minima))
    return next(both), next(both)


def _q4_k(rows: Bytes) -> _BlockValues:
    d, low, packed, codes = _split(rows, 2, 2, 12, 128)
    scales, minima = _scales_and_minima(packed)
    return _BlockValues(_bits(codes, 32, 4), _half(d) * scales, -_half(low) * minima)


def _q5_k(rows: Bytes) -> _BlockValues:
    d, low, packed, high, codes = _split(rows, 2, 2, 12, 32, 128)
    scales, minima = _scales_and_minima(packed)
    whole = _bits(codes, 32, 4) | _bits(high, 32, 1) << np.uint8(4)
    return _BlockValues(whole, _half(d) * scales, -_half(low) * minima)


def _q6_k(rows: Bytes) -> _BlockValues:
    low, high, packed, d = _split(rows, 128, 64, 16, 2)
    whole = _bits(low, 64, 4) | _bits(high, 32, 2) << np.uint8(4)
    scales = np.ascontiguousarray(packed).view(np.int8).astype(np.float32)
    return _BlockValues(whole, _half(d) * scales)


# Types → the first bytes of those words of a block that have the exponent of a float, also of types
# without a `BlockFormat`; and the bits of the exponent, unless the float is in half precision.
FLOAT_BYTES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("F16", "BF16", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "F32": (2,),
    "F64": (6,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
EXPONENTS, HALF_EXPONENT = {"F32": 0x7F80, "BF16": 0x7F80, "F64": 0x7FF0}, 0x7C00
FORMATS: Mapping[str, BlockFormat] = {
    "Q4_0": BlockFormat(4, 32, 8, _q4_0),
    "Q4_1": BlockFormat(4, 32, 8, _q4_1),
    "Q5_0": BlockFormat(8, 32, 16, _q5_0),
    "Q5_1": BlockFormat(8, 32, 16, _q5_1),
    "Q8_0": BlockFormat(8, 32, 128, _q8_0),
    "Q2_K": BlockFormat(4, 16, 2, _q2_k),
    "Q3_K": BlockFormat(4, 16, 4, _q3_k),
    "Q4_K": BlockFormat(4, 32, 8, _q4_k),
    "Q5_K": BlockFormat(8, 32, 16, _q5_k),
    "Q6_K": BlockFormat(8, 16, 32, _q6_k),
}
