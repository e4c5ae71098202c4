"""A GGUF file: its metadata, and its tensors as views of a memory map.

In: a path. Out: `GgufFile.metadata` (plain Python values), `GgufFile.tensor` (float32), and
`GgufFile.quantized` (`export.sources.gguf_blocks`).

`gguf.GGUFReader` takes seconds for a vocabulary, because it makes an array of each string, and it
raises arbitrary numpy errors for a damaged file. So this module reads the container, and checks
every count and offset against the file's length. The `gguf` package dequantises the blocks. The
layout is GGUF's versions 2 and 3, specified in ggml's documentation.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.reading import reading_file
from pilotfish.export.blocks import Quantized
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.gguf_blocks import (
    EXPONENTS,
    FLOAT_BYTES,
    FORMATS,
    HALF_EXPONENT,
    keep_blocks,
)
from pilotfish.export.sources.mapped_file import MappedFile

MAGIC = b"GGUF"
MAX_DIMENSIONS = 4
VALUES_AT_ONCE = 1 << 20
GROUP = 16  # rows per call of a function of the gguf package
STRING, ARRAY = 8, 9
# Value types of fixed size: type number → struct code.
SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]


class TensorInfo(NamedTuple):
    """The place and layout of a tensor. `shape` is in numpy's order: slowest dimension first."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int  # offset from the start of the file, bytes
    size: int  # bytes


class GgufFile:
    """An opened GGUF file.

    Raises:
        ExportError: if the file is not GGUF, damaged or incomplete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        if self._file.data[:4] != MAGIC:
            raise ExportError(
                f"{path} is not a GGUF file: give one, or the folder of a Hugging Face model"
            )
        with reading_file(self._damage_error):
            try:
                self.metadata, self.tensors = _read_header(_Cursor(self._file.data))
            except (struct.error, OverflowError) as error:
                raise self._damage_error(str(error)) from None

    def _damage_error(self, problem: str) -> ExportError:
        return ExportError(f"{self.path} is a damaged or incomplete GGUF file: {problem}")

    def tensor(self, name: str, index: int | None = None) -> NDArray[np.float32]:
        """Return a tensor as float32; this is a view of the file if the file has float32.

        `index` selects an entry of the first axis.

        Raises:
            ExportError: if the tensor does not exist, or its type cannot be dequantised.
        """
        return self._floats(name, self._part(name, index))

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Yield a tensor [N, K] in parts of consecutive rows, of a few megabytes each.

        Raises:
            ExportError: see `tensor`.
        """
        info = self._part(name, None)
        total, width = info.shape
        size, step = info.size // total, max(1, VALUES_AT_ONCE // width)
        for start in range(0, total, step):
            count = min(step, total - start)
            place = info.start + start * size
            yield self._floats(name, TensorInfo((count, width), info.kind, place, count * size))

    def _floats(self, name: str, info: TensorInfo) -> NDArray[np.float32]:
        """Read and dequantise a part of a tensor."""
        raw = self._file.view(info.start, info.size)
        if info.kind.name == "F32":
            return raw.view(np.float32).reshape(info.shape)
        try:
            return _dequantize(raw, info.kind, info.shape)
        except NotImplementedError:
            raise ExportError(
                f"{self.path}: {name} is of type {info.kind.name}, which the gguf package "
                "cannot dequantise"
            ) from None

    def check_numbers(self) -> None:
        """Check all weights, and the scales of blocks, without dequantising them.

        Raises:
            ExportError: if one is NaN or infinite.
        """
        from gguf import GGML_QUANT_SIZES

        for name, info in self.tensors.items():
            kind = info.kind
            size, mask = GGML_QUANT_SIZES[kind][1], EXPONENTS.get(kind.name, HALF_EXPONENT)
            for start in range(0, info.size, size * VALUES_AT_ONCE):
                count = min(info.size - start, size * VALUES_AT_ONCE)
                blocks = self._file.view(info.start + start, count).reshape(-1, size)
                for at in FLOAT_BYTES.get(kind.name, ()):
                    bad = (blocks[:, at : at + 2].view(np.uint16) & mask) == mask
                    if bad.any():
                        place = start // size + int(bad.argmax())
                        raise ExportError(
                            f"{self.path}: {name} ({kind.name}) has a number in block {place} "
                            "that is NaN or infinite: the file is damaged"
                        )

    def kinds(self) -> set[str]:
        """Return the names of the tensors' types."""
        return {info.kind.name for info in self.tensors.values()}

    def _part(self, name: str, index: int | None) -> TensorInfo:
        """Return the location of a tensor, or of an entry of its first axis."""
        if name not in self.tensors:
            raise ExportError(f"{self.path} has no tensor {name}")
        info = self.tensors[name]
        if index is None:
            return info
        size = info.size // info.shape[0]
        return info._replace(shape=info.shape[1:], start=info.start + index * size, size=size)

    def quantized(self, name: str, index: int | None = None) -> Quantized | None:
        """Return a tensor [N, K], or entry `index` of the first axis, in blocks.

        None without a kernel.
        """
        info = self._part(name, index)
        form = FORMATS.get(info.kind.name)
        if form is None or len(info.shape) != 2:
            return None
        return keep_blocks(self._file.view(info.start, info.size).reshape(info.shape[0], -1), form)


