"""Offsets of blocks as zero points and further columns of the same product.

A weight in blocks with codes c, scale s and offset o is

    w = (c − half) · s + o = (c − z) · s + r,   z = round(half − o / s),   |r| ≤ s / 2.

The kernel applies the zero point z at no cost. The rest r, one number per block, is multiplied by
the sum of x over the block. It becomes columns of the weight: r = u₀ · d₀ + u₁ · d₁ + … with digits
d of as many bits as a code, and units u, one per row and digit, as the scales of these columns. The
columns of a digit begin with a block, since a block has one scale. The input is continued by copies
of the block sums, so any columns in a row, as many as there are sums, contain each sum once.

So the offsets take 10 % more columns instead of a product of their own in float32. The digits hold
r up to half a unit of the last digit: with 4 bits 1/2,700 of the row's largest r, with 8 bits less.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.blocks import Quantized
from pilotfish.export.dialects.operators import Operators

Floats = NDArray[np.float64]

DIGITS = {4: 3, 8: 2}  # digits of a rest, by bits


def append_sums(net: Operators, x: str, weight: Quantized) -> str:
    """Continue x [T, K] by the columns that `fold_offsets(weight)` has beyond K; [T, K′]."""
    count = weight.scales.shape[1]
    blocks = net.reshape(x, [-1, count, weight.block])
    sums = net.graph.op("ReduceSum", blocks, net.graph.constant([2], "int64"), keepdims=0)
    return net.concat(x, *[sums] * _copies(weight))


def fold_offsets(weight: Quantized) -> Quantized:
    """Return the weight [N, K′] without offsets for an input that `append_sums` has continued.

    K′ = K + copies · sums need not be a multiple of the block. The column order is dropped: the
    input is in the order of the codes.
    """
    shifted = weight.without_zeros()
    assert shifted.offsets is not None
    half, block = weight.zero_point, weight.block
    scales, offsets = shifted.scales.astype(np.float64), shifted.offsets.astype(np.float64)
    # A block of equal weights has the scale 0; it is one step of the size of its offset.
    level = scales == 0
    codes = np.where(np.repeat(level, block, axis=1), half + 1, weight.codes)
    scales = np.where(level, offsets, scales)
    steps = np.divide(offsets, scales, out=np.zeros_like(offsets), where=~level)
    zeros = np.clip(np.rint(half - steps), 0, 2 * half - 1)
    rests = np.where(level, 0, offsets - (half - zeros) * scales)
    further, units = _digits(weight, rests)
    middle = np.full(units.shape, half)
    return replace(
        weight,
        codes=np.concatenate([codes, further], axis=1).astype(np.uint8),
        scales=np.concatenate([scales, units], axis=1).astype(np.float32),
        zeros=np.concatenate([zeros, middle], axis=1).astype(np.uint8),
        offsets=None,
        order=None,
    )


def _digits(weight: Quantized, rests: Floats) -> tuple[Floats, Floats]:
    """Write rests [N, sums] in digits: codes [N, copies · sums], and the scales of their blocks."""
    half, block = weight.zero_point, weight.block
    rows, count = rests.shape
    codes = np.full((rows, _copies(weight) * count), float(half))
    units = np.ones((rows, -(-codes.shape[1] // block)))
    for start in _starts(weight):
        unit = np.abs(rests).max(axis=1, keepdims=True) / (half - 1)
        unit[unit == 0] = 1
        digits = np.rint(rests / unit)
        rests = rests - digits * unit
        columns = np.arange(start, start + count)
        codes[:, columns] += digits[:, columns % count]
        units[:, start // block : -(-(start + count) // block)] = unit
    return codes, units


def _starts(weight: Quantized) -> range:
    """Return the first column of each digit, counted from K."""
    width = -(-weight.scales.shape[1] // weight.block) * weight.block
    return range(0, DIGITS[weight.bits] * width, width)


def _copies(weight: Quantized) -> int:
    """Return how often the input repeats the block sums."""
    count: int = weight.scales.shape[1]
    return -(-(_starts(weight)[-1] + count) // count)
