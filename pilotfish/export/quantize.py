"""Quantise weights to 4 or 8 bits, in blocks along the input width.

In: w [N, K] float32. Out: codes, and one scale per block of columns, with w ≈ (code − 2^(bits−1)) ·
scale. MatMulNBits and DequantizeLinear both use these codes and scales. A block has BLOCK columns,
or more if a caller allows it, since 8 bits in wide blocks take less time (docs/engines.md).

**Weights that were already quantised keep their values.** In int4 a dialect takes the codes of
4-bit blocks from the source and calls nothing here. This module also finds the form in floats:
blocks of GGUF's Q4_0 and Q8_0 have it exactly, and blocks of Q4_1, Q4_K, AWQ and GPTQ with an
offset per block, w = (code − 8) · scale + offset (`_grid`). Rounding Q4_1 a second time would cost
a drafter a quarter of its acceptance (docs/engines.md).

Other weights are rounded symmetrically to the nearest code here, in 8 bits and for experts. In 4
bits, matrices are rounded by their inputs on a text, with zero points (`export.calibration`). Float
zero points would take ONNX Runtime's kernel 50 times as long, and offsets need a separate product
with the block sums of x (`export.dialects.quantized_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.blocks import BLOCK, Quantized, largest_block
from pilotfish.export.export_errors import ExportError

CHUNK = 1 << 18  # number of weights that are quantised at a time, to fit the CPU's cache
SAMPLE = 64  # number of blocks that are examined to detect earlier quantisation
ROUNDING = 1e-6  # maximum rounding error in float32, relative to a block's largest weight


class _Blocks(NamedTuple):
    """Rounded blocks: codes f32 [n, block], scales and offsets f32 [n]."""

    codes: NDArray[np.float32]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32]

    def equal(self, blocks: NDArray[np.float32], half: int) -> NDArray[np.bool_]:
        """Return which blocks equal `blocks` [n, block] up to float32's rounding, bool [n]."""
        again = (self.codes - np.float32(half)) * self.scales[:, None] + self.offsets[:, None]
        allowed = ROUNDING * np.abs(blocks).max(axis=1, keepdims=True)
        matches: NDArray[np.bool_] = (np.abs(again - blocks) <= allowed).all(axis=1)
        return matches


# A function that rounds (blocks [n, block], half, count) to codes below 2 · half. The weight
# farthest from the zero point is `count` steps away.
_Rounding = Callable[[NDArray[np.float32], int, int], _Blocks]


class _Grid(NamedTuple):
    """A rounding method with `most` steps, or one of the step counts `others` if that is exact.

    There are no `others` if few blocks are exact with any step count.
    """

    method: _Rounding
    most: int
    others: Sequence[int] = ()


