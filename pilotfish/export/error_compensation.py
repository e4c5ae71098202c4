"""Round a weight to 4 bits so that its products with typical inputs change least.

In: w [N, K] float32 and H = Σ x xᵀ [K, K], the second moments of the inputs x on some text. Out:
codes, scales and zero points in blocks, ŵ = (code − zero) · scale, which nearly minimise

    Σ ‖(w − ŵ) x‖² = tr (w − ŵ) H (w − ŵ)ᵀ.

This is GPTQ (Frantar et al. 2022): columns are rounded one after the other, and each error is
compensated by the columns that follow. With H = M Mᵀ, M upper triangular, and δ = w − ŵ, a row's
error is Σⱼ (Σᵢ≤ⱼ δᵢ Mᵢⱼ)². So column j is rounded from

    w̃ⱼ = wⱼ + Σᵢ<ⱼ δᵢ Mᵢⱼ / Mⱼⱼ,

and what remains of its term is ((w̃ⱼ − ŵⱼ) Mⱼⱼ)². The paper computes the same numbers from H⁻¹;
here one Cholesky factor is enough. Scale and zero point of a block are searched when its first
column is reached, with the weights Mⱼⱼ². Scales are positive.

Without H, nothing is compensated: each block gets the best scale and zero point that are tried.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.blocks import BLOCK, Quantized

BITS = 4
TOP = np.float32(2**BITS - 1)  # largest code
# A short text does not determine H, and weights that fit one text fit no other. So the moments of
# different columns are shrunk by this share.
SHRINKAGE = 0.3
DAMPING = 0.01  # share of the mean of H's diagonal that is added to it
TOGETHER = 4 * BLOCK  # columns whose compensation is computed as one product
SHRINK = (0.75, 0.8, 0.84, 0.88, 0.92, 0.96, 1.0)  # tried ranges, relative to the block's own

Floats = NDArray[np.float32]


def round_compensated(
    weight: Floats, moments: Floats | None = None, block: int = BLOCK
) -> Quantized:
    """Round `weight` [N, K] to 4 bits with positive scales and zero points.

    Args:
        moments: H [K, K], symmetric; None to round each column to nearest.
        block: columns per block; it divides K.
    """
    width = weight.shape[1]
    values = np.array(weight.T, np.float32, order="C")  # [K, N]: a column is contiguous
    if moments is None:
        factors, importance = None, np.ones(width, np.float32)
    else:
        factors, importance = _factors(moments)
    codes = np.empty(values.shape, np.uint8)
    scales, zeros = np.empty((2, width // block, len(weight)), np.float32)
    errors = np.empty_like(values)  # δ
    for first in range(0, width, TOGETHER):
        end = min(first + TOGETHER, width)
        if factors is not None and first:
            values[first:end] += factors[:first, first:end].T @ errors[:first]
        for start in range(first, end, block):
            stop = start + block
            part, original = values[start:stop], np.array(weight.T[start:stop])
            if factors is not None and start > first:
                part += factors[first:start, start:stop].T @ errors[first:start]
            scale, zero = _search(part, importance[start:stop])
            scales[start // block], zeros[start // block] = scale, zero
            for i in range(block):
                code = np.clip(np.rint(part[i] / scale + zero), 0, TOP)
                codes[start + i] = code
                error = original[i] - (code - zero) * scale
                errors[start + i] = error
                if factors is not None:
                    row = factors[start + i, start + i + 1 : stop]
                    part[i + 1 :] += row[:, None] * error
    return Quantized(
        BITS,
        np.ascontiguousarray(codes.T),
        np.ascontiguousarray(scales.T),
        zeros=np.ascontiguousarray(zeros.T.astype(np.uint8)),
        block=block,
    )


def _factors(moments: Floats) -> tuple[Floats, Floats]:
    """Return Mᵢⱼ / Mⱼⱼ [K, K], and Mⱼⱼ² [K] relative to its mean."""
    damped = moments * np.float64(1 - SHRINKAGE)
    diagonal = np.einsum("ii->i", damped)  # a view
    diagonal[:] = moments.diagonal()
    mean = float(diagonal.mean()) or 1.0
    diagonal[diagonal == 0] = mean  # columns without input in the text
    diagonal += DAMPING * mean
    # Reversed rows and columns turn the lower factor into an upper one.
    upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    pivots = np.diagonal(upper).copy()
    return (upper / pivots).astype(np.float32), (pivots**2 / (pivots**2).mean()).astype(np.float32)


def _search(part: Floats, importance: Floats) -> tuple[Floats, Floats]:
    """Return scale and zero point f32 [N] of a block [K, N] of columns.

    For several ranges, both are tried: the block's smallest and largest weight get codes 0 and 15,
    or the farthest from 0 gets 8 steps. The best scale is then fitted by least squares.
    """
    low, high = np.minimum(part.min(axis=0), 0), np.maximum(part.max(axis=0), 0)
    least = np.full(low.shape, np.inf, np.float32)
    scales, zeros = np.ones_like(low), np.zeros_like(low)

    def steps(scale: Floats, zero: Floats) -> Floats:
        rounded: Floats = np.clip(np.rint(part / scale), -zero, TOP - zero)
        return rounded

    def attempt(scale: Floats, zero: Floats) -> None:
        difference = steps(scale, zero) * scale - part
        error = importance @ (difference * difference)
        better = error < least
        least[better] = error[better]
        scales[better], zeros[better] = scale[better], zero[better]

    farthest = np.maximum(high, -low)
    middle = np.where(high > -low, np.float32(7), np.float32(8))
    for shrink in map(np.float32, SHRINK):
        attempt(_positive(farthest * shrink / np.float32(8)), middle)
        scale = _positive((high - low) * shrink / TOP)
        attempt(scale, np.clip(np.rint(-low * shrink / scale), 0, TOP))
    best = steps(scales, zeros)
    squares = importance @ (best * best)
    fitted = np.divide(importance @ (best * part), squares, out=scales.copy(), where=squares > 0)
    attempt(_positive(fitted), zeros.copy())
    return scales, zeros


def _positive(scales: Floats) -> Floats:
    """Replace scales that are no positive numbers, of blocks of zeros, by 1."""
    return np.where(scales > np.finfo(np.float32).tiny, scales, np.float32(1))
