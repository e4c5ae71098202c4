"""Quantised weights in blocks, in the layout that kernels read.

    w[n, order[k]] = (codes[n, k] − zero) · scales[n, k // block] + offsets[n, k // block]

`zero` is 2^(bits−1), unless the weight has zero points per block. Kernels apply integer zero points
at no cost. A block has an offset if its smallest weight is not a multiple of its scale. Offsets
need a second product (`export.dialects.quantized_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", np.float32, np.uint8)

BLOCK = 32
SMALLEST, LARGEST = 16, 128  # block sizes that kernels support: powers of 2 in this range


@dataclass(frozen=True)
class Quantized:
    """A quantised weight [N, K] in blocks.

    Attributes:
        bits: bits per code, 4 or 8.
        codes: u8 [N, K] in 0 … 2^bits − 1.
        scales: f32 [N, K / block].
        offsets: f32 [N, K / block]; None if all are 0.
        zeros: u8 [N, K / block], the code that stands for 0; None if all are `zero_point`.
        block: columns per block.
        order: i64 [K], the weight's column for each column of codes; None if the order is the same.
    """

    bits: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32] | None = None
    zeros: NDArray[np.uint8] | None = None
    block: int = BLOCK
    order: NDArray[np.int64] | None = None

    @property
    def zero_point(self) -> int:
        """The code that stands for 0 if `zeros` is None."""
        return int(2 ** (self.bits - 1))

    def floats(self) -> NDArray[np.float32]:
        """Dequantise to f32 [N, K]."""
        rows, width = self.codes.shape
        blocks = self.codes.astype(np.float32).reshape(rows, -1, self.block)
        blocks -= np.float32(self.zero_point) if self.zeros is None else self.zeros[..., None]
        blocks *= self.scales[..., None]
        if self.offsets is not None:
            blocks += self.offsets[..., None]
        weight = blocks.reshape(rows, width)
        if self.order is None:
            return weight
        sorted_columns = np.empty_like(weight)
        sorted_columns[:, self.order] = weight
        return sorted_columns

    def without_zeros(self) -> Quantized:
        """Return the same weight with offsets instead of zero points."""
        if self.zeros is None:
            return self
        offsets = (np.float32(self.zero_point) - self.zeros) * self.scales
        if self.offsets is not None:
            offsets += self.offsets
        return replace(self, offsets=offsets, zeros=None)

    def with_positive_scales(self) -> Quantized:
        """Return the same weight with positive scales and without zero points.

        In a block with a negative scale, each code is replaced by its mirror image about
        `zero_point`. Code 0 has no mirror image: in a block that has this code, all codes are one
        less than the mirror images, and an offset adds one step.
        """
        weight = self.without_zeros()
        if (weight.scales > 0).all():
            return weight
        blocks = weight.codes.reshape(*weight.scales.shape, weight.block)
        negative, zero = weight.scales < 0, weight.scales == 0
        shifted = negative & (blocks.min(axis=2) == 0)
        # with 8 bits, 256 wraps to 0, and the difference wraps back
        mirrors = (2 * weight.zero_point - shifted).astype(np.uint8)[..., None]
        codes = np.where(negative[..., None], mirrors - blocks, blocks)
        codes[zero] = weight.zero_point
        scales = np.where(zero, np.float32(1), np.abs(weight.scales))
        offsets = weight.offsets
        if shifted.any():
            steps = np.where(shifted, scales, np.float32(0))
            offsets = steps if offsets is None else offsets + steps
        return replace(
            weight, codes=codes.reshape(weight.codes.shape), scales=scales, offsets=offsets
        )

    def take(self, rows: NDArray[np.int64]) -> Quantized:
        """Return the rows with these indices."""
        return replace(
            self,
            codes=self.codes[rows],
            scales=self.scales[rows],
            offsets=None if self.offsets is None else self.offsets[rows],
            zeros=None if self.zeros is None else self.zeros[rows],
        )

    def take_columns(self, columns: NDArray[np.int64]) -> Quantized:
        """Return all columns in this order, of a weight without `order` and zero points.

        Whole blocks move; if the order breaks blocks, `order` states it.
        """
        runs = columns.reshape(-1, self.block)
        if (runs[:, 0] % self.block).any() or (np.diff(runs) != 1).any():
            return replace(self, order=np.argsort(columns))
        blocks = runs[:, 0] // self.block
        offsets = None if self.offsets is None else self.offsets[:, blocks]
        return replace(
            self, codes=self.codes[:, columns], scales=self.scales[:, blocks], offsets=offsets
        )

    @property
    def layout(self) -> tuple[int, int, bytes]:
        """What weights whose rows can be stacked into one weight have in common."""
        return self.bits, self.block, b"" if self.order is None else self.order.tobytes()


def join(parts: Sequence[Quantized]) -> Quantized:
    """Stack the rows of weights with the same layout."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return replace(
        first,
        codes=np.concatenate([part.codes for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        offsets=_stack(parts, [part.offsets for part in parts], np.float32(0)),
        zeros=_stack(parts, [part.zeros for part in parts], np.uint8(first.zero_point)),
    )


def _stack(
    parts: Sequence[Quantized], values: Sequence[NDArray[Number] | None], default: Number
) -> NDArray[Number] | None:
    """Stack values [N, K / block] of weights; if only some have them, others get the default."""
    if all(each is None for each in values):
        return None
    shapes = (part.scales.shape for part in parts)
    return np.concatenate(
        [
            np.broadcast_to(default, shape) if each is None else each
            for shape, each in zip(shapes, values, strict=True)
        ]
    )


def largest_block(group: int) -> int | None:
    """Return the largest supported block size that divides `group` columns.

    None if there is none.
    """
    block = min(group & -group, LARGEST)
    return block if block >= SMALLEST else None
