"""Keys and values in the GPU's memory, never copied to the host.

The buffers are laid out as in `engines.kv`. Where a runtime may not write a buffer that it reads (a
TensorRT engine whose cache is written by ScatterND), runs write into a second set of buffers,
`present`, and `add_layer_inputs` copies the few new cells back: one call a slot and shape of planes. Copies
go to the stream of `Cuda`; a reader on another stream waits for it first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish.engines.cudart import Cuda, Memory
from pilotfish.engines.kv import KVCache, PlaneShape, lay_out
from pilotfish.engines.manifest import Manifest


@dataclass
class _Buffer:
    """The planes of one shape: where they are read, and where they are written."""

    planes: int
    shape: PlaneShape
    cell: int  # bytes of a head's numbers for one token
    past: Memory
    present: Memory


class DeviceCache(KVCache):
    """A K/V cache on the GPU.

    Args:
        capacities: allowed ones, ascending; the last is enough for every run.
        apart: whether runs write to `present` instead of the cache itself.
    """

    def __init__(
        self, cuda: Cuda, manifest: Manifest, slots: int, capacities: Sequence[int], *, apart: bool
    ) -> None:
        super().__init__(manifest, slots, capacities[0])
        self._apart = apart
        self._cuda = cuda
        self._capacities = capacities
        layout = lay_out(manifest)
        self._places = layout.places
        self._buffers = [
            self._allocate(planes, shape)
            for planes, shape in zip(layout.sizes, layout.shapes, strict=True)
        ]

    def _allocate(self, planes: int, shape: PlaneShape) -> _Buffer:
        cell = shape.head_dim * self.dtype.itemsize
        size = planes * len(self.lengths) * shape.kv_heads * self.capacity * cell
        past = self._cuda.allocate(size)
        present = self._cuda.allocate(size) if self._apart else past
        return _Buffer(planes, shape, cell, past, present)

    def addresses(self, plane: int, first: int) -> tuple[int, int]:
        """Return where a plane's slots from `first` on are read, and where they are written.

        [count, kv_heads, C, head_dim], contiguous.
        """
        buffer, place = self._places[plane]
        own = self._buffers[buffer]
        heads = (place * len(self.lengths) + first) * own.shape.kv_heads
        offset = heads * self.capacity * own.cell
        return own.past.address + offset, own.present.address + offset

    def shape(self, plane: int, count: int) -> tuple[int, int, int, int]:
        """Return the shape of `count` neighbouring slots of a plane."""
        heads, dim = self._buffers[self._places[plane][0]].shape
        return count, heads, self.capacity, dim

    def reserve(self, cells: int) -> bool:
        """Make room for `cells` in every slot; true if the buffers moved."""
        if cells <= self.capacity:
            return False
        before = self.capacity
        self.capacity = next(each for each in self._capacities if each >= cells)
        for i, old in enumerate(self._buffers):
            new = self._buffers[i] = self._allocate(old.planes, old.shape)
            rows = old.planes * len(self.lengths) * old.shape.kv_heads
            size, pitch = before * old.cell, self.capacity * old.cell
            self._cuda.copy_rows(new.past.address, pitch, old.past.address, size, size, rows)
            self._cuda.synchronize()  # before the old buffers go
        return True

    def take_in(self, slot: int, start: int, count: int) -> None:
        """Copy the cells of the last run from `present`, where that is a separate buffer."""
        if self._apart:
            for own in self._buffers:
                self._copy(slot, own, own.present, start, start, count)

    def _move(self, slot: int, target: int, cells: Sequence[int]) -> None:
        # Cell by cell: each lies behind its target, and no copy may overlap itself.
        for i, cell in enumerate(cells):
            for own in self._buffers:
                self._copy(slot, own, own.past, cell, target + i, 1)

    def _copy(
        self, slot: int, own: _Buffer, source: Memory, start: int, target: int, count: int
    ) -> None:
        """Copy `count` cells of all planes and heads of a slot into the cache."""
        heads = own.shape.kv_heads
        self._cuda.copy_block(
            own.past.address,
            target * own.cell,
            source.address,
            start * own.cell,
            y=slot * heads,
            pitch=self.capacity * own.cell,
            rows=len(self.lengths) * heads,  # of one plane
            extent=(count * own.cell, heads, own.planes),
        )


def doubling(first: int, last: int) -> list[int]:
    """List capacities from `first` to `last`, each twice the one before: few shapes."""
    steps = max(0, math.ceil(math.log2(last / first)))
    return [min(first << step, last) for step in range(steps + 1)]
