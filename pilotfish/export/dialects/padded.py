"""Attention over slots of different lengths, for the standard dialects.

Packed tokens [T] are gathered to [B, S]: `unpack` [b, s] is the index of the token at offset s of
slot b; for padding it is the index of any token. Each slot writes S cells to the cache at
write_indices[b], the mask defines which cells a token sees, and `pack` [T] selects the tokens'
outputs from the B · S outputs. The cells of padding are after the slot's end. They are never read,
and the next pass overwrites them. Attention is written in primitive operators. The queries that
share a key head are stacked, so that keys are read once; at 1,500 tokens this is a third faster on
the CPU than opset 24's operator.

    unpack [B, S] i64    pack [T] i64    write_indices [B] i64
    attention_mask [B, 1, S, C]: 0 where a token is visible, else a large negative number
    cell_positions [B, C] i64, only with windows: the position of each cell's token
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property

from pilotfish.export.dialects.grouped_experts import GroupedExperts
from pilotfish.export.dialects.operators import shared
from pilotfish.export.model_config import AttentionHeads


class PaddedAttention(GroupedExperts):
    """The base of dialects with several slots per run."""

    def declare_inputs(self) -> None:
        """Declare the layout of the slots, too."""
        super().declare_inputs()
        graph = self.graph
        self.unpack = graph.input("unpack", "int64", ["B", "S"])
        self.pack = graph.input("pack", "int64", ["T"])
        self.write_indices = graph.input("write_indices", "int64", ["B"])
        self.mask = graph.input("attention_mask", self.float, ["B", 1, "S", "C"])
        # Positions of the unpacked tokens, [B, S].
        self.slot_positions = graph.op("Gather", self.positions, self.unpack, axis=0)

    @abstractmethod
    def append(self, past: str, new: str, present: str, kv_heads: int) -> None:
        """Write `new` [B, kv_heads, S, head_dim] into `past`; the result is `present`."""

    def attention(self, layer: int, qkv: str) -> str:
        """Write attention with norm, rotation and cache update; qkv [T, q + k + v] → [T, q]."""
        op, heads = self.graph.op, self.config.heads_of(layer)
        rows = self.reshape(qkv, [-1, heads.dim])  # [T · heads of q, k and v, head_dim]
        source = self.config.layer(layer).kv_source
        if source is None:
            q, key, value = self._append(rows, layer)
        else:
            q = op("Gather", rows, self._rows_of(0, heads.queries, heads.queries), axis=0)
            norm = f"model.layers.{layer}.self_attn.q_norm"
            q = self.prepare_heads(q, norm, heads, self.config.layer(layer).rope)
            key, value = self.cache_of(source)
        # Stack the queries that share a key head, so that keys are read once.
        stacked = self.reshape(q, [0, heads.keys, -1, heads.dim])
        attended = self._attend(stacked, key, value, layer)
        answers = op("Gather", self.reshape(attended, [-1, heads.dim]), self._answer_rows, axis=0)
        return self.reshape(answers, [-1, heads.queries * heads.dim])  # from [T, heads, head_dim]

    def _append(self, rows: str, layer: int) -> tuple[str, str, str]:
        """Append a layer's keys and values to its cache.

        Return q, and the cache's keys and values.
        """
        op, heads = self.graph.op, self.config.heads_of(layer)
        first = heads.queries + heads.keys  # number of a token's rows before its values
        tied = self.config.layer(layer).tied_values
        total = first if tied else first + heads.keys
        qk = op("Gather", rows, self._rows_of(0, first, total), axis=0)
        value_rows = self._rows_of(heads.queries if tied else first, heads.keys, total)
        v = op("Gather", rows, value_rows, axis=0)  # [B, kv_heads, S, head_dim]
        q, k = self._prepare(qk, layer)
        past_key, past_value, key, value = self.cache(layer)
        v = self.norm_values(v, heads)
        self.append(past_key, k, key, heads.keys)
        self.append(past_value, v, value, heads.keys)
        return q, key, value

    def _prepare(self, qk: str, layer: int) -> tuple[str, str]:
        """Apply norm and rotation to q and k, joined in [B, heads + kv_heads, S, head_dim].

        Split them.
        """
        config, heads = self.config, self.config.heads_of(layer)
        rope, sizes = config.layer(layer).rope, [heads.queries, heads.keys]
        if config.form.qk_norm in {None, "all"}:
            q, k = self.split(qk if rope is None else self.rotate(qk, rope, heads), sizes, axis=1)
        else:
            q, k = (
                self.prepare_heads(
                    x,
                    f"model.layers.{layer}.self_attn.{name}_norm",
                    AttentionHeads(count, count, heads.dim),
                    rope,
                )
                for name, x, count in zip("qk", self.split(qk, sizes, axis=1), sizes, strict=True)
            )
        return (self.multiply(q, self._query_factors) if config.query_growth else q), k

    @cached_property
    def _cell_positions(self) -> str:
        """Declare the input with the position of each cell's token; return it as [B, 1, 1, C]."""
        cells = self.graph.input("cell_positions", "int64", ["B", "C"])
        return self.unsqueeze(cells, 1, 2)

    @cached_property
    def _query_factors(self) -> str:
        """Return the factor by which each token's queries are multiplied, [B, 1, S, 1]."""
        factors = self.graph.op("Gather", str(self.query_growth()), self.unpack)
        return self.unsqueeze(factors, 1, 3)

    def _attend(self, q: str, key: str, value: str, layer: int) -> str:
        """Compute softmax(q · keyᵀ · scale + mask) · value; q [B, kv_heads, group · S, …]."""
        config, op, heads = self.config, self.graph.op, self.config.heads_of(layer)
        scores = self.scores(q, key, heads)
        scores = op("Add", scores, self.stacked_mask(config.layer(layer).window, heads.group))
        if not config.form.sinks:
            return op("MatMul", op("Softmax", scores, axis=-1), value)
        weights = op("Softmax", self.concat(scores, self._sinks(layer)), axis=-1)
        bounds = (self.graph.constant([each], "int64") for each in (0, -1, -1))
        return op("MatMul", op("Slice", weights, *bounds), value)

    def _sinks(self, layer: int) -> str:
        """Return the learned sink scores of the stacked queries, [B, kv_heads, group · S, 1]."""
        heads, name = self.config.heads_of(layer), f"model.layers.{layer}.self_attn.sinks"
        shape = [1, heads.keys, heads.group, 1]
        sinks = self.weight(name, array=self.read(name, heads.queries).reshape(shape))
        return self.reshape(
            self.graph.op("Expand", sinks, self._sink_shape(heads.keys, heads.group)),
            [0, heads.keys, -1, 1],
        )

    @shared
    def _sink_shape(self, keys: int, group: int) -> str:
        """Return the shape [B, kv_heads, group, S]."""
        slots, size = (self.graph.op("Shape", self.unpack, start=i, end=i + 1) for i in (0, 1))
        return self.graph.op(
            "Concat", slots, self.graph.constant([keys, group], "int64"), size, axis=0
        )

    @shared
    def window_mask(self, window: int | None) -> str:
        """Return the mask of a window, [B, 1, S, C]."""
        if window is None:
            return self.mask
        positions = self.unsqueeze(self.slot_positions, 1, 3)
        return self.hide_beyond(window, self.mask, positions, self._cell_positions)

    @shared
    def _rows_of(self, first: int, count: int, total: int) -> str:
        """Return the indices of rows first … first + count − 1 of each token, [B, count, S].

        The rows are those of [T · total, head_dim].
        """
        graph = self.graph
        tokens = graph.op("Mul", self.unpack, graph.constant(total, "int64"))
        tokens = self.unsqueeze(tokens, 1)  # [B, 1, S]
        return graph.op("Add", tokens, graph.constant([[first + i] for i in range(count)], "int64"))

    @cached_property
    def _answer_rows(self) -> str:
        """Return the index of each output row in [B · heads · S], as [T, heads], from `pack`."""
        graph, op = self.graph, self.graph.op
        size = op("Shape", self.unpack, start=1, end=2)
        slot = op("Div", self.pack, size)
        ahead = op("Mul", op("Mul", slot, size), graph.constant(self.config.heads - 1, "int64"))
        first = self.reshape(op("Add", self.pack, ahead), [-1, 1])  # [T, 1]
        head = op("Mul", graph.constant(range(self.config.heads), "int64"), size)
        return op("Add", first, head)
