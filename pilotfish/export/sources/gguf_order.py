"""The order of rows and columns in GGUF's tensors, where llama.cpp's converter changes it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.architectures import Gguf
from pilotfish.export.model_config import ModelConfig

# Weights of linear attention with one row for each head of values.
BY_HEAD = ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")


def stored_order(
    variant: Gguf, config: ModelConfig, name: str, count: int, axis: int
) -> NDArray[np.int64] | None:
    """Return the stored index of each of a weight's `count` rows (axis 0) or columns (axis 1).

    None if the order is the same. In a class with `interleaved`, the two halves of each head of q
    and k alternate. In a class with `tiled`, the heads of values in linear attention are ordered by
    their number within the group of a key head first.
    """
    order: NDArray[np.int64] = np.arange(count)
    heads = {".q_proj.": config.heads, ".k_proj.": config.kv_heads}
    for part in heads if variant.interleaved and axis == 0 else ():
        if part in name:  # rows 2i and 2i + 1 of a head are a rotated pair
            order[:] = order.reshape(heads[part], -1, 2).swapaxes(1, 2).ravel()
            return order
    dims = config.recurrence
    if dims is None or not variant.tiled or dims.heads == dims.key_heads:
        return None
    _, linear, part = name.partition(".linear_attn.")
    if not linear or part == "norm.weight" or (part == "out_proj.weight") != (axis == 1):
        return None
    width = 1 if part in BY_HEAD else dims.value_dim
    first = count - dims.heads * width  # the rows of q and k
    order[first:] = order[first:].reshape(-1, dims.key_heads, width).swapaxes(0, 1).ravel()
    return order


def full_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a weight's shape with the dimensions of size 1 that GGUF omits."""
    if name.endswith((".conv1d.weight", ".conv.conv.weight")) and len(shape) == 2:
        return shape[0], 1, shape[1]
    return (1, *shape) if name.endswith("_gate.weight") and len(shape) == 1 else shape
