"""Memory-map a file of weights, so that only one weight at a time occupies memory.

When a view is taken, the kernel may drop the pages of the previous view. If the previous view is
still used, its pages are read from the file again.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.reading import reading_file
from pilotfish.export.export_errors import ExportError

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
