"""Mixtures of experts in standard operators: each expert computes the rows of its tokens.

All T · chosen pairs of a token and an expert are sorted by expert, then split by expert. An expert
without tokens gets no rows, and a product without rows reads no weights, so a pass costs only the
experts that it uses. Computing all experts, or gathering the chosen experts' weights, takes three
times as long for one token with 8 experts, and even longer for more tokens (docs/engines.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pilotfish.export.dialects.dialect import Dialect
from pilotfish.export.parts import Experts


class _Routing(NamedTuple):
    """The names of values that assign P = T · chosen pairs (token, expert) to experts.

    Attributes:
        weights: weight of each of a token's experts, [T, chosen].
        order: [P], indices of the pairs, sorted by expert.
        sizes: [experts], number of pairs of each expert.
    """

    weights: str
    order: str
    sizes: str


class GroupedExperts(Dialect):
    """The base of a dialect that computes experts with standard operators."""

    def experts(self, x: str, scores: str, module: str) -> str:
        """Write the weighted sum of the chosen experts' outputs; x [T, hidden] → [T, hidden]."""
        op, experts = self.graph.op, self.config.experts
        if experts is None:
            raise ValueError(f"{module} has no experts")
        routing = self._route(scores, experts, module)
        tokens = op("Div", routing.order, self.graph.constant(experts.chosen, "int64"))
        rows = op("Gather", x, tokens, axis=0)  # [P, hidden]
        hidden, width = self.config.hidden, experts.width
        gate_up = self._project_by_expert(
            rows, hidden, routing.sizes, module, {"gate_proj": width, "up_proj": width}
        )
        gate, up = self.split(gate_up, [width] * 2)
        inner = self._gate(gate, up, experts, module)  # [P, width]
        outputs = self._project_by_expert(
            inner, width, routing.sizes, module, {"down_proj": hidden}
        )
        back = op("Gather", outputs, self._ranks(routing.order), axis=0)
        by_token = self.reshape(back, [-1, experts.chosen, hidden])
        weights = op("Unsqueeze", routing.weights, self.graph.constant([2], "int64"))
        weighted = self.multiply(by_token, weights)
        return op("ReduceSum", weighted, self.graph.constant([1], "int64"), keepdims=0)

    def _route(self, scores: str, experts: Experts, module: str) -> _Routing:
        """Choose the experts of each token by scores [T, experts]."""
        op, multi, constant = self.graph.op, self.graph.multi, self.graph.constant
        if self.float != "float32":
            scores = self.cast(scores, "float32")
        if not experts.normed:
            scores = op("Softmax", scores, axis=-1)
        names = self.graph.new_names("TopK", 2)
        best, chosen = multi("TopK", scores, constant([experts.chosen], "int64"), names=names)
        weights = op("Softmax", best, axis=-1) if experts.normed else best
        pairs = self.reshape(chosen, [-1])
        column = op("Unsqueeze", pairs, constant([1], "int64"))
        marks = op("Equal", column, constant([list(range(experts.count))], "int64"))
        sizes = op("ReduceSum", self.cast(marks, "int64"), constant([0], "int64"), keepdims=0)
        if self.float != "float32":
            weights = self.cast(weights, self.float)
        if experts.parallel_mlp:
            scale = self.weight(f"{module}.router_scale", experts.count)
            weights = self.multiply(weights, op("Gather", scale, chosen))
        return _Routing(weights, self._ranks(pairs), sizes)

    def _ranks(self, values: str) -> str:
        """Return the indices that sort `values` [P]; for a permutation this is its inverse."""
        names = self.graph.new_names("Order", 2)
        size = self.graph.op("Shape", values)
        return self.graph.multi("TopK", values, size, names=names, axis=0, largest=0)[1]

    def _project_by_expert(
        self, rows: str, width: int, sizes: str, module: str, parts: Mapping[str, int]
    ) -> str:
        """Multiply each expert's part of `rows` [P, width] by that expert's modules `parts`."""
        assert self.config.experts is not None
        names = self.graph.new_names("Rows", self.config.experts.count)
        rows_by_expert = self.graph.multi("Split", rows, sizes, names=names, axis=0)
        outputs = []
        for j, expert_rows in enumerate(rows_by_expert):
            modules = {f"{module}.experts.{j}.{part}": size for part, size in parts.items()}
            outputs.append(self.linear(expert_rows, width, modules))
        return self.graph.op("Concat", *outputs, axis=0)

    def _gate(self, gate: str, up: str, experts: Experts, module: str) -> str:
        """Compute activation(gate) · up, or gpt-oss's clamped variant."""
        op, constant = self.graph.op, self.graph.constant
        if experts.limit is not None:
            most, least = (constant(sign * experts.limit, self.float) for sign in (1, -1))
            gate, up = op("Min", gate, most), op("Clip", up, least, most)
        if experts.steepness == 1.0:
            active = self.activation(gate, module)
        else:
            active = self.multiply(gate, self.sigmoid(self.scale(gate, experts.steepness)))
        if experts.lift:
            up = op("Add", up, constant(experts.lift, self.float))
        return self.multiply(active, up)
