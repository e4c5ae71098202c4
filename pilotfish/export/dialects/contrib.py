"""The dialect contrib: operators of ONNX Runtime (com.microsoft) where they are faster.

GroupQueryAttention is one operator for rotation, appending to the cache, and attention; its cost
depends on the tokens in the cache, not on the capacity. It supports several slots only with one new
token each, so a run has one slot. A layer that reads another layer's keys and values gets attention
in primitive operators.

    seqlens_k [1] i32: tokens in the cache after this pass, minus one
    total_sequence_length [1] i32: tokens in the cache after this pass
    attention_bias [1, 1, T, total]: 0 where a token is visible, else a large negative number
    cell_positions [1, total] i64, only with windows: the position of each cell's token
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.blocks import Quantized
from pilotfish.export.dialects.compact_scales import write_scales
from pilotfish.export.dialects.dialect import MICROSOFT
from pilotfish.export.dialects.fused_experts import INT8_ACTIVATIONS, FusedExperts
from pilotfish.export.dialects.operators import shared
from pilotfish.export.dialects.quantized_weights import write_codes
from pilotfish.export.export_errors import ExportError
from pilotfish.export.graph import pack_nibbles
from pilotfish.export.model_config import AttentionHeads
from pilotfish.export.parts import Rope

HEAD_STEP = 8  # GroupQueryAttention requires head widths that are multiples of 8
PAIRS_AT_ONCE = 8  # GroupQueryAttention can rotate only multiples of 8 pairs


class Contrib(FusedExperts):
    """The dialect with GroupQueryAttention, SkipSimplifiedLayerNormalization and MatMulNBits."""

    name = "contrib"
    opset = 17
    contrib = True
    precisions = ("fp32", "int8", "int4", "stored")
    folds_offsets = True
    heads_first = False
    _sum = ""  # the last residual sum, with which the next norm is fused

    def declare_inputs(self) -> None:
        """Declare the lengths and the bias of GroupQueryAttention, too."""
        config, graph = self.config, self.graph
        if config.head_dim % HEAD_STEP and len(config.recurrent) < config.layers:
            raise ExportError(
                f"{config.name} has heads of {config.head_dim} channels, but the attention of "
                f"the dialect {self.name} needs a multiple of {HEAD_STEP}: choose --dialect "
                "opset24"
            )
        super().declare_inputs()
        self.lengths = graph.input("seqlens_k", "int32", [1])
        self.total = graph.input("total_sequence_length", "int32", [1])
        self.bias = graph.input("attention_bias", self.float, [1, 1, "T", "total"])

    def rms_norm(self, x: str, weight: str) -> str:
        """Compute x / rms(x) · weight over the last axis, fused with the preceding sum."""
        epsilon = self.config.norm_eps
        if x == self._sum:
            self._sum = ""
            summands = self.graph.pop_operator(x)
            normed = self.graph.new_names("SkipNorm", 1)[0]
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
        """Add a residual; the next norm is fused with this sum."""
        self._sum = super().add(x, y)
        return self._sum

    def gelu(self, x: str, *, tanh: bool) -> str:
        """Compute x · Φ(x), or its tanh approximation."""
        return self.graph.op("FastGelu" if tanh else "Gelu", x, domain=MICROSOFT)

    def attention(self, layer: int, qkv: str) -> str:
        """Write attention with norm, rotation and cache update; qkv [T, q + k + v] → [T, q]."""
        config, heads = self.config, self.config.heads_of(layer)
        if config.layer(layer).kv_source is not None:
            return self._read(layer, qkv)
        rope = config.layer(layer).rope
        tables = self.rotary_tables(rope) if rope and not self._rotates_before(rope) else ("", "")
        past_key, past_value, key, value = self.cache(layer)
        name = f"model.layers.{layer}.self_attn.sinks"
        sinks = [self.weight(name, heads.queries)] if config.form.sinks else []
        attended = self.graph.new_names("GroupQueryAttention", 1)[0]
        softcap = {} if config.score_cap is None else {"softcap": config.score_cap}
        self.graph.multi(
            "GroupQueryAttention",
            *self._operands(layer, qkv),
            past_key,
            past_value,
            self.lengths,
            self.total,
            *tables,
            self._slot_positions if tables[0] else "",
            self.window_mask(config.layer(layer).window),
            *sinks,
            names=[attended, key, value],
            domain=MICROSOFT,
            num_heads=heads.queries,
            kv_num_heads=heads.keys,
            do_rotary=int(bool(tables[0])),
            rotary_interleaved=int(rope is not None and rope.interleaved),
            scale=config.score_scale or heads.dim**-0.5,
            **softcap,
        )
        return self.reshape(attended, [-1, heads.queries * heads.dim])

    def _read(self, layer: int, q: str) -> str:
        """Write attention to another layer's keys and values; q [T, q] → [T, q]."""
        op, kind, heads = self.graph.op, self.config.layer(layer), self.config.heads_of(layer)
        q = self.prepare_heads(q, f"model.layers.{layer}.self_attn.q_norm", heads, kind.rope)
        by_head = op(
            "Transpose", self.reshape(q, [1, -1, heads.queries, heads.dim]), perm=[0, 2, 1, 3]
        )
        key, value = self.cache_of(kind.kv_source or 0)
        # Stack the queries of one key head, as in PaddedAttention.
        stacked = self.reshape(by_head, [1, heads.keys, -1, heads.dim])
        bias = self.stacked_mask(kind.window, heads.group)
        scores = op("Add", self.scores(stacked, key, heads), bias)
        attended = op("MatMul", op("Softmax", scores, axis=-1), value)
        by_head = self.reshape(attended, [1, heads.queries, -1, heads.dim])
        by_token = op("Transpose", by_head, perm=[0, 2, 1, 3])
        return self.reshape(by_token, [-1, heads.queries * heads.dim])

    def _operands(self, layer: int, qkv: str) -> list[str]:
        """Return q, k and v, [1, T, width] each.

        Or qkv, "", "" if they need neither norm nor rotation.
        """
        form, kind, heads = self.config.form, self.config.layer(layer), self.config.heads_of(layer)
        widths = [count * heads.dim for count in (heads.queries, *[heads.keys] * 2)]
        growth, normed = self.query_growth(), form.qk_norm in {"head", "heads"}
        rope = kind.rope
        turns = rope is not None and self._rotates_before(rope)
        if not normed and not turns and growth is None:
            return [self.reshape(qkv, [1, -1, sum(widths)]), "", ""]
        q, k, *values = self.split(qkv, widths[:2] if kind.tied_values else widths)
        v = self._prepare_values(values[0] if values else k, heads)
        module = f"model.layers.{layer}.self_attn"
        q = self.prepare_heads(q, f"{module}.q_norm", heads, rope if turns else None)
        keys = AttentionHeads(heads.keys, heads.keys, heads.dim)
        k = self.prepare_heads(k, f"{module}.k_norm", keys, rope if turns else None)
        if growth is not None:
            q = self.multiply(self.reshape(q, [-1, widths[0]]), self.reshape(growth, [-1, 1]))
        parts = zip((q, k, v), widths, strict=True)
        return [self.reshape(part, [1, -1, width]) for part, width in parts]

    def _rotates_before(self, rope: Rope) -> bool:
        """Whether to rotate q and k before the operator, due to its limits or a later norm."""
        return self.config.form.qk_norm_late or len(rope.frequencies) % PAIRS_AT_ONCE != 0

    def _prepare_values(self, v: str, heads: AttentionHeads) -> str:
        """Apply the form's norm, if any, to each head of v [T, kv_heads · head_dim]."""
        if not self.config.form.value_norm:
            return v
        return self.norm_values(self.reshape(v, [-1, heads.keys, heads.dim]), heads)

    def norm_heads(self, x: str, name: str, heads: AttentionHeads) -> str:
        """Apply the norm of module `name` to each head of x [T, heads · head_dim]."""
        return super().norm_heads(self.reshape(x, [-1, heads.queries, heads.dim]), name, heads)

    def rotate(self, x: str, rope: Rope, heads: AttentionHeads) -> str:
        """Apply the rotary embedding to [T, heads · head_dim], or to [T, heads, head_dim]."""
        return self.graph.op(
            "RotaryEmbedding",
            self.reshape(x, [1, -1, heads.queries * heads.dim]),
            self._slot_positions,
            *self.rotary_tables(rope),
            domain=MICROSOFT,
            num_heads=heads.queries,
            rotary_embedding_dim=2 * len(rope.frequencies),
            interleaved=int(rope.interleaved),
        )

    @shared
    def window_mask(self, window: int | None) -> str:
        """Return the scores' bias for a window, [1, 1, T, total]."""
        if window is None:
            return self.bias
        positions = self.reshape(self.positions, [-1, 1])
        return self.hide_beyond(window, self.bias, positions, self._cell_positions)

    @cached_property
    def _cell_positions(self) -> str:
        return self.graph.input("cell_positions", "int64", [1, "total"])

    @cached_property
    def _slot_positions(self) -> str:
        """Return the positions of the tokens, [1, T]."""
        return self.unsqueeze(self.positions, 0)

    def block_scales(self, name: str, scales: NDArray[np.float32]) -> str:
        """Write scales f32 [N, K / block] unless they are written already, in a small form."""
        return write_scales(self.graph, name, scales)

    def quantized_linear(self, x: str, name: str, weight: Quantized) -> str:
        """Multiply x [T, K] by the transposed weight [N, K]."""
        rows, width = weight.codes.shape
        zeros = []
        if weight.zeros is not None:  # rows of 4-bit zero points must fill whole bytes
            padded = np.pad(weight.zeros, ((0, 0), (0, weight.zeros.shape[1] % 2)))
            packed = pack_nibbles(padded).reshape(rows, -1) if weight.bits == 4 else weight.zeros
            zeros = [self.graph.weight(f"{name}.zeros", packed)]
        return self.graph.op(
            "MatMulNBits",
            x,
            write_codes(self.graph, name, weight),
            self.block_scales(f"{name}.scales", weight.scales),
            *zeros,
            domain=MICROSOFT,
            K=width,
            N=rows,
            bits=weight.bits,
            block_size=weight.block,
            accuracy_level=INT8_ACTIVATIONS,
        )
