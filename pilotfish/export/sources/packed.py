"""Quantised matrices of a Hugging Face checkpoint, each of which is stored in several tensors.

In: the tensors of a module; b: bits per code, G: number of groups of columns.

    gptq    qweight i32 [K·b/32, N], qzeros i32 [G, N·b/32], scales [G, N], g_idx [K] or none
    awq     qweight i32 [K, N/8], qzeros i32 [G, N/8], scales [G, N]; the eight codes of an i32 are
            in the order 0 2 4 6 1 3 5 7
    compressed-tensors
            weight_packed i32 [N, K·b/32], weight_zero_point i32 [N·b/32, G], weight_scale [N, G],
            weight_shape [2]; or weight i8 [N, K], or as fp8
    fp8     weight [N, K] e4m3; weight_scale or weight_scale_inv: a scalar, [N, 1], or one per block

Out: weights [N, K] as float32 or `Quantized`. The first code of an i32 is in its lowest bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.blocks import Quantized, largest_block
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.packing import Packing
from pilotfish.export.sources.stored import PlainTensor, StoredTensor

T = TypeVar("T", np.float32, np.int8)
# Name of the tensor with the codes → names of the matrix's other tensors.
PARTS: Mapping[str, tuple[str, ...]] = {
    "qweight": ("qzeros", "scales", "g_idx"),
    "weight_packed": ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "weight": ("weight_scale", "weight_scale_inv", "weight_zero_point"),
}
# Tensors for quantised activations, which this engine does not use.
UNUSED = ("input_scale", "input_scale_ub", "input_zero_point", "activation_scale")
# Tensors for a quantised cache, which an artifact does not have.
CACHE_SCALES = (".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale")
FLOAT8 = "F8_E4M3"
BYTES = (FLOAT8, "I8")
# Accepted types of integer tensors, since other widths would give wrong codes.
WORDS, NUMBERS = ("I32",), ("I32", "I64")
TYPES: Mapping[str, tuple[str, ...]] = {
    "qweight": WORDS,
    "qzeros": WORDS,
    "g_idx": NUMBERS,
    "weight_packed": WORDS,
    "weight_zero_point": WORDS,
    "weight_shape": NUMBERS,
    "weight_g_idx": NUMBERS,
    "weight": BYTES,
}
# position of codes 0 … 7 among the nibbles of AWQ's packed i32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def join_packed(packing: Packing, plain: Mapping[str, PlainTensor]) -> dict[str, StoredTensor]:
    """Replace the tensors of each quantised module by one weight."""
    tensors: dict[str, StoredTensor] = {
        name: tensor for name, tensor in plain.items() if not name.endswith(CACHE_SCALES)
    }
    for name, tensor in plain.items():
        module, _, kind = name.rpartition(".")
        if kind not in PARTS or (kind == "weight" and tensor.info.kind not in BYTES):
            continue
        names = {part: f"{module}.{part}" for part in (kind, *PARTS[kind], *UNUSED)}
        parts = {part: plain[each] for part, each in names.items() if each in plain}
        for part in parts:
            del tensors[names[part]]
        tensors[f"{module}.weight"] = PackedMatrix(packing, parts)
    return tensors


class PackedMatrix:
    """The tensors of one matrix; the first tensor has the codes."""

    def __init__(self, packing: Packing, parts: Mapping[str, PlainTensor]) -> None:
        self._packing, self._parts = packing, parts
        self._kind, codes = next(iter(parts.items()))
        self._path, self._name = codes.file.path, codes.name
        self._float8 = codes.info.kind == FLOAT8

    @property
    def in_blocks(self) -> bool:
        """Whether the codes are integers, not 8-bit floats."""
        return not self._float8

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantised matrix, [N, K]."""
        stored = self._shape(self._kind)
        if self._kind == "qweight" and len(stored) == 2:
            if self._packing.method == "awq":
                return stored[1] * 8, stored[0]
            return stored[1], stored[0] * 32 // self._bits()
        if self._kind == "weight_packed":
            rows, columns = self._ints("weight_shape").tolist()
            return int(rows), int(columns)
        return stored

    def read(self, index: int | None) -> NDArray[np.float32]:
        """Read the whole matrix as float32.

        Raises:
            ExportError: if the tensors contradict each other, or `index` is not None.
        """
        if index is not None:
            raise ExportError(f"{self._path}: the matrix {self._name} has no experts")
        blocks = self.quantized()
        return self._dequantize_fp8() if blocks is None else blocks.floats()

    def stored(self, index: int | None) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield name and values of the scales, then those of the matrix."""
        for part in ("scales", "weight_scale", "weight_scale_inv"):
            if part in self._parts:
                yield self._parts[part].name, self._floats(part)
        yield self._name, self.read(index)

    def quantized(self) -> Quantized | None:
        """Read the matrix in its stored blocks; None for fp8. Raises the errors of `read`."""
        if self._float8:
            return None
        if self._kind == "weight":
            return self._int8()
        if self._kind == "weight_packed":
            return self._compressed()
        return self._awq() if self._packing.method == "awq" else self._gptq()

    def _gptq(self) -> Quantized:
        words = self._ints("qweight")
        bits = self._bits()
        zeros = unpack(self._ints("qzeros"), bits).T
        if self._packing.one_less:
            if (zeros == 2**bits - 1).any():
                raise ExportError(
                    f"{self._path}: {self._name} has zero points that some programs for GPTQ's "
                    f"first format read as 0, others as {2**bits}: convert it to gptq_v2"
                )
            zeros = zeros + np.uint8(1)
        scales = self._floats("scales").T
        return self._blocks(bits, unpack(words.T, bits), scales, zeros, "g_idx")

    def _awq(self) -> Quantized:
        codes, zeros = (
            unpack(words, 4).reshape(len(words), -1, 8)[..., AWQ_ORDER].reshape(len(words), -1).T
            for words in (self._ints("qweight"), self._ints("qzeros"))
        )
        return self._blocks(4, codes, self._floats("scales").T, zeros)

    def _compressed(self) -> Quantized:
        rows, width = self.shape
        words = self._ints("weight_packed")
        bits = words.shape[1] * 32 // max(width, 1)
        zeros = None
        if "weight_zero_point" in self._parts:
            zeros = unpack(self._ints("weight_zero_point").T, bits).T[:rows]
        codes = unpack(words, bits)[:, :width]
        return self._blocks(bits, codes, self._floats("weight_scale"), zeros, "weight_g_idx")

    def _int8(self) -> Quantized:
        middle = np.uint8(128)
        zeros = None
        if "weight_zero_point" in self._parts:
            stored = self._ints("weight_zero_point", ("I8",))
            zeros = self._by_row(stored).view(np.uint8) ^ middle
        scales = self._by_row(self._floats("weight_scale"))
        return self._blocks(8, self._ints("weight").view(np.uint8) ^ middle, scales, zeros)

    def _by_row(self, values: NDArray[T]) -> NDArray[T]:
        """Broadcast a single value, or a value per row, to [N, 1]."""
        rows = self._shape("weight")[0]
        if values.size != 1 and values.shape not in ((rows,), (rows, 1)):
            raise self._mismatch()
        return np.broadcast_to(values.reshape(-1, 1), (rows, 1))

    def _blocks(
        self,
        bits: int,
        codes: NDArray[np.uint8],
        scales: NDArray[np.float32],
        zeros: NDArray[np.uint8] | None,
        groups: str = "",
    ) -> Quantized:
        """Divide groups of columns (scales and zeros [N, G]) into blocks that kernels support."""
        rows, width = codes.shape
        count = scales.shape[-1]
        if bits not in (4, 8) or scales.shape != (rows, count) or not count or width % count:
            raise self._mismatch()
        if zeros is not None and zeros.shape != scales.shape:
            raise self._mismatch()
        block = largest_block(width // count)
        if block is None:
            raise ExportError(
                f"{self._path}: {self._name} has groups of {width // count} columns, which no "
                "kernel supports"
            )
        order = self._order(groups, width, count) if groups in self._parts else None
        times = width // count // block
        if zeros is not None:
            zeros = None if (zeros == 2 ** (bits - 1)).all() else np.repeat(zeros, times, axis=1)
        return Quantized(
            bits,
            np.ascontiguousarray(codes if order is None else codes[:, order]),
            np.repeat(scales, times, axis=1),
            zeros=zeros,
            block=block,
            order=order,
        )

    def _order(self, part: str, width: int, count: int) -> NDArray[np.int64] | None:
        """Return the columns' indices sorted by group.

        None if columns are in order or have no groups.
        """
        groups = self._ints(part).astype(np.int64)
        if (groups == -1).all():
            return None
        inside = groups.shape == (width,) and groups.min() >= 0 and groups.max() < count
        if not inside or (np.bincount(groups, minlength=count) != width // count).any():
            raise self._mismatch()
        order = np.argsort(groups, kind="stable")
        return None if (order == np.arange(width)).all() else order

    def _dequantize_fp8(self) -> NDArray[np.float32]:
        """Dequantise fp8 to float32."""
        values: NDArray[np.float32] = FLOAT8_VALUES[self._ints("weight")]
        part = next((name for name in PARTS["weight"][:2] if name in self._parts), None)
        if part is None:
            raise self._mismatch()
        scales = self._floats(part)
        high, wide = self._packing.float8_block
        expected = tuple(
            -(-size // by) for size, by in zip(values.shape, (high, wide), strict=True)
        )
        if scales.shape != expected:
            values *= self._by_row(scales)
            return values
        for i, row in enumerate(scales):
            values[i * high : (i + 1) * high] *= np.repeat(row, wide)[: values.shape[1]]
        return values

    def _bits(self) -> int:
        """Return the bits per code, which may differ between modules in GPTQ."""
        zeros, scales = self._ints("qzeros").shape, self._shape("scales")
        bits = zeros[-1] * 32 // max(scales[-1], 1) if zeros and scales else 0
        if bits not in (4, 8):
            raise self._mismatch()
        return bits

    def _shape(self, part: str) -> tuple[int, ...]:
        return self._tensor(part).info.shape

    def _ints(self, part: str, types: tuple[str, ...] | None = None) -> NDArray[Any]:
        tensor = self._tensor(part)
        return tensor.file.integers(tensor.name, TYPES[part] if types is None else types)

    def _floats(self, part: str) -> NDArray[np.float32]:
        return self._tensor(part).read(None)

    def _tensor(self, part: str) -> PlainTensor:
        if part not in self._parts:
            raise self._mismatch()
        return self._parts[part]

    def _mismatch(self) -> ExportError:
        return ExportError(
            f"{self._path}: {self._name} and the other tensors of its matrix contradict each "
            f"other: they do not have {self._packing.method}'s format"
        )


def unpack(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Unpack codes of 4 or 8 bits, lowest bits first; i32 [n, m] → u8 [n, m · 32 / bits]."""
    packed = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return packed
    codes = np.empty((len(packed), 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & np.uint8(15), packed >> np.uint8(4)
    return codes


def _float8_values() -> NDArray[np.float32]:
    """Return the value of every e4m3 byte, f32 [256]; 0x7f and 0xff are NaN."""
    byte = np.arange(256)
    exponent, fraction = (byte >> 3) & 15, (byte & 7) / 8
    small = exponent == 0
    size = np.where(small, fraction, 1 + fraction) * 2.0 ** np.where(small, -6, exponent - 7)
    size[(byte & 127) == 127] = np.nan
    values: NDArray[np.float32] = np.where(byte < 128, size, -size).astype(np.float32)
    return values


FLOAT8_VALUES = _float8_values()
