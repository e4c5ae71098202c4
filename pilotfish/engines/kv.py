"""The K/V cache of all slots: buffers of one capacity, which grows on demand.

A *plane* is a cache tensor: the keys, or the values, of one layer for all slots. The i-th layer
with keys and values has its keys in plane 2i and its values in plane 2i + 1. A run over
neighbouring slots gets a part of each plane. Planes of equal shape share a buffer, [planes, slots,
kv_heads, C, head_dim]; nearly every model has only one buffer. Only cells below a slot's length are
read, so a rollback just lowers the length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import Manifest

STEP = 64  # capacities are multiples of this number of cells
# minimum factor by which the capacity C grows; small, because attention takes time proportional to
# C
GROWTH = 1.0625


class PlaneShape(NamedTuple):
    """The shape of a plane's content per token: heads, and numbers per head."""

    kv_heads: int
    head_dim: int


class PlaneLayout(NamedTuple):
    """The assignment of planes to buffers, by shape.

    Attributes:
        shapes: plane shape of each buffer.
        sizes: number of planes in each buffer.
        places: index of the buffer, and position in it, for each plane.
    """

    shapes: list[PlaneShape]
    sizes: list[int]
    places: list[tuple[int, int]]


def lay_out(manifest: Manifest) -> PlaneLayout:
    """Assign a model's planes to buffers by their shapes."""
    layout = PlaneLayout([], [], [])
    for each in manifest.cached:
        shape = PlaneShape(each.kv_heads, each.head_dim)
        if shape not in layout.shapes:
            layout.shapes.append(shape)
            layout.sizes.append(0)
        buffer = layout.shapes.index(shape)
        for _ in ("key", "value"):
            layout.places.append((buffer, layout.sizes[buffer]))
            layout.sizes[buffer] += 1
    return layout


class KVCache(ABC):
    """The base of caches: lengths and capacity; subclasses have the buffers.

    Buffers start as zeros: even masked cells must not be NaN.

    Attributes:
        lengths: tokens in each slot.
        capacity: number of cells per slot, C.
        dtype: dtype of keys and values.
    """

    def __init__(self, manifest: Manifest, slots: int, capacity: int) -> None:
        self.dtype = np.dtype(manifest.kv_dtype)
        self.capacity = capacity
        self.lengths = [0] * slots

    @abstractmethod
    def reserve(self, cells: int) -> bool:
        """Make room for `cells` in every slot; return whether the buffers moved."""

    def gather(self, slot: int, start: int, offsets: Sequence[int]) -> None:
        """Move the cells at start + offsets to start, start + 1, …, and end the slot after them.

        Offsets ascend, so the cells that need not move come first.
        """
        stay = next((i for i, offset in enumerate(offsets) if offset != i), len(offsets))
        if stay < len(offsets):
            self._move(slot, start + stay, [start + offset for offset in offsets[stay:]])
        self.lengths[slot] = start + len(offsets)

    @abstractmethod
    def _move(self, slot: int, target: int, cells: Sequence[int]) -> None:
        """Copy cells to target, target + 1, …; `cells` ascend, and each lies above its target."""

    @abstractmethod
    def take_in(self, slot: int, start: int, count: int) -> None:
        """Add to the cache the `count` cells from `start` on, which a run has just computed."""


class HostCache(KVCache):
    """A cache in host memory, written in place by runs; `limit` is the longest slot (tokens)."""

    def __init__(self, manifest: Manifest, slots: int, limit: int) -> None:
        super().__init__(manifest, slots, min(STEP, limit))
        self._limit = limit
        layout = lay_out(manifest)
        self._places = layout.places
        self._buffers: list[NDArray[np.floating]] = [
            np.zeros((planes, slots, shape.kv_heads, self.capacity, shape.head_dim), self.dtype)
            for planes, shape in zip(layout.sizes, layout.shapes, strict=True)
        ]

    def reserve(self, cells: int) -> bool:
        """Make room for `cells` in every slot; return whether the buffers moved."""
        if cells <= self.capacity:
            return False
        wanted = max(cells, int(self.capacity * GROWTH))
        wanted = -(-wanted // STEP) * STEP
        # capacity exceeds the limit only to hold a run's padding
        self.capacity = min(wanted, max(cells, self._limit))
        for i, old in enumerate(self._buffers):
            planes, slots, heads, _, dim = old.shape
            new = np.zeros((planes, slots, heads, self.capacity, dim), self.dtype)
            for slot, length in enumerate(self.lengths):
                new[:, slot, :, :length] = old[:, slot, :, :length]
            self._buffers[i] = new
        return True

    def piece(self, plane: int, first: int, count: int) -> NDArray[np.floating]:
        """Return a plane's part for `count` neighbouring slots: [count, kv_heads, C, head_dim]."""
        buffer, place = self._places[plane]
        return self._buffers[buffer][place, first : first + count]

    def take_in(self, slot: int, start: int, count: int) -> None:
        """Do nothing: runs write in place."""

    def _move(self, slot: int, target: int, cells: Sequence[int]) -> None:
        for buffer in self._buffers:
            # numpy puts the axis of an index list first: [n, planes, kv_heads, head_dim]
            cells_moved = np.moveaxis(buffer[:, slot, :, list(cells)], 0, 2)
            buffer[:, slot, :, target : target + len(cells)] = cells_moved
