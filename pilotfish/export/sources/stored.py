"""The tensors of a checkpoint: plain tensors, and experts in blocks of MXFP4 (gpt-oss).

MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 values along the input width; each value is a
4-bit float (E2M1) times the block's power of two (E8M0).

    NAME_blocks u8 [experts, out, in / 32, 16]: two codes per byte, the first in the low nibble
    NAME_scales u8 [experts, out, in / 32]: exponent + 127
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.architectures import Names
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.mapped_file import TensorInfo
from pilotfish.export.sources.safetensors_file import SafetensorsFile

log = logging.getLogger("pilotfish.export")
BLOCKS, SCALES = "_blocks", "_scales"
PER_BLOCK = 32
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*POSITIVE, *(-value for value in POSITIVE)], np.float32)
BIAS = 127  # exponent bias


class StoredTensor(Protocol):
    """One tensor of a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        ...

    def read(self, index: int | None) -> NDArray[np.float32]:
        """Read the tensor, or entry `index` of its first axis."""
        ...

    def stored(self, index: int | None) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield name and values of what `read` reads, for errors."""
        ...


@dataclass(frozen=True)
class PlainTensor:
    """A floating-point tensor; `name` is its name in the file."""

    file: SafetensorsFile
    name: str

    @property
    def info(self) -> TensorInfo:
        """The tensor's place and layout, for any type."""
        return self.file.find(self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape; raises ExportError if it is not floating point."""
        return self.file.shape(self.name)

    def read(self, index: int | None) -> NDArray[np.float32]:
        """Read the tensor, or entry `index` of its first axis."""
        return self.file.tensor(self.name, index)

    def stored(self, index: int | None) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield name and values of the tensor, or of its entry."""
        yield self.name if index is None else f"{self.name}[{index}]", self.read(index)

    def rows(self) -> Iterator[NDArray[np.float32]]:
        """Read the tensor in parts of consecutive rows."""
        return self.file.rows(self.name)

    def holds_same(self, other: PlainTensor) -> bool:
        """Whether the other tensor has the same type, shape and bytes."""
        return self.file.holds_same(self.name, other.file, other.name)


@dataclass(frozen=True)
class BlockTensor:
    """A tensor [experts, in, out] in blocks and scales of MXFP4, read one expert at a time."""

    blocks: PlainTensor
    scales: PlainTensor

    def __post_init__(self) -> None:
        parts = self.blocks, self.scales
        blocks, scales = (part.info.shape for part in parts)
        known = all(part.info.kind == "U8" for part in parts) and len(blocks) == 4
        if not known or blocks[3] * 2 != PER_BLOCK or scales != blocks[:3]:
            raise ExportError(
                f"{self.blocks.file.path}: {self.blocks.name} and {self.scales.name} are not "
                f"in MXFP4: the blocks must be u8 [experts, out, in / {PER_BLOCK}, "
                f"{PER_BLOCK // 2}], with a scale for each block"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantised tensor."""
        experts, rows, count, _ = self.blocks.info.shape
        return experts, count * PER_BLOCK, rows

    def read(self, index: int | None) -> NDArray[np.float32]:
        """Read one expert's matrix, [in, out]."""
        if index is None:
            raise ValueError(f"the tensor {self.blocks.name} can only be read one expert at a time")
        codes = self.blocks.file.integers(self.blocks.name, ("U8",), index)
        values = np.empty((*codes.shape[:2], PER_BLOCK), np.float32)
        values[..., 0::2] = VALUES[codes & 15]
        values[..., 1::2] = VALUES[codes >> 4]
        values *= self._scales(index)[..., None].astype(np.float32)
        result: NDArray[np.float32] = values.reshape(codes.shape[0], -1).T
        return result

    def stored(self, index: int | None) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield name and values of the scales of an expert; only they can be unusable."""
        yield f"{self.scales.name}[{index}]", self._scales(index or 0)

    def _scales(self, index: int) -> NDArray[np.float32]:
        exponents = self.scales.file.integers(self.scales.name, ("U8",), index)
        scales: NDArray[np.float32] = np.ldexp(np.float32(1), exponents.astype(np.int32) - BIAS)
        return scales


def join_blocks(
    plain: Mapping[str, PlainTensor], names: Names, where: str
) -> Mapping[str, StoredTensor]:
    """Join each pair of blocks and scales to one tensor, in a class with stacked experts.

    `where`: the model's location, for the log.
    """
    if not names.stacked:
        return plain
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in plain.items():
        base, blocks = name.removesuffix(BLOCKS), name.removesuffix(SCALES) + BLOCKS
        if base != name and base + SCALES in plain:
            tensors[base] = BlockTensor(tensor, plain[base + SCALES])
        elif not name.endswith(SCALES) or blocks not in plain:
            tensors[name] = tensor
    if len(tensors) < len(plain):
        log.warning("%s: the experts are stored in MXFP4 and are dequantised", where)
    return tensors
