"""A safetensors file: its tensors as views of a memory map.

In: a path. Out: float32 arrays; if the file has float32, they are views of the file.

The `safetensors` package checks the file. This module then reads tensors by the header's offsets:
the package would copy each tensor twice, and keep the file's pages in memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from pilotfish.base.reading import reading_file
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.fields import format_value
from pilotfish.export.sources.mapped_file import TensorFile, TensorInfo

BYTES_AT_ONCE = 1 << 24  # size (bytes) of the parts in which tensors are compared
MOST_NUMBERS = 1 << 48  # in a tensor; one of size 0 may state any shape
INTEGERS: dict[str, type[np.generic]] = {
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
    "F8_E4M3": np.uint8,  # numpy has no such type, so the bits are read
}
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class _Tensor(msgspec.Struct, frozen=True):
    """One tensor in the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]  # start and end, bytes from the end of the header


class SafetensorsFile(TensorFile):
    """An opened safetensors file.

    Raises:
        ExportError: if the file is damaged or incomplete.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with reading_file(self._damage_error):
            try:
                with safe_open(path, "numpy"):  # opening checks lengths, offsets and shapes
                    self.tensors = self._read_header()
            except SafetensorError as error:
                raise self._damage_error(format_value(str(error), quoted=False)) from None

    def _damage_error(self, problem: str) -> ExportError:
        return ExportError(f"{self.path} is a damaged or incomplete safetensors file: {problem}")

    def floats(self, name: str, info: TensorInfo) -> NDArray[np.float32]:
        """Read a tensor, or a part of it, as float32."""
        self._expect_floats(name, info)
        stored = self.view(info.start, info.size).view(DTYPES[info.kind])
        if info.kind == "BF16":  # BF16 is the upper half of a float32
            wide = stored.astype(np.uint32)
            wide <<= 16
            stored = wide.view(np.float32)
        return stored.astype(np.float32, copy=False).reshape(info.shape)

    def names(self) -> list[str]:
        """Return the tensors' names, in the file's order."""
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; raise the errors of `tensor`."""
        self._expect_floats(name, self.find(name))
        return self.find(name).shape

    def integers(self, name: str, types: Collection[str], index: int | None = None) -> NDArray[Any]:
        """Return a tensor of integers, or the bits of 8-bit floats, in the file's type.

        `index` selects an entry of the first axis.

        Raises:
            ExportError: if its type is not one of `types`.
        """
        info = self.find(name, index)
        if info.kind not in types:
            raise ExportError(
                f"{self.path}: {name} is of type {info.kind}, but only {' or '.join(types)} is "
                "supported"
            )
        return self.view(info.start, info.size).view(INTEGERS[info.kind]).reshape(info.shape)

    def holds_same(self, name: str, other: SafetensorsFile, other_name: str) -> bool:
        """Whether two tensors of floats have the same type, shape and bytes."""
        mine, theirs = self.find(name), other.find(other_name)
        self._expect_floats(name, mine)
        if (mine.kind, mine.shape) != (theirs.kind, theirs.shape):
            return False
        for at in range(0, mine.size, BYTES_AT_ONCE):
            size = min(BYTES_AT_ONCE, mine.size - at)
            part = other.view(theirs.start + at, size)
            if not np.array_equal(self.view(mine.start + at, size), part):
                return False
        return True

    def _expect_floats(self, name: str, info: TensorInfo) -> None:
        if info.kind not in DTYPES:
            raise ExportError(
                f"{self.path}: {name} is of type {info.kind}, which is not supported; "
                f"supported are {', '.join(DTYPES)}: if these are quantised weights, give the "
                "original ones"
            )

    def _read_header(self) -> dict[str, TensorInfo]:
        """Read the header, a length and a JSON object."""
        end = 8 + int.from_bytes(self.data[:8], "little")
        header = msgspec.json.decode(self.data[8:end], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = {}
        for name, raw in header.items():
            tensor = msgspec.json.decode(raw, type=_Tensor)
            if math.prod(max(size, 1) for size in tensor.shape) > MOST_NUMBERS:
                raise self._damage_error(f"{format_value(name)} has an impossible shape")
            first, last = tensor.data_offsets
            tensors[name] = TensorInfo(tensor.shape, tensor.dtype, end + first, last - first)
        return tensors
