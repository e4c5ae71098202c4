"""A safetensors file: its tensors as views of a memory map.

In: a path. Out: float32 arrays; if the file has float32, they are views of the file.

The `safetensors` package checks the file. This module then reads tensors by the header's offsets:
the package would copy each tensor twice, and keep the file's pages in memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from pilotfish.base.reading import reading_file
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.fields import format_value
from pilotfish.export.sources.mapped_file import MappedFile

BYTES_AT_ONCE = 1 << 24  # size (bytes) of the parts in which tensors are compared
MOST_NUMBERS = 1 << 48  # in a tensor; one of size 0 may state any shape
ROWS_BYTES = 1 << 24  # maximum bytes of a part that `rows` yields
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


class SafetensorsFile:
    """An opened safetensors file.

    Raises:
        ExportError: if the file is damaged or incomplete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        with reading_file(self._damage_error):
            try:
                with safe_open(path, "numpy"):  # opening checks lengths, offsets and shapes
                    self._start, self._tensors = self._read_header()
            except SafetensorError as error:
                raise self._damage_error(format_value(str(error), quoted=False)) from None

    def _damage_error(self, problem: str) -> ExportError:
        return ExportError(f"{self.path} is a damaged or incomplete safetensors file: {problem}")

    def names(self) -> list[str]:
        """Return the tensors' names, in the file's order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; raise the errors of `tensor`."""
        return self._float_tensor(name).shape

    def tensor(self, name: str, index: int | None = None) -> NDArray[np.float32]:
        """Return the tensor as float32, or entry `index` of its first axis.

        Raises:
            ExportError: if the tensor does not exist, or is not floating point.
        """
        tensor = self._float_tensor(name)
        shape = tensor.shape if index is None else tensor.shape[1:]
        return _floats(self._part(tensor, index), tensor.dtype).reshape(shape)

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Yield the tensor in parts of consecutive rows, at most ROWS_BYTES each in the file.

        Raises:
            ExportError: see `tensor`.
        """
        tensor = self._float_tensor(name)
        size = (tensor.data_offsets[1] - tensor.data_offsets[0]) // max(tensor.shape[0], 1)
        step = max(ROWS_BYTES // max(size, 1), 1)
        for start in range(0, tensor.shape[0], step):
            count = min(step, tensor.shape[0] - start)
            part = self._bytes(tensor, start * size, count * size)
            yield _floats(part, tensor.dtype).reshape(count, *tensor.shape[1:])

    def dtype(self, name: str) -> str:
        """Return the name of the tensor's type in the file."""
        return self._tensors[name].dtype

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape, for any type."""
        return self._tensors[name].shape

    def integers(self, name: str, types: Collection[str], index: int | None = None) -> NDArray[Any]:
        """Return a tensor of integers, or the bits of 8-bit floats, in the file's type.

        `index` selects an entry of the first axis.

        Raises:
            ExportError: if its type is not one of `types`.
        """
        tensor = self._tensors[name]
        if tensor.dtype not in types:
            raise ExportError(
                f"{self.path}: {name} is of type {tensor.dtype}, but only {' or '.join(types)} is "
                "supported"
            )
        shape = tensor.shape if index is None else tensor.shape[1:]
        return self._part(tensor, index).view(INTEGERS[tensor.dtype]).reshape(shape)

    def holds_same(self, name: str, other: SafetensorsFile, other_name: str) -> bool:
        """Whether two tensors have the same type, shape and bytes."""
        mine, theirs = self._float_tensor(name), other._float_tensor(other_name)
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return False
        size = mine.data_offsets[1] - mine.data_offsets[0]
        return all(
            np.array_equal(
                self._bytes(mine, at, BYTES_AT_ONCE), other._bytes(theirs, at, BYTES_AT_ONCE)
            )
            for at in range(0, size, BYTES_AT_ONCE)
        )

    def _part(self, tensor: _Tensor, index: int | None) -> NDArray[np.uint8]:
        if index is None:
            return self._bytes(tensor)
        size = (tensor.data_offsets[1] - tensor.data_offsets[0]) // tensor.shape[0]
        return self._bytes(tensor, index * size, size)

    def _bytes(self, tensor: _Tensor, at: int = 0, most: int | None = None) -> NDArray[np.uint8]:
        """Return at most `most` of a tensor's bytes, from byte `at` on."""
        start, end = tensor.data_offsets
        size = end - start - at
        return self._file.view(self._start + start + at, size if most is None else min(size, most))

    def _float_tensor(self, name: str) -> _Tensor:
        """Return the header entry of a floating-point tensor."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ExportError(f"{self.path} has no tensor {name}")
        if tensor.dtype not in DTYPES:
            raise ExportError(
                f"{self.path}: {name} is of type {tensor.dtype}, which is not supported; "
                f"supported are {', '.join(DTYPES)}: if these are quantised weights, give the "
                "original ones"
            )
        return tensor

    def _read_header(self) -> tuple[int, dict[str, _Tensor]]:
        """Read the header, a length and a JSON object; return its end and its entries."""
        end = 8 + int.from_bytes(self._file.data[:8], "little")
        header = msgspec.json.decode(self._file.data[8:end], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in header.items()}
        for name, tensor in tensors.items():
            if math.prod(max(size, 1) for size in tensor.shape) > MOST_NUMBERS:
                raise self._damage_error(f"{format_value(name)} has an impossible shape")
        return end, tensors


def _floats(values: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Convert bytes of type `dtype` to float32."""
    stored = values.view(DTYPES[dtype])
    if dtype == "BF16":  # BF16 is the upper half of a float32
        wide = stored.astype(np.uint32)
        wide <<= 16
        stored = wide.view(np.float32)
    return stored.astype(np.float32, copy=False)