def _dequantize(
    raw: NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Dequantise a few blocks at a time, because the package keeps all intermediate results.

    The package calls its functions for `GROUP` rows at a time, so it gets long rows of many blocks:
    with the rows of a narrow weight, the calls take as long as the arithmetic.
    """
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, block_bytes)
    values = np.empty((len(blocks), block), np.float32)
    step = max(1, VALUES_AT_ONCE // block // GROUP) * GROUP
    for start in range(0, len(blocks), step):
        some = blocks[start : start + step]
        rows = some.reshape(GROUP if len(some) % GROUP == 0 else 1, -1)
        values[start : start + step] = dequantize(rows, kind).reshape(-1, block)
    return values.reshape(shape)


class _Cursor:
    """A reader of consecutive little-endian values; it raises struct.error at the file's end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def scalar(self, code: str) -> int | float | bool:
        [value] = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value  # type: ignore[no-any-return]  # the format code decides the type of the value

    def integer(self, code: str) -> int:
        return int(self.scalar(code))

    def string(self) -> str:
        length = self.integer("Q")
        text = self.data[self.offset : self.offset + length]
        if len(text) != length:
            raise ValueError("a string extends past the end")
        self.offset += length
        return text.decode("utf-8")

    def value(self, kind: int) -> Value:
        if kind != ARRAY:
            return self.element(kind)
        kind, count = self.integer("I"), self.integer("Q")
        if count > len(self.data) - self.offset:  # an element has at least one byte
            raise ValueError("an array extends past the end")
        if code := SCALARS.get(kind):
            values = struct.unpack_from(f"<{count}{code}", self.data, self.offset)
            self.offset += struct.calcsize(f"<{count}{code}")
            return list(values)
        return [self.element(kind) for _ in range(count)]

    def element(self, kind: int) -> Scalar:
        if kind == STRING:
            return self.string()
        if kind not in SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.scalar(SCALARS[kind])


def _read_header(cursor: _Cursor) -> tuple[dict[str, Value], dict[str, TensorInfo]]:
    """Read the metadata and the tensor table, which precede the tensors' bytes."""
    cursor.offset = len(MAGIC)
    version = cursor.integer("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} or byte order is not supported")
    tensor_count, entry_count = cursor.integer("Q"), cursor.integer("Q")
    metadata: dict[str, Value] = {}
    for _ in range(entry_count):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"{key} occurs twice")
        metadata[key] = cursor.value(cursor.integer("I"))
    # `start` counts from the header's end until that is known.
    tensors: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        name, info = _read_tensor_info(cursor)
        if name in tensors:
            raise ValueError(f"{name} occurs twice")
        tensors[name] = info
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError("general.alignment is not a positive number")
    base = -(-cursor.offset // alignment) * alignment
    for name, info in tensors.items():
        tensors[name] = info._replace(start=base + info.start)
        if base + info.start + info.size > len(cursor.data):
            raise ValueError(f"the file ends within the tensor {name}: the download is incomplete")
    return metadata, tensors


def _read_tensor_info(cursor: _Cursor) -> tuple[str, TensorInfo]:
    """Read name and layout of one tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = cursor.string()
    if (dimensions := cursor.integer("I")) > MAX_DIMENSIONS:
        raise ValueError(f"{name} has {dimensions} dimensions")
    shape = tuple(cursor.integer("Q") for _ in range(dimensions))[::-1]
    if name.endswith("_exps.weight") and len(shape) == 2:
        shape = (1, *shape)  # ggml drops an axis of length 1, here that of a single expert
    kind, start = GGMLQuantizationType(cursor.integer("I")), cursor.integer("Q")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or min(shape) < 1 or shape[-1] % block:
        raise ValueError(f"{name} has shape {shape}, in blocks of {block}")
    return name, TensorInfo(shape, kind, start, math.prod(shape) // block * block_bytes)
