"""ONNX opset 24: fused standard operators, for ONNX Runtime ≥ 1.25 and TensorRT ≥ 10.15."""

from __future__ import annotations

from typing import ClassVar

from pilotfish.engines.manifest import Dialect as DialectName
from pilotfish.export.blocks import Quantized
from pilotfish.export.dialects.padded import PaddedAttention
from pilotfish.export.model_config import AttentionHeads
from pilotfish.export.parts import Rope


class Opset24(PaddedAttention):
    """The dialect with RMSNormalization, RotaryEmbedding, TensorScatter, blocked DequantizeLinear.

    It does not use the operator Attention, for the reason in `export.dialects.padded`.
    """

    name: ClassVar[DialectName] = "opset24"
    opset = 24
    precisions = ("fp32", "fp16", "int8", "int4", "stored")

    def rms_norm(self, x: str, weight: str) -> str:
        """Compute x / rms(x) · weight over the last axis, in float32."""
        return self.graph.op("RMSNormalization", x, weight, axis=-1, epsilon=self.config.norm_eps)

    def gelu(self, x: str, *, tanh: bool) -> str:
        """Compute x · Φ(x), or its tanh approximation."""
        return self.graph.op("Gelu", x, approximate="tanh" if tanh else "none")

    def rotate(self, x: str, rope: Rope, heads: AttentionHeads) -> str:
        """Apply the rotary embedding to [B, heads, S, head_dim]."""
        turning = 2 * len(rope.frequencies)
        return self.graph.op(
            "RotaryEmbedding",
            x,
            *self.rotary_tables(rope),
            self.slot_positions,
            interleaved=int(rope.interleaved),
            rotary_embedding_dim=0 if turning == heads.dim else turning,
        )

    def append(self, past: str, new: str, present: str, kv_heads: int) -> None:
        """Write `new` [B, kv_heads, S, head_dim] into `past`; the result is `present`."""
        self.graph.op("TensorScatter", past, new, self.write_indices, name=present, axis=2)

    def quantized_linear(self, x: str, name: str, weight: Quantized) -> str:
        """Multiply x by a blocked DequantizeLinear, which runtimes fuse with the product.

        The product is written as Gemm: ONNX Runtime would fuse a MatMul with the next sum instead.
        """
        dtype, operands = f"int{weight.bits}", []
        signed = weight.codes.T ^ weight.zero_point  # two's complement, in u8
        operands.append(self.graph.weight(f"{name}.columns", signed, dtype))
        operands.append(self.graph.weight(f"{name}.column_scales", weight.scales.T))
        if weight.zeros is not None:
            zeros = weight.zeros.T ^ weight.zero_point
            operands.append(self.graph.weight(f"{name}.column_zeros", zeros, dtype))
        dequantized = self.graph.op("DequantizeLinear", *operands, axis=0, block_size=weight.block)
        return self.graph.op("Gemm", x, dequantized)
