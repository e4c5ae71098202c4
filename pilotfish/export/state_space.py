"""State spaces (Mamba-2): each head's state decays at a rate that depends on the token.

    S ← e^(Δ·A) · S + B ⊗ (Δ·x),   y = C · S + D · x,   Δ = softplus(projected + bias), clipped

x, B and C are outputs of a convolution. Each head has A and D; each group of heads has B and C. In
terms of linear attention, C is the query, B the key and Δ·x the value. `export.recurrent` describes
inputs and states.
"""

from __future__ import annotations

import math

import numpy as np

from pilotfish.export.dialects import Dialect
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.parts import Recurrence, StateSpace
from pilotfish.export.recurrent import (
    ALL,
    add_skip,
    convolve,
    divide_by_root,
    prepend_earlier,
    recurrence,
    rows,
    run_recurrence,
    write_rates,
)


def write_state_space(net: Dialect, config: ModelConfig, i: int, h: str) -> str:
    """Write the token mixer; h [T, hidden] → [T, hidden]."""
    module, dims = f"model.layers.{i}.mamba", recurrence(config)
    projected = _scale_projection(
        net, dims, net.linear(h, config.hidden, {f"{module}.in_proj": dims.projected})
    )
    gate, fresh = net.split(projected, [dims.values, dims.width])
    inputs = prepend_earlier(net, i, fresh, dims.width)
    mixed, steps = net.split(inputs, [dims.channels, dims.heads])
    x, b, c = net.split(
        net.silu(convolve(net, mixed, f"{module}.conv1d", dims.channels, dims.taps)),
        [dims.values, dims.keys, dims.keys],
    )
    step, log_decay = _steps(net, dims, module, rows(net, steps, dims.taps - 1, ALL))
    values = _scale_heads(net, dims, x, step)  # [c + T, values]
    answer = net.reshape(run_recurrence(net, dims, i, [c, b, values, log_decay]), [-1, dims.values])
    answer = add_skip(net, dims, i, answer, x)
    gated = net.from_float32(
        _gate_and_norm(net, dims, module, answer, net.silu(net.to_float32(gate)))
    )
    return net.linear(gated, dims.values, {f"{module}.out_proj": config.hidden})


def _scale_projection(net: Dialect, dims: Recurrence, projected: str) -> str:
    """Multiply gate, x, B, C and Δ by their factors."""
    scales = _space(dims).scales
    if set(scales) == {1.0}:
        return projected
    sizes = (dims.values, dims.values, dims.keys, dims.keys, dims.heads)
    factors = np.repeat(np.array(scales, np.float32), sizes)
    return net.multiply(projected, net.graph.constant(factors, net.float))


def _steps(net: Dialect, dims: Recurrence, module: str, steps: str) -> tuple[str, str]:
    """Return Δ and the log decay, [c + T, heads] each."""
    op, graph, space = net.graph.op, net.graph, _space(dims)
    bias = net.float32_weight(f"{module}.dt_bias", dims.heads)
    step = op("Softplus", op("Add", steps, bias))
    if space.shortest > 0 or space.longest < math.inf:
        longest = min(space.longest, float(np.finfo(np.float32).max))
        bounds = (graph.constant(bound, "float32") for bound in (space.shortest, longest))
        step = op("Clip", step, *bounds)
    return step, op("Mul", step, write_rates(net, module, "speed", dims.heads))


def _scale_heads(net: Dialect, dims: Recurrence, x: str, factors: str) -> str:
    """Multiply each head of x [n, values] by its factor [n, heads]."""
    heads = net.reshape(x, [-1, dims.heads, dims.value_dim])
    product = net.graph.op("Mul", heads, net.reshape(factors, [-1, dims.heads, 1]))
    return net.reshape(product, [-1, dims.values])


def _gate_and_norm(net: Dialect, dims: Recurrence, module: str, x: str, gate: str) -> str:
    """Apply gate and norm to an output [T, values] in f32, in the configuration's order."""
    op, order = net.graph.op, _space(dims).norm
    if order != "before":
        x = op("Mul", x, gate)
    if order is not None:
        x = _group_norm(net, dims, f"{module}.norm", x)
    return op("Mul", x, gate) if order == "before" else x


def _group_norm(net: Dialect, dims: Recurrence, name: str, x: str) -> str:
    """Divide each group of x [T, values] by its root mean square; multiply by the weight."""
    width = dims.values // dims.key_heads
    groups = net.reshape(x, [-1, dims.key_heads, width])
    normed = divide_by_root(net, groups, net.config.norm_eps, width=width)
    weight = net.float32_weight(f"{name}.weight", dims.values)
    return net.graph.op("Mul", net.reshape(normed, [-1, dims.values]), weight)


def _space(dims: Recurrence) -> StateSpace:
    assert dims.space is not None
    return dims.space
