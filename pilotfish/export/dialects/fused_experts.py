"""Mixtures of experts with one operator per layer: ONNX Runtime's MoE and QMoE (com.microsoft).

Experiments with the CPU kernels (1.31) showed: router_probs are the scores before the softmax;
normalize_routing_weights takes the softmax over the chosen scores; "swiglu" is g · σ(αg) · (u + β),
and the rows of gate and up must alternate in the first weight; QMoE's codes have the layout and
zero point of MatMulNBits.

Without normalize_routing_weights, MoE returns 0 if the runtime lets it overwrite its input, so this
attribute is always set. If a class does not weigh experts by the softmax over the chosen scores,
the graph chooses them itself: router_probs are the logarithms of the chosen experts' weights, and
ABSENT for all other experts. The result is multiplied by the sum of the weights.

ONNX Runtime 1.23 would compute QMoE of 4 bits wrongly; it refuses these graphs, because it does not
know the attribute accuracy_level.

Compared with one product per expert (`export.dialects.grouped_experts`), MoE and QMoE are as fast
with 8 experts, and up to three times as fast with 128 experts, most of which are idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.blocks import BLOCK
from pilotfish.export.dialects.dialect import MICROSOFT
from pilotfish.export.dialects.grouped_experts import GroupedExperts
from pilotfish.export.dialects.quantized_weights import pack_codes
from pilotfish.export.parts import Experts
from pilotfish.export.quantize import quantize

ABSENT = -1e30  # router_probs of an expert that is not chosen
SMALLEST = 1e-37  # least weight of an expert, in float32
INT8_ACTIVATIONS = 4  # value of accuracy_level: products in int8, sums in float32


class FusedExperts(GroupedExperts):
    """The base of a dialect that computes experts with MoE and QMoE."""

    def experts(self, x: str, scores: str, module: str) -> str:
        """Write the weighted sum of the chosen experts' outputs; x [T, hidden] → [T, hidden]."""
        experts = self.config.experts
        if (
            experts is None
            or self.config.activation != "silu"
            or not self.config.form.gated
            or self.forms.keeps_blocks
            or experts.parallel_mlp
        ):
            return super().experts(x, scores, module)
        name, hidden = f"{module}.experts", self.config.hidden
        first = self._projection(f"{name}.gate_up_proj", experts, (2 * experts.width, hidden))
        second = self._projection(f"{name}.down_proj", experts, (hidden, experts.width))
        attributes: dict[str, Any] = {}
        if self.forms.bits is not None:
            attributes = {"expert_weight_bits": self.forms.bits, "block_size": BLOCK}
        # needed only for 4 bits: with 8 bits, the kernel rounds activations anyway
        if self.forms.bits == 4:
            attributes["accuracy_level"] = INT8_ACTIVATIONS
        if experts.limit is not None:
            attributes["swiglu_limit"] = experts.limit
        total = ""
        if not experts.normed or experts.biased or experts.scores == "sigmoid":
            scores, total = self._routing_scores(scores, experts, module)
        mixed = self.graph.op(
            "MoE" if self.forms.bits is None else "QMoE",
            x,
            scores,
            *first,
            *second,
            domain=MICROSOFT,
            k=experts.chosen,
            normalize_routing_weights=1,
            activation_type="swiglu",
            swiglu_fusion=1,
            activation_alpha=experts.steepness,
            activation_beta=experts.lift,
            **attributes,
        )
        return self.multiply(mixed, total) if total else mixed

    def _routing_scores(self, scores: str, experts: Experts, module: str) -> tuple[str, str]:
        """Return router_probs [T, experts], and the sum of the chosen experts' weights [T, 1]."""
        op, constant = self.graph.op, self.graph.constant
        weights, chosen = self.choose_experts(scores, experts, module)
        absent = op("Expand", constant(ABSENT, "float32"), op("Shape", scores))
        logarithms = op("Log", op("Max", weights, constant(SMALLEST, "float32")))
        probabilities = op("ScatterElements", absent, chosen, logarithms, axis=1)
        return probabilities, op("ReduceSum", weights, constant([1], "int64"), keepdims=1)

    def _projection(self, name: str, experts: Experts, shape: tuple[int, int]) -> list[str]:
        """Write a projection of all experts.

        Return the names of weight, scales if any, and bias.
        """
        rows, width = shape
        graph, counts = self.graph, range(experts.count)
        biased = self.has_bias(self._parts(name, 0)[0])
        bias = ""
        if biased:
            values = np.stack([self._rows(name, j, "bias") for j in counts])
            bias = self.weight(f"{name}.bias", array=values)
        if self.forms.bits is None:
            parts = (self._rows(name, j, "weight") for j in counts)
            size = (experts.count, rows, width)
            return [graph.stream_weight(f"{name}.weight", size, self.float, parts), bias]
        scales: list[NDArray[np.float32]] = []
        codes = graph.stream_weight(
            f"{name}.codes",
            (experts.count, rows, width * self.forms.bits // 8),
            "uint8",
            self._codes(name, experts, scales),
        )
        return [codes, graph.weight(f"{name}.scales", np.stack(scales)), bias]

    def _codes(
        self, name: str, experts: Experts, scales: list[NDArray[np.float32]]
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield the codes of each expert's weight; append the scales to `scales`."""
        for j in range(experts.count):
            rounded = quantize(
                name, self._rows(name, j, "weight"), self.forms.bits or 0, offsets_allowed=False
            )
            scales.append(rounded.scales)
            yield pack_codes(rounded)

    def _rows(self, name: str, j: int, kind: str) -> NDArray[np.float32]:
        """Read the weight or bias of one expert; the rows of gate and up alternate."""
        parts = [self.source.tensor(f"{part}.{kind}") for part in self._parts(name, j)]
        if len(parts) == 1:
            return parts[0]
        return np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])

    @staticmethod
    def _parts(name: str, j: int) -> list[str]:
        """Return the names of the modules of expert `j` that form a projection."""
        experts, _, projection = name.rpartition(".")
        parts = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
        return [f"{experts}.{j}.{part}" for part in parts]
