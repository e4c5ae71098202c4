"""The inputs of attention that all dialects share: rotary tables, windows, caches and scores."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from pilotfish.engines.backends.backend import KEY_VALUE
from pilotfish.engines.passes import HIDDEN_FROM_VIEW
from pilotfish.export.dialects.operators import Operators, shared
from pilotfish.export.graph import Dim
from pilotfish.export.model_config import AttentionHeads
from pilotfish.export.parts import Rope


class AttentionInputs(Operators):
    """A writer of the inputs of attention other than q, k and v."""

    def declare_inputs(self) -> None:
        """Declare the packed tokens and their positions."""
        self.tokens = self.graph.input("input_ids", "int64", ["T"])
        self.positions = self.graph.input("position_ids", "int64", ["T"])
        self._cached: set[int] = set()  # layers whose keys and values are values of this graph

    def rotary_tables(self, rope: Rope) -> tuple[str, str]:
        """Write tables of cos and sin, [context, pairs] each, once per rotary embedding."""
        kinds = list(dict.fromkeys(layer.rope for layer in self.config.pattern))
        names = [f"rotary.{kinds.index(rope)}.{table}" for table in ("cos", "sin")]
        if not self.graph.has(names[0]):
            angles = rope.angles(self.config.context)
            for name, function in zip(names, (np.cos, np.sin), strict=True):
                self.weight(name, array=(function(angles) * rope.scale).astype(np.float32))
        return names[0], names[1]

    def query_growth(self) -> str | None:
        """Look up the factors by which the tokens' queries are multiplied, [T].

        None without factors.
        """
        if self.config.query_growth is None:
            return None
        if not self.graph.has("query_growth"):
            beta, period = self.config.query_growth
            periods = np.arange(self.config.context) // period
            self.weight("query_growth", array=(1 + beta * np.log1p(periods)).astype(np.float32))
        return self.graph.op("Gather", "query_growth", self.positions)

    def hide_beyond(self, window: int, mask: str, positions: str, cells: str) -> str:
        """Mask in `mask` [..., tokens, cells] the cells before each token's window.

        `positions` are the tokens' positions, `cells` the positions of the cells' tokens; both
        broadcast against the mask. A cell's position may differ from its index, because the nodes
        of a tree are stored one after the other.
        """
        op = self.graph.op
        oldest = op("Sub", positions, self.graph.constant(window, "int64"))
        beyond = self.graph.constant(HIDDEN_FROM_VIEW, self.float)
        return op("Where", op("Greater", cells, oldest), mask, beyond)

    @abstractmethod
    def window_mask(self, window: int | None) -> str:
        """Return the mask of a window, or of all visible tokens: […, tokens, cells]."""

    @shared
    def stacked_mask(self, window: int | None, group: int) -> str:
        """Return the mask for queries that are stacked by key head, […, group · tokens, cells]."""
        return self.graph.op("Concat", *[self.window_mask(window)] * group, axis=2)

    def cache(self, layer: int) -> tuple[str, str, str, str]:
        """Declare a layer's cache; return four names: past key and value, present key and value."""
        names = [f"{when}.{layer}.{what}" for when in ("past", "present") for what in KEY_VALUE]
        for name in names[:2]:
            self.graph.input(name, self.float, self._cache_shape(layer))
        for name in names[2:]:
            self.graph.output(name, self.float, self._cache_shape(layer))
        self._cached.add(layer)
        return names[0], names[1], names[2], names[3]

    def cache_of(self, layer: int) -> tuple[str, str]:
        """Return the keys and values of an earlier layer, including those of this pass.

        If the graph does not contain that layer, they are graph inputs (`export.reference`).
        """
        key, value = (f"present.{layer}.{what}" for what in KEY_VALUE)
        if layer not in self._cached:
            self._cached.add(layer)
            for name in (key, value):
                self.graph.input(name, self.float, self._cache_shape(layer))
        return key, value

    def _cache_shape(self, layer: int) -> list[Dim]:
        heads = self.config.heads_of(layer)
        return ["B", heads.keys, "C", heads.dim]

    def scores(self, q: str, key: str, heads: AttentionHeads) -> str:
        """Compute the capped scores q · keyᵀ · scale.

        q [B, kv_heads, group · S, dim] is stacked.
        """
        config, op = self.config, self.graph.op
        scaled = self.scale(q, config.score_scale or heads.dim**-0.5)
        scores = op("MatMul", scaled, op("Transpose", key, perm=[0, 1, 3, 2]))
        return self.cap(scores, config.score_cap)
