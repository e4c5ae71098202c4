"""Attention over slots of different lengths, as the standard dialects share it.

Packed tokens [T] are laid out as [B, S] (`unpack`: which token stands at slot b, offset s; what is
padding repeats some token), each slot appends its S entries to its cache at write_indices[b], the
mask says who sees whom, and `pack` [T] picks the answers out of the B·S cells. Padding writes
behind a slot's end, where nobody looks and the next pass writes again.

    unpack [B, S] i64    pack [T] i64    write_indices [B] i64
    attention_mask [B, 1, S, C]: 0 where a token is seen, else a large negative number
"""

from __future__ import annotations

from abc import abstractmethod

from engines.artifact import Precision
from export.config import ModelConfig
from export.dialects.dialect import Dialect, ReadWeight
from export.graph import GraphWriter


class PaddedAttention(Dialect):
    """A dialect whose passes may hold several slots."""

    def __init__(
        self, graph: GraphWriter, config: ModelConfig, read: ReadWeight, precision: Precision
    ) -> None:
        super().__init__(graph, config, read, precision)
        self.unpack = graph.input("unpack", "int64", ["B", "S"])
        self.pack = graph.input("pack", "int64", ["T"])
        self.write_indices = graph.input("write_indices", "int64", ["B"])
        self.mask = graph.input("attention_mask", self.float, ["B", 1, "S", "C"])
        # [B, S]
        self.slot_positions = graph.op("Gather", self.positions, self.unpack, axis=0)

    @abstractmethod
    def rotate(self, x: str, heads: int) -> str:
        """Rotary embedding of [B, S, heads · head_dim]."""

    @abstractmethod
    def append(self, past: str, new: str, present: str) -> None:
        """Write `new` [B, kv_heads, S, head_dim] into `past`, giving `present`."""

    @abstractmethod
    def attend(self, q: str, key: str, value: str) -> str:
        """q [B, heads, S, head_dim] over the cache → [B, heads, S, head_dim]."""

    def attention(
        self, layer: int, qkv: str, *, q_norm: str | None = None, k_norm: str | None = None
    ) -> str:
        """Rotate q and k, append k and v to the cache, attend; [T, q + k + v] → [T, q]."""
        config = self.config
        widths = [heads * config.head_dim for heads in (config.heads, *[config.kv_heads] * 2)]
        laid_out = self.graph.op("Gather", qkv, self.unpack, axis=0)  # [B, S, q + k + v]
        if q_norm and k_norm:
            q, k, v = self.split(laid_out, widths)
            q = self.rotate(self._norm_heads(q, config.heads, q_norm), config.heads)
            k = self.rotate(self._norm_heads(k, config.kv_heads, k_norm), config.kv_heads)
        elif config.rope_theta is not None:  # q and k turn alike: one operator for both
            qk, v = self.split(laid_out, [widths[0] + widths[1], widths[2]])
            q, k = self.split(self.rotate(qk, config.heads + config.kv_heads), widths[:2])
        else:
            q, k, v = self.split(laid_out, widths)
        past_key, past_value, key, value = self.cache(layer)
        self.append(past_key, self._heads_first(k, config.kv_heads), key)
        self.append(past_value, self._heads_first(v, config.kv_heads), value)
        attended = self.attend(self._heads_first(q, config.heads), key, value)
        rows = self.graph.op("Transpose", attended, perm=[0, 2, 1, 3])  # [B, S, heads, head_dim]
        return self.graph.op("Gather", self.reshape(rows, [-1, widths[0]]), self.pack, axis=0)

    def _heads_first(self, x: str, heads: int) -> str:
        """[B, S, heads · head_dim] → [B, heads, S, head_dim]."""
        split = self.reshape(x, [0, 0, heads, self.config.head_dim])
        return self.graph.op("Transpose", split, perm=[0, 2, 1, 3])

    def _norm_heads(self, x: str, heads: int, name: str) -> str:
        """RMS norm of each head of [B, S, heads · head_dim]."""
        split = self.reshape(x, [0, 0, heads, self.config.head_dim])
        return self.reshape(self.rms_norm(split, name), [0, 0, heads * self.config.head_dim])
