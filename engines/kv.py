"""Keys and values of all slots: static buffers whose capacity grows.

One buffer per layer for keys and one for values, [slots, kv_heads, C, head_dim]; a pass over
neighbouring slots is given a piece of each, and writes into it in place. A slot's length says
where the truth ends: what lies behind it is never seen, so rolling back is a smaller number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engines.artifact import Manifest

STEP = 64  # capacities are multiples of this many cells
GROWTH = 1.0625  # attention costs C, so spare capacity is kept small


class KVCache:
    """Buffers and lengths. Zero-initialised: masked garbage must not be NaN.

    `limit` is the length that no slot exceeds; capacity goes beyond it only for padding.
    """

    def __init__(self, manifest: Manifest, slots: int, limit: int) -> None:
        sizes = manifest.dimensions
        self.dtype = np.dtype(manifest.kv_dtype)
        self._limit = limit
        self.capacity = min(STEP, limit)
        self.lengths = [0] * slots
        # [2 · layers, slots, kv_heads, C, head_dim]; key of layer i at 2i, value at 2i + 1
        self._cells: NDArray[np.floating] = np.zeros(
            (2 * sizes.layers, slots, sizes.kv_heads, self.capacity, sizes.head_dim), self.dtype
        )

    def reserve(self, cells: int) -> bool:
        """Make room for `cells` in every slot; true if the buffers moved."""
        if cells <= self.capacity:
            return False
        wanted = max(cells, int(self.capacity * GROWTH))
        wanted = -(-wanted // STEP) * STEP
        self.capacity = min(wanted, max(cells, self._limit))
        planes, slots, heads, _, dim = self._cells.shape
        old = self._cells
        self._cells = np.zeros((planes, slots, heads, self.capacity, dim), self.dtype)
        for slot, length in enumerate(self.lengths):
            self._cells[:, slot, :, :length] = old[:, slot, :, :length]
        return True

    def piece(self, plane: int, first: int, count: int) -> NDArray[np.floating]:
        """`count` neighbouring slots of a plane: [count, kv_heads, C, head_dim], contiguous."""
        return self._cells[plane, first : first + count]

    def gather(self, slot: int, start: int, offsets: Sequence[int]) -> None:
        """Move the entries at start + offsets to start, start + 1, …, and end the slot there.

        Offsets ascend, so those that stand where they belong come first; they stay.
        """
        stay = next((i for i, offset in enumerate(offsets) if offset != i), len(offsets))
        moved = [start + offset for offset in offsets[stay:]]
        if moved:
            # An index list among slices comes first: [n, planes, kv_heads, head_dim].
            chosen = np.moveaxis(self._cells[:, slot, :, moved], 0, 2)
            self._cells[:, slot, :, start + stay : start + len(offsets)] = chosen
        self.lengths[slot] = start + len(offsets)
