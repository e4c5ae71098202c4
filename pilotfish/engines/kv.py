"""The K/V cache of all slots: static buffers whose capacity grows.

Of the layers that have any, the key of the i-th is plane 2i, its value plane 2i + 1; a pass over
neighbouring slots gets a piece of each plane. Planes of one shape lie in one buffer, [planes,
slots, kv_heads, C, head_dim]; nearly every model has one. Only cells below a slot's length are ever
read, so a rollback only lowers the length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import Manifest

STEP = 64  # capacities are multiples of this many cells
GROWTH = 1.0625  # attention costs C, so spare capacity is kept small


class PlaneShape(NamedTuple):
    """What a plane keeps of each token: so many heads of such a width."""

    kv_heads: int
    head_dim: int


class PlaneLayout(NamedTuple):
    """Which planes share a buffer.

    Attributes:
        shapes: of each buffer's planes.
        sizes: planes of each buffer.
        places: buffer of each plane, and its place there.
    """

    shapes: list[PlaneShape]
    sizes: list[int]
    places: list[tuple[int, int]]


def lay_out(manifest: Manifest) -> PlaneLayout:
    """Sort a model's planes by shape."""
    found = PlaneLayout([], [], [])
    for each in manifest.cached:
        shape = PlaneShape(each.kv_heads, each.head_dim)
        if shape not in found.shapes:
            found.shapes.append(shape)
            found.sizes.append(0)
        buffer = found.shapes.index(shape)
        for _ in ("key", "value"):
            found.places.append((buffer, found.sizes[buffer]))
            found.sizes[buffer] += 1
    return found


class KVCache(ABC):
    """Lengths and capacity; subclasses own the buffers.

    Buffers begin as zeros, since masked garbage must not be NaN.

    Attributes:
        lengths: tokens of each slot.
        capacity: cells of each slot, C.
        dtype: of keys and values.
    """

    def __init__(self, manifest: Manifest, slots: int, capacity: int) -> None:
        self.dtype = np.dtype(manifest.kv_dtype)
        self.capacity = capacity
        self.lengths = [0] * slots

    @abstractmethod
    def reserve(self, cells: int) -> bool:
        """Make room for `cells` in every slot; true if the buffers moved."""

    def gather(self, slot: int, start: int, offsets: Sequence[int]) -> None:
        """Move the entries at start + offsets to start, start + 1, …, and end the slot there.

        Offsets ascend, so entries that need not move come first.
        """
        stay = next((i for i, offset in enumerate(offsets) if offset != i), len(offsets))
        if stay < len(offsets):
            self._move(slot, start + stay, [start + offset for offset in offsets[stay:]])
        self.lengths[slot] = start + len(offsets)

    @abstractmethod
    def _move(self, slot: int, target: int, cells: Sequence[int]) -> None:
        """Copy `cells`, which ascend, to target, target + 1, …; each lies behind its target."""

    @abstractmethod
    def take_in(self, slot: int, start: int, count: int) -> None:
        """Take in the `count` cells from `start` on that a run has just appended."""


class HostCache(KVCache):
    """A cache in the host's memory, written in place; `limit` bounds every slot's length."""

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
        """Make room for `cells` in every slot; true if the buffers moved."""
        if cells <= self.capacity:
            return False
        wanted = max(cells, int(self.capacity * GROWTH))
        wanted = -(-wanted // STEP) * STEP
        self.capacity = min(wanted, max(cells, self._limit))  # more than the limit only for padding
        for i, old in enumerate(self._buffers):
            planes, slots, heads, _, dim = old.shape
            new = np.zeros((planes, slots, heads, self.capacity, dim), self.dtype)
            for slot, length in enumerate(self.lengths):
                new[:, slot, :, :length] = old[:, slot, :, :length]
            self._buffers[i] = new
        return True

    def piece(self, plane: int, first: int, count: int) -> NDArray[np.floating]:
        """Return `count` neighbouring slots of a plane: [count, kv_heads, C, head_dim]."""
        buffer, place = self._places[plane]
        return self._buffers[buffer][place, first : first + count]

    def take_in(self, slot: int, start: int, count: int) -> None:
        """Do nothing: runs write in place."""

    def _move(self, slot: int, target: int, cells: Sequence[int]) -> None:
        for buffer in self._buffers:
            # An index list among slices comes first: [n, planes, kv_heads, head_dim].
            chosen = np.moveaxis(buffer[:, slot, :, list(cells)], 0, 2)
            buffer[:, slot, :, target : target + len(cells)] = chosen
