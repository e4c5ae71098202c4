"""Memory-map a file of weights, so that only one weight at a time occupies memory.

`TensorFile` is the base of the two forms of such files, GGUF and safetensors.

When a view is taken, the kernel may drop the pages of the previous view. If the previous view is
still used, its pages are read from the file again.
"""

from __future__ import annotations

import math
import mmap
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.reading import reading_file
from pilotfish.export.export_errors import ExportError

VALUES_AT_ONCE = 1 << 20  # maximum values of a part that `rows` yields, unless a row has more
# The beginning of a file that stands for another one in a repository of Git LFS.
LFS_POINTER = b"version https://git-lfs.github.com/"


def refuse_pointer(path: Path, beginning: bytes) -> None:
    """Raise `ExportError` if a file only stands for another one."""
    if beginning.startswith(LFS_POINTER):
        raise ExportError(
            f"{path} is a pointer of Git LFS, not the file itself: fetch the file by `git lfs pull`"
        )


class MappedFile:
    """A file, mapped for reading.

    Raises:
        ExportError: if it cannot be read, or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with (
            reading_file(lambda problem: ExportError(f"{path} cannot be read: {problem}")),
            path.open("rb") as file,
        ):
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        refuse_pointer(path, self.data[:100])
        self._last = (0, 0)  # start and length of the last view's pages, bytes

    def view(self, start: int, size: int) -> NDArray[np.uint8]:
        """Return `size` bytes from `start`, within the file; shape [size], read-only."""
        if self._last[1]:
            self.data.madvise(mmap.MADV_DONTNEED, *self._last)
        first = start - start % mmap.PAGESIZE
        self._last = (first, start + size - first)
        return np.frombuffer(self.data, np.uint8, count=size, offset=start)


class TensorInfo(NamedTuple):
    """The place and layout of a tensor. `shape` is in numpy's order: slowest dimension first."""

    shape: tuple[int, ...]
    kind: str  # name of the type
    start: int  # offset from the start of the file, bytes
    size: int  # bytes


class TensorFile(MappedFile):
    """A file with tensors.

    Attributes:
        tensors: name → place and layout of each tensor.
    """

    tensors: Mapping[str, TensorInfo]

    @abstractmethod
    def floats(self, name: str, info: TensorInfo) -> NDArray[np.float32]:
        """Read a tensor, or a part of it, as float32."""

    def find(self, name: str, index: int | None = None) -> TensorInfo:
        """Return the place of a tensor, or of entry `index` of its first axis.

        Raises:
            ExportError: if the tensor does not exist.
        """
        if name not in self.tensors:
            raise ExportError(f"{self.path} has no tensor {name}")
        info = self.tensors[name]
        if index is None:
            return info
        size = info.size // info.shape[0]
        return info._replace(shape=info.shape[1:], start=info.start + index * size, size=size)

    def tensor(self, name: str, index: int | None = None) -> NDArray[np.float32]:
        """Return a tensor as float32; this is a view of the file if the file has float32.

        `index` selects an entry of the first axis.

        Raises:
            ExportError: if the tensor does not exist, or its type cannot be converted.
        """
        return self.floats(name, self.find(name, index))

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Yield a tensor in parts of consecutive rows, of a few megabytes each.

        Raises:
            ExportError: see `tensor`.
        """
        info = self.find(name)
        total, inner = info.shape[0], info.shape[1:]
        size, step = info.size // max(total, 1), max(1, VALUES_AT_ONCE // max(math.prod(inner), 1))
        for start in range(0, total, step):
            count = min(step, total - start)
            place = info.start + start * size
            yield self.floats(name, TensorInfo((count, *inner), info.kind, place, count * size))
