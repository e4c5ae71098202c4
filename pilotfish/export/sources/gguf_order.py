"""The order of rows and columns in GGUF's tensors, where llama.cpp's converter changes it.

In: a model's configuration, and its class's `Gguf`. Out: for one of our weights, the stored row of
each row, and the stored column of each column.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.architectures import Gguf
from pilotfish.export.model_config import ModelConfig

Order = NDArray[np.int64]
# Weights of linear attention with a row, or a row per channel, for each head of values.
BY_CHANNEL = ("in_proj_qkv.weight", "conv1d.weight", "in_proj_z.weight")
BY_HEAD = ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")


class GgufOrder:
    """The order of rows and columns in one file.

    Attributes of `Gguf` decide: in a class with `interleaved`, the two halves of each head of q and
    k alternate. In a class with `tiled`, the heads of values in linear attention follow each other
    by their number within the group of a key head, instead of group by group.
    """

    def __init__(self, variant: Gguf, config: ModelConfig) -> None:
        self._variant, self._config = variant, config

    def rows(self, name: str, count: int) -> Order | None:
        """Return the stored row of each of our `count` rows; None if the order is the same."""
        if self._variant.interleaved:
            heads = {".q_proj.": self._config.heads, ".k_proj.": self._config.kv_heads}
            each = next((number for part, number in heads.items() if part in name), None)
            if each is not None:  # rows 2i and 2i + 1 of a head are a rotated pair
                return np.arange(count).reshape(each, -1, 2).swapaxes(1, 2).ravel()
        if ".linear_attn." not in name or not name.endswith(BY_CHANNEL + BY_HEAD):
            return None
        return self._by_group(count, by_head=name.endswith(BY_HEAD))

    def columns(self, name: str, count: int) -> Order | None:
        """Return the stored column of each of our columns; None if the order is the same."""
        wanted = name.endswith(".linear_attn.out_proj.weight")
        return self._by_group(count, by_head=False) if wanted else None

    def _by_group(self, count: int, *, by_head: bool) -> Order | None:
        """Return the order of value heads by key head; q and k, which come first, stay there."""
        dims = self._config.recurrence
        if dims is None or not self._variant.tiled or dims.heads == dims.key_heads:
            return None
        width = 1 if by_head else dims.value_dim
        first = count - dims.heads * width
        order = np.arange(count)
        tiles = order[first:].reshape(-1, dims.key_heads, width)
        order[first:] = tiles.swapaxes(0, 1).ravel()
        return order


def full_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a weight's shape with the dimensions of size 1 that GGUF omits."""
    if name.endswith((".conv1d.weight", ".conv.conv.weight")) and len(shape) == 2:
        return shape[0], 1, shape[1]
    if name.endswith(".shared_expert_gate.weight") and len(shape) == 1:
        return 1, *shape
    return shape
