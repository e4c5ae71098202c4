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
from pathlib import Path

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
from pilotfish.export.sources.mapped_file import VALUES_AT_ONCE, TensorFile, TensorInfo

MAGIC = b"GGUF"
MAX_DIMENSIONS = 4
GROUP = 16  # rows per call of a function of the gguf package
STRING, ARRAY = 8, 9
# Value types of fixed size: type number → struct code.
SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]


class GgufFile(TensorFile):
    """An opened GGUF file.

    Raises:
        ExportError: if the file is not GGUF, damaged or incomplete.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if self.data[:4] != MAGIC:
            raise ExportError(
                f"{path} is not a GGUF file: give one, or the folder of a Hugging Face model"
            )
        with reading_file(self._damage_error):
            try:
                self.metadata, self.tensors = _read_header(_Cursor(self.data))
            except (struct.error, OverflowError) as error:
                raise self._damage_error(str(error)) from None

    def _damage_error(self, problem: str) -> ExportError:
        return ExportError(f"{self.path} is a damaged or incomplete GGUF file: {problem}")

    def floats(self, name: str, info: TensorInfo) -> NDArray[np.float32]:
        """Read and dequantise a tensor, or a part of it."""
        raw = self.view(info.start, info.size)
        if info.kind == "F32":
            return raw.view(np.float32).reshape(info.shape)
        try:
            return _dequantize(raw, info.kind, info.shape)
        except NotImplementedError:
            raise ExportError(
                f"{self.path}: {name} is of type {info.kind}, which the gguf package "
                "cannot dequantise"
            ) from None

    def check_numbers(self) -> None:
        """Check all weights, and the scales of blocks, without dequantising them.

        Raises:
            ExportError: if one is NaN or infinite.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        for name, info in self.tensors.items():
            size = GGML_QUANT_SIZES[GGMLQuantizationType[info.kind]][1]
            mask = EXPONENTS.get(info.kind, HALF_EXPONENT)
            for start in range(0, info.size, size * VALUES_AT_ONCE):
                count = min(info.size - start, size * VALUES_AT_ONCE)
                blocks = self.view(info.start + start, count).reshape(-1, size)
                for at in FLOAT_BYTES.get(info.kind, ()):
                    bad = (blocks[:, at : at + 2].view(np.uint16) & mask) == mask
                    if bad.any():
                        place = start // size + int(bad.argmax())
                        raise ExportError(
                            f"{self.path}: {name} ({info.kind}) has a number in block {place} "
                            "that is NaN or infinite: the file is damaged"
                        )

    def kinds(self) -> set[str]:
        """Return the names of the tensors' types."""
        return {info.kind for info in self.tensors.values()}

    def quantized(self, name: str, index: int | None = None) -> Quantized | None:
        """Return a tensor [N, K], or entry `index` of the first axis, in blocks.

        None without a kernel.
        """
        info = self.find(name, index)
        form = FORMATS.get(info.kind)
        if form is None or len(info.shape) != 2:
            return None
        return keep_blocks(self.view(info.start, info.size).reshape(info.shape[0], -1), form)


def _dequantize(raw: NDArray[np.uint8], name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Dequantise a few blocks at a time, because the package keeps all intermediate results.

    The package calls its functions for `GROUP` rows at a time, so it gets long rows of many blocks:
    with the rows of a narrow weight, the calls take as long as the arithmetic.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[name]
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
    return name, TensorInfo(shape, kind.name, start, math.prod(shape) // block * block_bytes)
