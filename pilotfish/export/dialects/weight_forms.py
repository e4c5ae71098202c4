"""Choose the form of an artifact's weights: floats, the checkpoint's own blocks, or new blocks.

In: a source of weights and a precision. Out: each weight in the form that a dialect writes.

    precision     weight of a product                         stored blocks
    fp32, fp16    floats                                      dequantised
    stored        the stored blocks, else floats              kept
    int8          8 bits                                      rounded a second time
    int4          4 bits, rounded by inputs on a text         kept if they have 4 bits

Where a checkpoint mixes blocks of 4 bits with wider codes, as Q4_K_M does, the latter are of the
matrices that lose most in 4 bits. The precision int4 gives them 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import HEADS, STORED, Precision
from pilotfish.export.blocks import LARGEST, Quantized
from pilotfish.export.dialects.operators import WeightReader
from pilotfish.export.dialects.quantized_weights import Weight
from pilotfish.export.quantize import quantize

BITS: dict[str, int] = {"int8": 8, "int4": 4}

RoundMatrix = Callable[[str, str, NDArray[np.float32]], Quantized]


class WeightForms:
    """The forms of the weights of one artifact.

    Attributes:
        bits: number of bits of rounded weights; None if none are rounded.
        head_bits: the same for the output projection.
        keeps_blocks: whether all stored blocks are kept.
        round_matrix: called with a product's label, the name of a module and its weight, rounds
            this weight; None to round all to `bits` (`export.quantize`).
    """

    def __init__(self, source: WeightReader, precision: Precision) -> None:
        self._source = source
        self.bits = BITS.get(precision)
        self.head_bits = BITS.get(HEADS.get(precision, precision))
        self.keeps_blocks = precision == STORED
        self.round_matrix: RoundMatrix | None = None
        self._mixes_four = False  # whether a matrix was read that has blocks of 4 bits

    def read_product(self, label: str, names: Sequence[str], *, rounded: bool) -> Sequence[Weight]:
        """Read the weights of the modules of a product, [N, K] each; round them if `rounded`."""
        bits = self.bits if rounded else None
        return [self._read_matrix(label, name, bits) for name in names]

    def round(self, name: str, weight: NDArray[np.float32], bits: int) -> Quantized:
        """Round a weight [N, K] to nearest."""
        return quantize(name, weight, bits, widest=LARGEST)

    def read_blocks(self, name: str) -> Quantized | None:
        """Read a weight's stored blocks if they are kept, else None."""
        if not self.keeps_blocks and self.bits != 4:
            return None
        blocks = self._source.quantized(name)
        return blocks if blocks is not None and self.bits in (None, blocks.bits) else None

    def _read_matrix(self, label: str, module: str, bits: int | None) -> Weight:
        name = f"{module}.weight"
        blocks = self._source.quantized(name) if self.keeps_blocks or bits == 4 else None
        if blocks is not None and (self.keeps_blocks or blocks.bits == bits):
            self._mixes_four = True
            return blocks
        weight = self._source.tensor(name)
        if bits is None:
            return weight
        if blocks is not None and self._mixes_four:
            return self.round(name, weight, 8)
        if self.round_matrix is not None:
            return self.round_matrix(label, module, weight)
        return self.round(name, weight, bits)
