"""The building blocks that every dialect offers to architectures.

A dialect turns layers (linear, norm, attention) into ONNX operators. Tokens of all slots stand
packed in one row of T, without padding, except inside attention, where a slot is a batch entry:

    input_ids, position_ids [T] i64     logit_rows [N] i64: the rows of T that are asked for
    past.{i}.key/value [B, kv_heads, C, head_dim], bound to the memory of present.{i}.key/value
    hidden_states [N, width] f32 (after the final norm), logits [N, vocabulary] f32

Subclasses say which operators, and add the inputs that their attention needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import HEADS, Precision
from pilotfish.engines.artifact import Dialect as DialectName
from pilotfish.export.config import ModelConfig
from pilotfish.export.graph import ELEMENT, Dim, GraphWriter
from pilotfish.export.quantize import BLOCK, Quantized, quantize, quantize_rows

ReadWeight = Callable[[str], NDArray[np.float32]]
BITS: dict[str, int] = {"int8": 8, "int4": 4}


class Dialect(ABC):
    """Writes layers of one model into one graph, in the operators of one dialect."""

    name: ClassVar[DialectName]
    opset: ClassVar[int]
    contrib: ClassVar[bool] = False
    precisions: ClassVar[Sequence[str]]

    def __init__(
        self, graph: GraphWriter, config: ModelConfig, read: ReadWeight, precision: Precision
    ) -> None:
        self.graph = graph
        self.config = config
        self.read = read
        self.bits = BITS.get(precision)
        self.head_bits = BITS.get(HEADS.get(precision, precision))
        self.float = "float16" if precision == "fp16" else "float32"
        self.tokens = graph.input("input_ids", "int64", ["T"])
        self.positions = graph.input("position_ids", "int64", ["T"])
        self.logit_rows = graph.input("logit_rows", "int64", ["N"])

    # --- for subclasses --------------------------------------------------------------------

    @abstractmethod
    def rms_norm(self, x: str, name: str) -> str:
        """Compute x / rms(x) · weight over the last axis."""

    @abstractmethod
    def attention(
        self, layer: int, qkv: str, *, q_norm: str | None = None, k_norm: str | None = None
    ) -> str:
        """Rotate q and k, append k and v to the cache, attend; [T, q + k + v] → [T, q].

        `q_norm` and `k_norm` name RMS norms over each head, before the rotation.
        """

    @abstractmethod
    def quantized_linear(self, x: str, name: str, weight: Quantized) -> str:
        """Multiply x [T, K] by the transposed weight [N, K], without its offsets."""

    # --- layers ----------------------------------------------------------------------------

    def weight(self, name: str, array: NDArray[np.float32] | None = None) -> str:
        """Write a weight in the graph's floating-point type, once."""
        if self.graph.has(name):
            return name
        values = self.read(name) if array is None else array
        return self.graph.weight(name, values.astype(self.float, copy=False))

    def linear(self, x: str, *names: str, bias: bool = False) -> str:
        """Project x [T, K] → [T, ΣN]: one product for several projections of the same x.

        `names` are modules: `name.weight` [N, K] and, with `bias`, `name.bias` [N].
        """
        rows = [self.read(f"{name}.weight") for name in names]
        weight = rows[0] if len(rows) == 1 else np.concatenate(rows)
        del rows
        label = "+".join(names)
        added = None
        if bias:
            parts = [self.read(f"{name}.bias") for name in names]
            added = self.weight(f"{label}.bias", np.concatenate(parts))
        return self._product(x, f"{label}.weight", weight, added, self.bits)

    def embed(self, name: str) -> str:
        """Look up the packed tokens' embeddings, [T, width]."""
        if self.bits is None:
            return self.graph.op("Gather", self.weight(name), self.tokens)
        codes, scales = quantize_rows(self.read(name))
        row = self.graph.op("Gather", self.graph.weight(f"{name}.row_codes", codes), self.tokens)
        scale = self.graph.op(
            "Gather", self.graph.weight(f"{name}.row_scales", scales), self.tokens
        )
        return self.graph.op("Mul", self.cast(row, self.float), scale)

    def embed_positions(self, name: str) -> str:
        """Look up rows of a learned position table, [T, width]."""
        offset = self.graph.constant(self.config.position_offset, "int64")
        rows = self.graph.op("Add", self.positions, offset)
        return self.graph.op("Gather", self.weight(name), rows)

    def add(self, x: str, y: str) -> str:
        """Add x and y."""
        return self.graph.op("Add", x, y)

    def layer_norm(self, x: str, name: str) -> str:
        """Compute (x − mean) / deviation · weight + bias over the last axis."""
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self.graph.op(
            "LayerNormalization", x, weight, bias, axis=-1, epsilon=self.config.norm_eps
        )

    def activation(self, x: str) -> str:
        """Apply the configuration's pointwise function."""
        if self.config.activation == "relu":
            return self.graph.op("Relu", x)
        if self.config.activation == "silu":
            return self.graph.op("Mul", x, self.graph.op("Sigmoid", x))
        half, one = (self.graph.constant(value, self.float) for value in (0.5, 1.0))
        root = self.graph.constant(np.sqrt(0.5), self.float)
        erf = self.graph.op("Erf", self.graph.op("Mul", x, root))
        return self.graph.op("Mul", self.graph.op("Mul", x, half), self.graph.op("Add", erf, one))

    def gated(self, gate_up: str) -> str:
        """Compute activation(gate) · up from [T, 2·intermediate]."""
        gate, up = self.split(gate_up, [self.config.intermediate] * 2)
        return self.graph.op("Mul", self.activation(gate), up)

    def finish(self, hidden: str, head: str) -> None:
        """Declare the outputs for the requested rows; a tied `head` is the embedding."""
        rows = self.graph.op("Gather", hidden, self.logit_rows, axis=0)
        if self.graph.has(head):
            logits = self.graph.op("Gemm", rows, head, transB=1)
        else:
            logits = self._product(rows, head, self.read(head), None, self.head_bits)
        self._output("hidden_states", rows, self.config.embedding or self.config.hidden)
        self._output("logits", logits, self.config.vocab_size)

    # --- building blocks -------------------------------------------------------------------

    def split(self, x: str, sizes: Sequence[int], axis: int = -1) -> list[str]:
        """Split into neighbouring parts of these sizes."""
        names = self.graph.fresh("Split", len(sizes))
        count = self.graph.constant(sizes, "int64")
        return self.graph.multi("Split", x, count, names=names, axis=axis)

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """Reshape to constants; 0 keeps a dimension, −1 is inferred."""
        return self.graph.op("Reshape", x, self.graph.constant(shape, "int64"))

    def cast(self, x: str, dtype: str) -> str:
        """Cast x to another dtype."""
        return self.graph.op("Cast", x, to=ELEMENT[dtype])

    def rotary_tables(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Write cos and sin of every position's angles, each [context, head_dim // 2]."""
        positions = np.arange(self.config.context, dtype=np.float64)
        angles = np.outer(positions, self.config.inverse_frequencies())
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def cache(self, layer: int) -> tuple[str, str, str, str]:
        """Declare a layer's cache; return names of past key and value, present key and value."""
        shape: list[Dim] = ["B", self.config.kv_heads, "C", self.config.head_dim]
        names = [f"{when}.{layer}.{what}" for when in ("past", "present") for what in KEY_VALUE]
        for name in names[:2]:
            self.graph.input(name, self.float, shape)
        for name in names[2:]:
            self.graph.output(name, self.float, shape)
        return names[0], names[1], names[2], names[3]

    def _product(
        self,
        x: str,
        name: str,
        weight: NDArray[np.float32],
        bias: str | None,
        bits: int | None,
    ) -> str:
        if bits is not None:
            quantized = quantize(name, weight, bits)
            product = self.quantized_linear(x, name, quantized)
            if quantized.offsets is not None:
                product = self._shifted(product, x, name, quantized.offsets)
            return self.graph.op("Add", product, bias) if bias else product
        operands = [x, self.weight(name, weight), *([bias] if bias else [])]
        return self.graph.op("Gemm", *operands, transB=1)

    def _shifted(self, product: str, x: str, name: str, offsets: NDArray[np.float32]) -> str:
        """Add the contribution of offsets [N, K / BLOCK]: their product with x's block sums.

        A 32nd of a product in float32, where zero points within the kernel take 50 times as long.
        """
        blocks = self.reshape(x, [-1, offsets.shape[1], BLOCK])
        sums = self.graph.op("ReduceSum", blocks, self.graph.constant([2], "int64"), keepdims=0)
        weight = self.graph.weight(f"{name}.offsets", offsets)
        return self.graph.op("Gemm", sums, weight, product, transB=1)

    def _output(self, name: str, value: str, width: int) -> None:
        self.graph.output(name, "float32", ["N", width])
        if self.float == "float32":
            self.graph.op("Identity", value, name=name)
        else:
            self.graph.op("Cast", value, name=name, to=ELEMENT["float32"])


KEY_VALUE = ("key", "value")
