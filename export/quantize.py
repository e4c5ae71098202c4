"""Weights in 4 or 8 bits, in blocks along the input width.

In: w [N, K] float32. Out: unsigned codes, and per block of BLOCK columns a scale and a zero point,
so that w ≈ (code − zero_point) · scale. The same numbers serve MatMulNBits and DequantizeLinear.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export.errors import ExportError

BLOCK = 32


@dataclass(frozen=True)
class Quantized:
    """codes: u8 [N, K] in 0..2^bits − 1; scales: f32 [N, K/BLOCK]; zero_points: u8 [N, K/BLOCK]."""

    bits: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8]


def quantize(name: str, weight: NDArray[np.float32], bits: int) -> Quantized:
    """Round `weight` [N, K] to nearest, each block spanning its own range and zero.

    Raises:
        ExportError: if K is no multiple of BLOCK.
    """
    rows, width = weight.shape
    if width % BLOCK:
        raise ExportError(
            f"{name} has width {width}, and int{bits} takes multiples of {BLOCK}: use fp32 or fp16"
        )
    largest = 2**bits - 1
    blocks = weight.reshape(rows, width // BLOCK, BLOCK)
    low = np.minimum(blocks.min(axis=-1), 0.0)  # [N, K/BLOCK]; zero itself must be exact
    high = np.maximum(blocks.max(axis=-1), 0.0)
    scales = ((high - low) / largest).astype(np.float32)
    scales[scales == 0] = 1.0
    zero_points = np.rint(-low / scales)
    codes = np.rint(blocks / scales[..., None]) + zero_points[..., None]
    return Quantized(
        bits=bits,
        codes=np.clip(codes, 0, largest).astype(np.uint8).reshape(rows, width),
        scales=scales,
        zero_points=zero_points.astype(np.uint8),
    )


def quantize_rows(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """int8 with one scale per row, for embeddings: codes i8 [N, K], scales f32 [N, 1]."""
    scales = (np.abs(weight).max(axis=1, keepdims=True) / 127).astype(np.float32)
    scales[scales == 0] = 1.0
    return np.rint(weight / scales).astype(np.int8), scales
