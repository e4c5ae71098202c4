"""Opset 24 with quantised weights in the form that TensorRT's parser and builder accept.

Both refuse quantised weights of the dialect opset24, for three reasons:

- Scales must be positive. A block whose largest weight is positive has a negative scale
  (`export.quantize`). Here it has the mirrored codes, and often an offset.
- Zero points must be 0. Here a block has an offset instead.
- A constant of codes may only be the input of DequantizeLinear, not of Gather. Here a table of
  codes is stored in integers of 32 bits.

Weights keep their values: the offsets are exact. Their products cost time, so opset24 does without
them. Activations are float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.blocks import Quantized
from pilotfish.export.dialects.opset24 import Opset24
from pilotfish.export.export_errors import ExportError
from pilotfish.export.graph import pack_nibbles

WORD = 32  # bits
MIDDLE = 1 << (WORD - 1)  # subtracted from each word, so that it fits a signed integer


class TensorRT(Opset24):
    """The dialect of opset24's operators, for TensorRT ≥ 10.15; ONNX Runtime runs it, too."""

    name = "tensorrt"

    def declare_inputs(self) -> None:
        """Refuse recurrent states, then declare the inputs of opset24."""
        if self.config.recurrent:
            raise ExportError(
                f"{self.config.name} has recurrent states, which only the CPU supports so far: "
                "choose --dialect opset24 or contrib"
            )
        super().declare_inputs()

    def kernel_blocks(self, weight: Quantized) -> Quantized:
        """Return the same weight with positive scales and without zero points."""
        return weight.with_positive_scales()

    def signed_rows(
        self, name: str, shape: tuple[int, int], parts: Iterable[NDArray[np.int8]], tokens: str
    ) -> str:
        """Look up the rows `tokens` [T] of a table of codes, i8 [V, K]; integers [T, K]."""
        codes = (part.view(np.uint8).reshape(-1, shape[1]) ^ np.uint8(128) for part in parts)
        return self._rows_of_words(name, 8, shape, codes, tokens)

    def code_rows(self, name: str, weight: Quantized, tokens: str) -> str:
        """Look up rows of a weight's codes minus `zero_point`, [T, K / block, block]."""
        codes, shape = weight.codes, weight.codes.shape
        rows = self._rows_of_words(f"{name}.words", weight.bits, shape, [codes], tokens)
        blocks = self.reshape(rows, [-1, weight.scales.shape[1], weight.block])
        return self.cast(blocks, self.float)

    def _rows_of_words(
        self,
        name: str,
        bits: int,
        shape: tuple[int, ...],
        parts: Iterable[NDArray[np.uint8]],
        tokens: str,
    ) -> str:
        """Look up rows of codes u8 [V, K] of `bits` bits; the codes minus 2^(bits−1), i64 [T, K].

        A word has the codes of 32 / bits columns, the first in its lowest bits.
        """
        op, constant, number = self.graph.op, self.graph.constant, WORD // bits
        rows, width = shape
        table = self.graph.stream_weight(
            name, (rows, width // number, 1), "int32", _words(parts, bits)
        )
        words = self.cast(op("Gather", table, tokens), "int64")  # [T, K / number, 1]
        # All operands are positive, since runtimes differ in the signs of remainders.
        words = op("Add", words, constant(MIDDLE, "int64"))
        places = constant([2 ** (bits * i) for i in range(number)], "int64")
        codes = op("Mod", op("Div", words, places), constant(2**bits, "int64"))
        signed = op("Sub", codes, constant(2 ** (bits - 1), "int64"))
        return self.reshape(signed, [-1, width])


def _words(parts: Iterable[NDArray[np.uint8]], bits: int) -> Iterator[NDArray[np.int32]]:
    """Pack codes u8 [n, K] into words minus MIDDLE, i32 [n · K · bits / 32]."""
    for part in parts:
        codes = pack_nibbles(part) if bits == 4 else np.ascontiguousarray(part)
        words = codes.reshape(-1).view("<u4") ^ np.uint32(MIDDLE)
        yield words.view(np.int32)
