"""ONNX opset 17: primitive operators for ONNX Runtime ≤ 1.24 (Python 3.10) and TensorRT 8.6–10.14.

The graph computes the same as a graph of opset24, with operators that TensorRT's parser knows.
ScatterND writes the cache; layers with equal numbers of key heads share an index tensor. No value
has more than four dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pilotfish.export.blocks import Quantized
from pilotfish.export.dialects.operators import shared
from pilotfish.export.dialects.padded import PaddedAttention
from pilotfish.export.dialects.pairs import update_state_by_pairs
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model_config import AttentionHeads
from pilotfish.export.parts import Rope


class Opset17(PaddedAttention):
    """The dialect of primitive operators, which old versions of both runtimes support."""

    name = "opset17"
    opset = 17
    precisions = ("fp32", "fp16")

    def declare_inputs(self) -> None:
        """Compute the cells to write, too."""
        super().declare_inputs()
        self._cache_indices(self.config.kv_heads)

    @shared
    def _cache_indices(self, kv_heads: int) -> str:
        """Return the index of each new cell, [B, kv_heads, S, 3]: slot, key head, cell."""
        graph, op, axis = self.graph, self.graph.op, self.graph.constant([1], "int64")
        slots = op("Shape", self.unpack, start=0, end=1)
        size = op("Shape", self.unpack, start=1, end=2)
        heads = graph.constant([kv_heads], "int64")
        index_shape = op("Concat", slots, heads, size, axis, axis=0)
        slot = self.reshape(self._count(slots), [-1, 1, 1, 1])
        head = graph.constant([[[[h]] for h in range(kv_heads)]], "int64")
        offset = self.reshape(self._count(size), [1, 1, -1, 1])
        cell = op("Add", self.reshape(self.write_indices, [-1, 1, 1, 1]), offset)
        spread = [op("Expand", part, index_shape) for part in (slot, head, cell)]
        return op("Concat", *spread, axis=-1)

    def _count(self, size: str) -> str:
        """Return 0, 1, …, size − 1; `size` is [1]."""
        zero, step = self.graph.constant(0, "int64"), self.graph.constant(1, "int64")
        end = self.graph.op("Squeeze", size, self.graph.constant([0], "int64"))
        return self.graph.op("Range", zero, end, step)

    def rms_norm(self, x: str, weight: str) -> str:
        """Compute x / rms(x) · weight over the last axis, in float32."""
        op = self.graph.op
        wide = self.to_float32(x)
        square = op("Pow", wide, self.graph.constant(2.0, "float32"))
        mean = op("ReduceMean", square, axes=[-1], keepdims=1)
        shifted = op("Add", mean, self.graph.constant(self.config.norm_eps, "float32"))
        normed = self.from_float32(op("Div", wide, op("Sqrt", shifted)))
        return op("Mul", normed, weight)

    def gelu(self, x: str, *, tanh: bool) -> str:
        """Compute x · Φ(x), or its tanh approximation."""
        op = self.graph.op
        if tanh:
            cube = self.scale(self.multiply(self.multiply(x, x), x), 0.044715)
            bent = op("Tanh", self.scale(self.add(x, cube), (2 / np.pi) ** 0.5))
        else:
            bent = op("Erf", self.scale(x, 0.5**0.5))
        ones = self.graph.constant(1.0, self.float)
        return self.multiply(self.scale(x, 0.5), op("Add", bent, ones))

    @shared
    def _angles(self, rope: Rope) -> tuple[str, str]:
        """Return cos and sin of the tokens' angles, [B, 1, S, pairs] each."""
        cos, sin = (
            self.unsqueeze(self.graph.op("Gather", table, self.slot_positions, axis=0), 1)
            for table in self.rotary_tables(rope)
        )
        return cos, sin

    def rotate(self, x: str, rope: Rope, heads: AttentionHeads) -> str:
        """Apply the rotary embedding to [B, heads, S, head_dim]."""
        pairs, rest = len(rope.frequencies), heads.dim - 2 * len(rope.frequencies)
        sizes = [2 * pairs, rest] if rest else [2 * pairs]
        turning, *rest_channels = self.split(x, sizes) if rest else [x]
        return self.concat(*self._rotate_pairs(turning, rope), *rest_channels)

    def _rotate_pairs(self, x: str, rope: Rope) -> list[str]:
        """Rotate x [B, heads, S, 2 · pairs]; return the parts of the result, to be concatenated."""
        op, (cos, sin) = self.graph.op, self._angles(rope)
        pairs = len(rope.frequencies)
        if rope.interleaved:  # gather even and odd channels
            first, second = (
                op("Gather", x, self.graph.constant(range(start, 2 * pairs, 2), "int64"), axis=-1)
                for start in (0, 1)
            )
        else:
            first, second = self.split(x, [pairs, pairs])
        turned_first = op("Sub", op("Mul", first, cos), op("Mul", second, sin))
        turned_second = op("Add", op("Mul", second, cos), op("Mul", first, sin))
        if not rope.interleaved:
            return [turned_first, turned_second]
        both = self.concat(turned_first, turned_second)
        order = [index for pair in range(pairs) for index in (pair, pairs + pair)]
        return [op("Gather", both, self.graph.constant(order, "int64"), axis=-1)]

    def append(self, past: str, new: str, present: str, kv_heads: int) -> None:
        """Write `new` [B, kv_heads, S, head_dim] into `past`; the result is `present`."""
        self.graph.op("ScatterND", past, self._cache_indices(kv_heads), new, name=present)

    def update_state(self, rows: Sequence[str], missing: str, states: Sequence[str]) -> str:
        """Write the update of a state space as products over all pairs of tokens.

        Raises:
            ExportError: if the layer has the delta rule or a selective state space, which need
            loops.
        """
        dims = self.config.recurrence
        assert dims is not None
        if dims.space is not None and dims.space.rank is None:
            return update_state_by_pairs(self, dims, rows, missing, states)
        kind = "linear attention" if dims.space is None else "selective state space"
        raise ExportError(
            f"the dialect opset17 cannot express a {kind}: choose --dialect opset24 or "
            "contrib, and run it with ONNX Runtime 1.31"
        )

    def quantized_linear(self, x: str, name: str, weight: Quantized) -> str:
        """Raise an error, because this opset has no operators for quantised weights.

        Raises:
            ExportError: always; `precisions` prevents the call.
        """
        raise ExportError(f"{name}: the dialect opset17 cannot express int{weight.bits} blocks")
