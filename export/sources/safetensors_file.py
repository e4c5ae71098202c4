"""A safetensors file: its tensors as views of a memory map.

In: a path. Out: float32 arrays, without a copy where the file has float32.

The `safetensors` package copies each tensor twice on its way to numpy, so its header (a length and
a JSON object) is read here, every offset checked. Format: the README of the safetensors project.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.export.errors import ExportError
from pilotfish.export.sources.mapped_file import MappedFile

BYTES_AT_ONCE = 1 << 24
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class _Entry(msgspec.Struct, frozen=True):
    """One tensor in the header; offsets count from the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Place(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    size: int  # bytes


class SafetensorsFile:
    """An opened safetensors file.

    Raises:
        ExportError: if the file is damaged or ends before its tensors do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        try:
            self._places = self._read_header()
        except (ValueError, msgspec.DecodeError) as error:
            raise ExportError(
                f"{path} is a damaged or incomplete safetensors file: {error}"
            ) from None

    def names(self) -> list[str]:
        """Names of the tensors, as they stand in the file."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape; errors are those of `tensor`."""
        return self._place(name).shape

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32.

        Raises:
            ExportError: if there is no such tensor, or it is not of floating point.
        """
        place = self._place(name)
        stored = self._file.view(place.start, place.size).view(DTYPES[place.dtype])
        if place.dtype == "BF16":  # the upper half of a float32
            wide = stored.astype(np.uint32)
            wide <<= 16
            return wide.view(np.float32).reshape(place.shape)
        return stored.astype(np.float32, copy=False).reshape(place.shape)

    def holds_same(self, name: str, other: SafetensorsFile, other_name: str) -> bool:
        """Whether two tensors have the same type, shape and bytes."""
        mine, theirs = self._place(name), other._place(other_name)
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return False
        return all(
            np.array_equal(
                self._file.view(mine.start + at, size := min(BYTES_AT_ONCE, mine.size - at)),
                other._file.view(theirs.start + at, size),
            )
            for at in range(0, mine.size, BYTES_AT_ONCE)
        )

    def _place(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None:
            raise ExportError(f"{self.path} has no tensor {name}")
        if place.dtype not in DTYPES:
            raise ExportError(
                f"{self.path}: {name} is of type {place.dtype}, which is not supported; "
                f"{', '.join(DTYPES)} are"
            )
        return place

    def _read_header(self) -> dict[str, _Place]:
        data = self._file.data
        length = int.from_bytes(data[:8], "little")
        base = 8 + length
        if len(data) < base:
            raise ValueError("the header runs past the end")
        header = msgspec.json.decode(data[8:base], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
        return {
            name: _locate(name, entry, base, len(data) - base) for name, entry in entries.items()
        }


def _locate(name: str, entry: _Entry, base: int, available: int) -> _Place:
    """Size and place of a tensor; ValueError if its offsets do not fit it or the file."""
    start, end = entry.data_offsets
    if not 0 <= start <= end <= available:
        raise ValueError(f"the file ends before {name} does: it was not fully downloaded")
    if any(size < 0 for size in entry.shape):
        raise ValueError(f"{name} has shape {entry.shape}")
    dtype = DTYPES.get(entry.dtype)
    if dtype and end - start != math.prod(entry.shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"{name} has shape {entry.shape} in {end - start} bytes")
    return _Place(entry.dtype, tuple(entry.shape), base + start, end - start)
