"""ONNX opset 17: primitives only, for ONNX Runtime ≤ 1.24 (Python 3.10) and TensorRT 8.6–10.14.

The same graph as opset24, decomposed so that TensorRT's parser takes it: the cache is written by
ScatterND with one index tensor for all layers, queries of one key head are stacked along S, and
nothing has more than four dimensions.
"""

from __future__ import annotations

from functools import cached_property

from engines.artifact import Precision
from export.config import ModelConfig
from export.dialects.dialect import ReadWeight
from export.dialects.padded import PaddedAttention
from export.errors import ExportError
from export.graph import GraphWriter
from export.quantize import Quantized


class Opset17(PaddedAttention):
    """Only operators that both runtimes have had for years."""

    name = "opset17"
    opset = 17
    precisions = ("fp32", "fp16")

    def __init__(
        self, graph: GraphWriter, config: ModelConfig, read: ReadWeight, precision: Precision
    ) -> None:
        super().__init__(graph, config, read, precision)
        op = graph.op
        self.group = config.heads // config.kv_heads
        slots = op("Shape", self.unpack, start=0, end=1)
        width = op("Shape", self.unpack, start=1, end=2)
        heads, dim, one = (
            graph.constant([value], "int64") for value in (config.heads, config.head_dim, 1)
        )
        # The shapes of queries before and after stacking the heads of one key head.
        self._unstacked = op("Concat", slots, heads, width, dim, axis=0)
        # Where each new entry goes, [B, kv_heads, S, 3]: slot, key head, cell.
        index_shape = op(
            "Concat", slots, graph.constant([config.kv_heads], "int64"), width, one, axis=0
        )
        zero, step = graph.constant(0, "int64"), graph.constant(1, "int64")
        count = [op("Squeeze", size, graph.constant([0], "int64")) for size in (slots, width)]
        slot = self.reshape(op("Range", zero, count[0], step), [-1, 1, 1, 1])
        head = graph.constant([[[[h]] for h in range(config.kv_heads)]], "int64")
        offset = self.reshape(op("Range", zero, count[1], step), [1, 1, -1, 1])
        cell = op("Add", self.reshape(self.write_indices, [-1, 1, 1, 1]), offset)
        spread = [op("Expand", part, index_shape) for part in (slot, head, cell)]
        self._cells = op("Concat", *spread, axis=-1)
        # [B, 1, group · S, C]: stacked queries see what their token sees.
        self._stacked_mask = op("Concat", *[self.mask] * self.group, axis=2)

    def rms_norm(self, x: str, name: str) -> str:
        """x / rms(x) · weight over the last axis, computed in float32."""
        op = self.graph.op
        wide = self.cast(x, "float32") if self.float == "float16" else x
        square = op("Pow", wide, self.graph.constant(2.0, "float32"))
        mean = op("ReduceMean", square, axes=[-1], keepdims=1)
        shifted = op("Add", mean, self.graph.constant(self.config.norm_eps, "float32"))
        normed = op("Div", wide, op("Sqrt", shifted))
        if self.float == "float16":
            normed = self.cast(normed, "float16")
        return op("Mul", normed, self.weight(name))

    @cached_property
    def _angles(self) -> tuple[str, str]:
        """cos and sin of the tokens at hand, [B, S, 1, head_dim // 2] each; layers share them."""
        cos, sin = self.rotary_tables()
        rows = [
            self.graph.op("Gather", self.weight(name, table), self.slot_positions, axis=0)
            for name, table in (("rotary.cos", cos), ("rotary.sin", sin))
        ]
        axis = self.graph.constant([2], "int64")
        cos_rows, sin_rows = (self.graph.op("Unsqueeze", row, axis) for row in rows)
        return cos_rows, sin_rows

    def rotate(self, x: str, heads: int) -> str:
        """Rotary embedding of [B, S, heads · head_dim]."""
        op, (cos, sin) = self.graph.op, self._angles
        half = self.config.head_dim // 2
        first, second = self.split(self.reshape(x, [0, 0, heads, 2 * half]), [half, half])
        turned_first = op("Sub", op("Mul", first, cos), op("Mul", second, sin))
        turned_second = op("Add", op("Mul", second, cos), op("Mul", first, sin))
        turned = op("Concat", turned_first, turned_second, axis=-1)
        return self.reshape(turned, [0, 0, heads * 2 * half])

    def append(self, past: str, new: str, present: str) -> None:
        """Write `new` [B, kv_heads, S, head_dim] into `past`, giving `present`."""
        self.graph.op("ScatterND", past, self._cells, new, name=present)

    def attend(self, q: str, key: str, value: str) -> str:
        """q [B, heads, S, head_dim] over the cache → [B, heads, S, head_dim]."""
        op, config = self.graph.op, self.config
        scale = self.graph.constant(config.head_dim**-0.5, self.float)
        # [B, kv_heads, group · S, head_dim]
        stacked = self.reshape(op("Mul", q, scale), [0, config.kv_heads, -1, config.head_dim])
        scores = op("MatMul", stacked, op("Transpose", key, perm=[0, 1, 3, 2]))
        seen = op("Softmax", op("Add", scores, self._stacked_mask), axis=-1)
        return op("Reshape", op("MatMul", seen, value), self._unstacked)

    def quantized_linear(self, x: str, name: str, weight: Quantized) -> str:
        """Not in this opset.

        Raises:
            ExportError: always; `precisions` keeps callers from here.
        """
        raise ExportError(f"{name}: opset17 has no blocked int{weight.bits}")
