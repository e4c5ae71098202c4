"""ONNX opset 24: fused standard operators, for ONNX Runtime ≥ 1.25 and TensorRT ≥ 10.15."""

from __future__ import annotations

from functools import cached_property

from pilotfish.export.dialects.padded import PaddedAttention
from pilotfish.export.quantize import BLOCK, Quantized


class Opset24(PaddedAttention):
    """RMSNormalization, RotaryEmbedding, TensorScatter, blocked DequantizeLinear.

    Not Attention: see PaddedAttention.
    """

    name = "opset24"
    opset = 24
    precisions = ("fp32", "fp16", "int8", "int4")

    def rms_norm(self, x: str, name: str) -> str:
        """Compute x / rms(x) · weight over the last axis, in float32."""
        return self.graph.op(
            "RMSNormalization", x, self.weight(name), axis=-1, epsilon=self.config.norm_eps
        )

    @cached_property
    def _tables(self) -> tuple[str, str]:
        cos, sin = self.rotary_tables()
        return self.weight("rotary.cos", cos), self.weight("rotary.sin", sin)

    def rotate(self, x: str) -> str:
        """Apply the rotary embedding to [B, heads, S, head_dim]."""
        return self.graph.op("RotaryEmbedding", x, *self._tables, self.slot_positions)

    def append(self, past: str, new: str, present: str) -> None:
        """Write `new` [B, kv_heads, S, head_dim] into `past`; return `present`."""
        self.graph.op("TensorScatter", past, new, self.write_indices, name=present, axis=2)

    def quantized_linear(self, x: str, name: str, weight: Quantized) -> str:
        """Multiply by a blocked DequantizeLinear, which runtimes fuse into one kernel.

        Uses Gemm: ONNX Runtime would first fuse MatMul with the residual sum after it.
        """
        signed = weight.codes.T ^ weight.zero_point  # two's complement, in u8
        dequantized = self.graph.op(
            "DequantizeLinear",
            self.graph.weight(f"{name}.codes", signed, f"int{weight.bits}"),
            self.graph.weight(f"{name}.scales", weight.scales.T),
            axis=0,
            block_size=BLOCK,
        )
        return self.graph.op("Gemm", x, dequantized)
