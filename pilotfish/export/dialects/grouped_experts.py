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


class ChosenExperts(NamedTuple):
    """The names of the weights f32 and the numbers i64 of each token's experts, [T, chosen]."""

    weights: str
    numbers: str


class GroupedExperts(Dialect):
    """The base of a dialect that computes experts with standard operators."""

    def experts(self, x: str, scores: str, module: str) -> str:
        """Write the weighted sum of the chosen experts' outputs; x [T, hidden] → [T, hidden]."""
        op, constant, experts = self.graph.op, self.graph.constant, self.config.experts
        if experts is None:
            raise ValueError(f"{module} has no experts")
        weights, chosen = self.choose_experts(scores, experts, module)
        # The P = T · chosen pairs of a token and an expert are sorted by expert.
        pairs = self.reshape(chosen, [-1])
        order, sizes = self._ranks(pairs), self._sizes(pairs, experts)
        tokens = op("Div", order, constant(experts.chosen, "int64"))
        rows = op("Gather", x, tokens, axis=0)  # [P, hidden]
        outer, width = experts.latent or self.config.hidden, experts.width
        parts = (
            {"gate_proj": width, "up_proj": width} if self.config.form.gated else {"up_proj": width}
        )
        inner = self._project_by_expert(rows, outer, sizes, module, parts)
        inner = self._activate(inner, experts, module)  # [P, width]
        outputs = self._project_by_expert(inner, width, sizes, module, {"down_proj": outer})
        back = op("Gather", outputs, self._ranks(order), axis=0)
        by_token = self.reshape(back, [-1, experts.chosen, outer])
        weights = self.unsqueeze(self.from_float32(weights), 2)
        weighted = self.multiply(by_token, weights)
        return op("ReduceSum", weighted, constant([1], "int64"), keepdims=0)

    def choose_experts(self, scores: str, experts: Experts, module: str) -> ChosenExperts:
        """Choose the experts of each token by the router's output `scores` f32 [T, experts].

        Among equal scores the expert with the lower number is chosen.
        """
        op, constant = self.graph.op, self.graph.constant
        # The softmax over the chosen scores is the softmax over all scores, divided by its sum.
        early = experts.scores == "sigmoid" or experts.biased or not experts.normed
        if early:
            sigmoid = experts.scores == "sigmoid"
            scores = self.sigmoid(scores) if sigmoid else op("Softmax", scores, axis=-1)
        keys = scores
        if experts.biased:
            bias = self.float32_weight(f"{module}.expert_bias", experts.count)
            keys = op("Add", scores, bias)
        names = self.graph.new_names("TopK", 2)
        size = constant([experts.chosen], "int64")
        weights, chosen = self.graph.multi("TopK", keys, size, names=names)
        if experts.biased:
            weights = op("GatherElements", scores, chosen, axis=1)
        if not early:
            weights = op("Softmax", weights, axis=-1)
        elif experts.normed:
            total = op("ReduceSum", weights, constant([1], "int64"), keepdims=1)
            if experts.epsilon:
                total = op("Add", total, constant(experts.epsilon, "float32"))
            if experts.least:
                total = op("Max", total, constant(experts.least, "float32"))
            weights = op("Div", weights, total)
        if experts.factor != 1.0:
            weights = op("Mul", weights, constant(experts.factor, "float32"))
        if experts.parallel_mlp:
            scale = self.float32_weight(f"{module}.router_scale", experts.count)
            weights = self.multiply(weights, op("Gather", scale, chosen))
        return ChosenExperts(weights, chosen)

    def _sizes(self, pairs: str, experts: Experts) -> str:
        """Return the number of pairs of each expert, [experts]."""
        op, constant = self.graph.op, self.graph.constant
        column = self.unsqueeze(pairs, 1)
        marks = op("Equal", column, constant([list(range(experts.count))], "int64"))
        return op("ReduceSum", self.cast(marks, "int64"), constant([0], "int64"), keepdims=0)

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

    def _activate(self, inner: str, experts: Experts, module: str) -> str:
        """Compute activation(gate) · up, or gpt-oss's clamped variant, or activation(up)."""
        op, constant = self.graph.op, self.graph.constant
        if not self.config.form.gated:
            return self.activation(inner, module)
        gate, up = self.split(inner, [experts.width] * 2)
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
