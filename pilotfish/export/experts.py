"""The feed-forward part: gates, and of a mixture its router, experts, and what all tokens share.

How the chosen experts are computed is the dialect's business.
"""

from __future__ import annotations

from statistics import NormalDist

from pilotfish.export.dialects import Dialect
from pilotfish.export.parts import Experts


def write_experts(net: Dialect, experts: Experts, module: str, h: str) -> str:
    """Write the mixture; h [T, hidden] → [T, hidden]. `module` is the layer's feed-forward part."""
    # The router stays unrounded: a rounding error there is another expert.
    scores = net.linear(h, f"{module}.router", rounded=False)
    mixed = net.experts(h, scores, module)
    if experts.shared is None:
        return mixed
    name = f"{module}.shared_expert"
    shared = net.linear(write_gated(net, name, experts.shared, h), f"{name}.down_proj")
    if experts.shared_gate:
        gate = net.sigmoid(net.linear(h, f"{module}.shared_expert_gate", rounded=False))
        shared = net.multiply(shared, gate)
    return net.add(mixed, shared)


def write_parallel_mlp(net: Dialect, experts: Experts, module: str, x: str, own: str) -> str:
    """Write a mixture beside a feed-forward part of the layer's own (Gemma 4).

    Args:
        x: the residual stream before the part, [T, hidden], which router and experts read.
        own: what the layer's own part has made, [T, hidden].
    """
    # Root mean square 1 / √hidden, so that scores do not grow with the width.
    told = net.scaled(net.norm(x, f"{module}.router_norm"), net.config.hidden**-0.5)
    scores = net.linear(told, f"{module}.router", rounded=False)
    mixed = net.experts(net.norm(x, f"{module}.experts_norm"), scores, module)
    own = net.norm(own, f"{module}.own_norm")
    return net.add(own, net.norm(mixed, f"{module}.experts_out_norm"))


def write_gated(
    net: Dialect, module: str, width: int, h: str, *, factor: float = 1.0, sparsity: float = 0.0
) -> str:
    """Write activation(factor · gate) · up; h [T, hidden] → [T, width].

    `sparsity` is `Layer`'s.
    """
    gate_up = net.linear(h, f"{module}.gate_proj", f"{module}.up_proj")
    gate, up = net.split(gate_up, [width] * 2)
    gate = net.scaled(gate, factor)
    if sparsity:
        gate = _cut_off(net, gate, sparsity)
    return net.multiply(net.activation(gate, module), up)


def _cut_off(net: Dialect, gate: str, sparsity: float) -> str:
    """Compute max(gate − cutoff, 0), the cutoff as if the channels of a token were normal."""
    op = net.graph.op
    mean = net.mean(gate)
    centred = op("Sub", gate, mean)
    deviation = op("Sqrt", net.mean(net.multiply(centred, centred)))
    cutoff = net.scaled(deviation, NormalDist().inv_cdf(sparsity))
    return op("Relu", op("Sub", centred, cutoff))
