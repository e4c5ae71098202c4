"""Keys and values in the GPU's memory, never copied to the host.

The buffers are laid out as in `engines.kv`. Where a runtime may not write a buffer that it reads (a
TensorRT engine whose cache is written by ScatterND), runs write into a second set of buffers,
`present`, and `take_in` copies the few new cells back: one call a slot, however many layers. Copies
go to the stream of `Cuda`; a reader on another stream waits for it first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pilotfish.engines.artifact import Manifest
from pilotfish.engines.cudart import (
    DEVICE_TO_DEVICE,
    Copy3D,
    Cuda,
    Extent,
    Memory,
    Pitched,
    Position,
)
from pilotfish.engines.kv import KVCache


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
        sizes = manifest.dimensions
        self._apart = apart
        self._cuda = cuda
        self._capacities = capacities
        self._planes, self._heads = 2 * manifest.layers, sizes.kv_heads
        self._cell = sizes.head_dim * self.dtype.itemsize  # bytes
        self._allocate()

    @property
    def _pitch(self) -> int:
        """Bytes of one head of one slot."""
        return self.capacity * self._cell

    def _allocate(self) -> None:
        size = self._planes * len(self.lengths) * self._heads * self._pitch
        self._past: Memory = self._cuda.allocate(size)
        self._present = self._cuda.allocate(size) if self._apart else self._past

    def addresses(self, plane: int, first: int) -> tuple[int, int]:
        """Return where a plane's slots from `first` on are read, and where they are written.

        [count, kv_heads, C, head_dim], contiguous.
        """
        offset = (plane * len(self.lengths) + first) * self._heads * self._pitch
        return self._past.address + offset, self._present.address + offset

    def shape(self, count: int) -> tuple[int, int, int, int]:
        """Return the shape of `count` neighbouring slots of a plane."""
        head_dim = self._cell // self.dtype.itemsize
        return count, self._heads, self.capacity, head_dim

    def reserve(self, cells: int) -> bool:
        """Make room for `cells` in every slot; true if the buffers moved."""
        if cells <= self.capacity:
            return False
        old, pitch = self._past, self._pitch
        self.capacity = next(each for each in self._capacities if each >= cells)
        self._allocate()
        rows = self._planes * len(self.lengths) * self._heads
        self._cuda.copy_rows(self._past.address, self._pitch, old.address, pitch, pitch, rows)
        self._cuda.synchronize()  # before the old buffers go
        return True

    def take_in(self, slot: int, start: int, count: int) -> None:
        """Copy the cells of the last run from `present`, where that is a separate buffer."""
        if self._apart:
            self._copy(slot, self._present, start, start, count)

    def _move(self, slot: int, target: int, cells: Sequence[int]) -> None:
        # Cell by cell: each lies behind its target, and no copy may overlap itself.
        for i, cell in enumerate(cells):
            self._copy(slot, self._past, cell, target + i, 1)

    def _copy(self, slot: int, source: Memory, start: int, target: int, count: int) -> None:
        """Copy `count` cells of all planes and heads of a slot into the cache."""
        rows = len(self.lengths) * self._heads  # of one plane
        place = slot * self._heads
        whole = (self._pitch, self._pitch, rows)
        self._cuda.copy_block(
            Copy3D(
                srcPos=Position(start * self._cell, place, 0),
                srcPtr=Pitched(source.address, *whole),
                dstPos=Position(target * self._cell, place, 0),
                dstPtr=Pitched(self._past.address, *whole),
                extent=Extent(count * self._cell, self._heads, self._planes),
                kind=DEVICE_TO_DEVICE,
            )
        )


def doubling(first: int, last: int) -> list[int]:
    """List capacities from `first` to `last`, each twice the one before: few shapes."""
    steps = max(0, math.ceil(math.log2(last / first)))
    return [min(first << step, last) for step in range(steps + 1)]
