"""ONNX Runtime's own operators (com.microsoft), where they are faster: one slot per pass.

GroupQueryAttention rotates, appends and attends at once, and its cost follows the tokens in the
cache, not the capacity. It takes several slots only if each has one new token, so passes are not
batched.

    seqlens_k [1] i32: tokens in the cache after this pass, minus one
    total_sequence_length [1] i32: that number itself
    attention_bias [1, 1, T, total]: 0 where a token is visible, else a large negative number
"""

from __future__ import annotations

from functools import cached_property

from pilotfish.engines.artifact import Precision
from pilotfish.export.config import ModelConfig
from pilotfish.export.dialects.dialect import Dialect, ReadWeight
from pilotfish.export.graph import GraphWriter, pack_nibbles
from pilotfish.export.quantize import BLOCK, Quantized

MICROSOFT = "com.microsoft"
INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level: products in int8, sums in float32


class Contrib(Dialect):
    """GroupQueryAttention, SkipSimplifiedLayerNormalization, MatMulNBits."""

    name = "contrib"
    opset = 17
    contrib = True
    precisions = ("fp32", "int8", "int4")

    def __init__(
        self, graph: GraphWriter, config: ModelConfig, read: ReadWeight, precision: Precision
    ) -> None:
        super().__init__(graph, config, read, precision)
        self._sum = ""
        self.lengths = graph.input("seqlens_k", "int32", [1])
        self.total = graph.input("total_sequence_length", "int32", [1])
        self.bias = graph.input("attention_bias", self.float, [1, 1, "T", "total"])

    def rms_norm(self, x: str, name: str) -> str:
        """Compute x / rms(x) · weight over the last axis, fused with the sum before it."""
        epsilon = self.config.norm_eps
        weight = self.weight(name)
        if x == self._sum:
            summands = self.graph.take_back(x)
            normed = self.graph.fresh("SkipNorm", 1)[0]
            self.graph.multi(
                "SkipSimplifiedLayerNormalization",
                *summands,
                weight,
                names=[normed, "", "", x],
                domain=MICROSOFT,
                epsilon=epsilon,
            )
            return normed
        return self.graph.op("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=epsilon)

    def add(self, x: str, y: str) -> str:
        """Add a residual; the next norm takes the sum in."""
        self._sum = super().add(x, y)
        return self._sum

    @cached_property
    def _rotary(self) -> list[str]:
        """Tables of cos and sin; empty where positions are learned."""
        if self.config.rope_theta is None:
            return []
        cos, sin = self.rotary_tables()
        return [self.weight("rotary.cos", cos), self.weight("rotary.sin", sin)]

    def attention(
        self, layer: int, qkv: str, *, q_norm: str | None = None, k_norm: str | None = None
    ) -> str:
        """Rotate q and k, append k and v to the cache, attend; [T, q + k + v] → [T, q]."""
        config = self.config
        widths = [heads * config.head_dim for heads in (config.heads, *[config.kv_heads] * 2)]
        if q_norm and k_norm:
            q, k, v = self.split(qkv, widths)
            operands = [
                self.reshape(self._norm_heads(q, q_norm), [1, -1, widths[0]]),
                self.reshape(self._norm_heads(k, k_norm), [1, -1, widths[1]]),
                self.reshape(v, [1, -1, widths[2]]),
            ]
        else:
            operands = [self.reshape(qkv, [1, -1, sum(widths)]), "", ""]
        past_key, past_value, key, value = self.cache(layer)
        attended = self.graph.fresh("GroupQueryAttention", 1)[0]
        self.graph.multi(
            "GroupQueryAttention",
            *operands,
            past_key,
            past_value,
            self.lengths,
            self.total,
            *(self._rotary or ["", ""]),
            self._slot_positions if self._rotary else "",
            self.bias,
            names=[attended, key, value],
            domain=MICROSOFT,
            num_heads=config.heads,
            kv_num_heads=config.kv_heads,
            do_rotary=int(bool(self._rotary)),
            scale=config.head_dim**-0.5,
        )
        return self.reshape(attended, [-1, widths[0]])

    @cached_property
    def _slot_positions(self) -> str:
        """[1, T]"""
        return self.graph.op("Unsqueeze", self.positions, self.graph.constant([0], "int64"))

    def quantized_linear(self, x: str, name: str, weight: Quantized) -> str:
        """Multiply x [T, K] by the transposed weight [N, K]."""
        rows, width = weight.codes.shape
        codes = weight.codes.reshape(rows, width // BLOCK, BLOCK)
        if weight.bits == 4:
            codes = pack_nibbles(codes).reshape(rows, width // BLOCK, BLOCK // 2)
        return self.graph.op(
            "MatMulNBits",
            x,
            self.graph.weight(f"{name}.codes", codes),
            self.graph.weight(f"{name}.scales", weight.scales),
            domain=MICROSOFT,
            K=width,
            N=rows,
            bits=weight.bits,
            block_size=BLOCK,
            accuracy_level=INT8_ACTIVATIONS,
        )

    def _norm_heads(self, x: str, name: str) -> str:
        """Apply an RMS norm to each head; [T, heads · head_dim] → [T, heads, head_dim]."""
        return self.rms_norm(self.reshape(x, [0, -1, self.config.head_dim]), name)
