"""Keys and values in the GPU's memory, never copied to the host.

The buffers have the layout of `engines.kv`. Some runtimes must not write the buffer that they read
(e.g. a TensorRT engine that writes its cache by ScatterND). Their runs write into a second set of
buffers, `present`, and `take_in` copies the few new cells back, with one call per slot and shape of
cache tensors. Copies run on the stream of `Cuda`; a reader on another stream must wait for that
stream.
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
    """The cache tensors of one shape: the memory that runs read (`past`) and write (`present`)."""

    planes: int
    shape: PlaneShape
    cell: int  # size (bytes) of one head's numbers for one token
    past: Memory
    present: Memory


class DeviceCache(KVCache):
    """A K/V cache on the GPU.

    Args:
        capacities: allowed capacities (cells per slot), ascending; the last one suffices for every
            run.
        apart: whether runs write to `present`, not to the buffer that they read.
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
        """Return the addresses to read and to write, for a cache tensor from slot `first` on.

        The memory there is contiguous, [slots, kv_heads, C, head_dim].
        """
        index, place = self._places[plane]
        buffer = self._buffers[index]
        heads = (place * len(self.lengths) + first) * buffer.shape.kv_heads
        offset = heads * self.capacity * buffer.cell
        return buffer.past.address + offset, buffer.present.address + offset

    def shape(self, plane: int, count: int) -> tuple[int, int, int, int]:
        """Return the shape of a cache tensor's part for `count` neighbouring slots."""
        heads, dim = self._buffers[self._places[plane][0]].shape
        return count, heads, self.capacity, dim

    def reserve(self, cells: int) -> bool:
        """Make room for `cells` in every slot; return whether the buffers moved."""
        if cells <= self.capacity:
            return False
        before = self.capacity
        self.capacity = next(each for each in self._capacities if each >= cells)
        for i, old in enumerate(self._buffers):
            new = self._buffers[i] = self._allocate(old.planes, old.shape)
            rows = old.planes * len(self.lengths) * old.shape.kv_heads
            size, pitch = before * old.cell, self.capacity * old.cell
            self._cuda.copy_rows(new.past.address, pitch, old.past.address, size, size, rows)
            self._cuda.synchronize()  # before the old buffers are freed
        return True

    def take_in(self, slot: int, start: int, count: int) -> None:
        """Copy the last run's cells from `present` to the cache, if these are separate buffers."""
        if self._apart:
            for buffer in self._buffers:
                self._copy(slot, buffer, buffer.present, start, start, count)

    def _move(self, slot: int, target: int, cells: Sequence[int]) -> None:
        # Copy one cell at a time: source and target of a longer copy could overlap.
        for i, cell in enumerate(cells):
            for buffer in self._buffers:
                self._copy(slot, buffer, buffer.past, cell, target + i, 1)

    def _copy(
        self, slot: int, buffer: _Buffer, source: Memory, start: int, target: int, count: int
    ) -> None:
        """Copy `count` cells of a slot from `source` to the cache, for all tensors and heads."""
        heads = buffer.shape.kv_heads
        self._cuda.copy_block(
            buffer.past.address,
            target * buffer.cell,
            source.address,
            start * buffer.cell,
            y=slot * heads,
            pitch=self.capacity * buffer.cell,
            rows=len(self.lengths) * heads,  # rows per cache tensor
            extent=(count * buffer.cell, heads, buffer.planes),
        )


def doubling_capacities(first: int, last: int) -> list[int]:
    """List capacities from `first` to `last`, doubling each time, so that few shapes occur."""
    steps = max(0, math.ceil(math.log2(last / first)))
    return [min(first << step, last) for step in range(steps + 1)]