def quantize(
    name: str,
    weight: NDArray[np.float32],
    bits: int,
    *,
    offsets_allowed: bool = True,
    widest: int = BLOCK,
) -> Quantized:
    """Quantise `weight` [N, K] to `bits` bits, without offsets unless `offsets_allowed`.

    Args:
        widest: largest number of columns per block for weights in 8 bits that were not rounded in
        blocks of BLOCK before. 4 bits are too coarse for wider blocks.

    Raises:
        ExportError: if K is not a multiple of BLOCK.
    """
    rows, width = weight.shape
    if width % BLOCK:
        raise ExportError(
            f"{name} has width {width}, but int{bits} needs a multiple of {BLOCK}: use fp32 or fp16"
        )
    grid = _grid(weight.reshape(-1, BLOCK), bits, shifted=offsets_allowed)
    block = BLOCK
    if bits == 8 and not grid.others:
        block = min(largest_block(width) or BLOCK, widest)
    codes = np.empty((rows, width), np.uint8)
    scales, offsets = np.empty((2, rows, width // block), np.float32)
    step = max(CHUNK // width, 1)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        rounded = _round(weight[part].reshape(-1, block), 2 ** (bits - 1), grid)
        codes[part] = rounded.codes.reshape(-1, width)
        scales[part] = rounded.scales.reshape(-1, width // block)
        offsets[part] = rounded.offsets.reshape(-1, width // block)
    return Quantized(bits, codes, scales, offsets if offsets.any() else None, block=block)


def is_rounded(weight: NDArray[np.float32], bits: int) -> bool:
    """Whether `quantize` keeps the values of most blocks of `weight` [N, K] exactly."""
    return bool(_grid(weight.reshape(-1, BLOCK), bits, shifted=True).others)


def _round(blocks: NDArray[np.float32], half: int, grid: _Grid) -> _Blocks:
    """Round blocks [n, block]: exactly if a step count of the grid allows it, else to nearest."""
    rounded = grid.method(blocks, half, grid.most)
    for count in grid.others:
        inexact = np.flatnonzero(~rounded.equal(blocks, half))
        if not inexact.size:
            break
        again = grid.method(blocks[inexact], half, count)
        exact = again.equal(blocks[inexact], half)
        for values, exact_values in zip(rounded, again, strict=True):
            values[inexact[exact]] = exact_values[exact]
    return rounded


def _grid(blocks: NDArray[np.float32], bits: int, *, shifted: bool) -> _Grid:
    """Return the grid that fits most blocks of a sample exactly, or else the default grid."""
    half = 2 ** (bits - 1)
    sample = blocks[:: max(len(blocks) // SAMPLE, 1)]
    sample = sample[sample.any(axis=1)]
    # With 8 bits, the symmetric form is nearly exact, so offsets are not tried.
    methods = [(_round_symmetric, half)]
    if bits == 4 and shifted:
        methods.append((_round_shifted, 2 * half - 1))
    best, most_exact = _Grid(_round_symmetric, half), len(sample) // 2
    for method, most in methods:
        exact = {n: method(sample, half, n).equal(sample, half) for n in range(most, 0, -1)}
        count = int(np.any(list(exact.values()), axis=0).sum())
        # Both forms are counted: the symmetric form also fits blocks with another zero point if
        # their codes happen to be near it. If both fit as many blocks, it wins; it has no offsets.
        if count > most_exact:
            best = _Grid(method, most, sorted(exact, key=lambda n: -int(exact[n].sum())))
            most_exact = count
    return best


def _round_symmetric(blocks: NDArray[np.float32], half: int, count: int) -> _Blocks:
    """Round to multiples of a scale; the largest weight becomes −count steps."""
    # The scale has the opposite sign of the largest weight, because −half has a code and +half has
    # none.
    largest = np.abs(blocks).argmax(axis=1)
    scales = blocks[np.arange(len(blocks)), largest] / np.float32(-count)
    scales[scales == 0] = 1.0
    codes = np.clip(np.rint(blocks / scales[:, None]) + half, 0, 2 * half - 1)
    return _Blocks(codes, scales, np.zeros_like(scales))


def _round_shifted(blocks: NDArray[np.float32], half: int, count: int) -> _Blocks:
    """Round to steps above the smallest weight; the largest weight is `count` steps."""
    low = blocks.min(axis=1)
    scales = (blocks.max(axis=1) - low) / np.float32(count)  # 0 if all weights of a block are equal
    steps = np.where(scales == 0, np.float32(1), scales)
    codes = np.rint((blocks - low[:, None]) / steps[:, None])
    return _Blocks(codes, scales, low + half * scales)


def quantize_rows(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round to int8 with one scale per row, for embeddings: codes i8 [N, K], scales f32 [N, 1]."""
    codes = np.empty(weight.shape, np.int8)
    scales = np.empty((len(weight), 1), np.float32)
    step = max(CHUNK // weight.shape[1], 1)
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        scale = np.abs(weight[part]).max(axis=1, keepdims=True) / np.float32(127)
        scale[scale == 0] = 1.0
        codes[part], scales[part] = np.rint(weight[part] / scale), scale
    return codes, scales
