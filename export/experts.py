"""The feed-forward part of a mixture of experts: router, experts, and what all tokens share.

How the chosen experts are computed is the dialect's business.
"""

from __future__ import annotations

from pilotfish.export.config import Experts
from pilotfish.export.dialects import Dialect


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


def write_gated(net: Dialect, module: str, width: int, h: str, factor: float = 1.0) -> str:
    """Write activation(factor · gate) · up; h [T, hidden] → [T, width]."""
    gate_up = net.linear(h, f"{module}.gate_proj", f"{module}.up_proj")
    gate, up = net.split(gate_up, [width] * 2)
    return net.multiply(net.activation(net.scaled(gate, factor), module), up)
