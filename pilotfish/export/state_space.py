"""State spaces (Mamba-2): a state that forgets by head, at a rate that each token sets.

    S ← e^(Δ·A) · S + B ⊗ (Δ·x),   y = C · S + D · x,   Δ = softplus(projected + bias), clipped

x, B and C pass a convolution. Each head has its A and D, each group of heads its B and C. In terms
of linear attention, C is the query, B the key and Δ·x the value. Inputs and states are those that
`export.recurrent` describes.
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
    from_float32,
    prepend_earlier,
    recurrence,
    rows,
    run_recurrence,
    to_float32,
)


def write_state_space(net: Dialect, config: ModelConfig, i: int, h: str) -> str:
    """Mix tokens; h [T, hidden] → [T, hidden]."""
    module, own = f"model.layers.{i}.mamba", recurrence(config)
    space = _space(own)
    projected = _scaled(net, own, net.linear(h, f"{module}.in_proj"))
    gate, fresh = net.split(projected, [own.values, own.width])
    inputs = prepend_earlier(net, i, fresh, own.width)
    mixed, steps = net.split(inputs, [own.channels, own.heads])
    x, b, c = net.split(
        net.silu(convolve(net, mixed, f"{module}.conv1d", own.taps)),
        [own.values, own.keys, own.keys],
    )
    step, kept = _steps(net, space, module, rows(net, steps, own.taps - 1, ALL))
    values = _by_head(net, own, x, step)  # [c + T, values]
    answer = net.reshape(run_recurrence(net, own, i, [c, b, values, kept]), [-1, own.values])
    answer = add_skip(net, own, i, answer, x)
    gated = from_float32(net, _gated(net, own, module, answer, net.silu(to_float32(net, gate))))
    return net.linear(gated, f"{module}.out_proj")


def _scaled(net: Dialect, own: Recurrence, projected: str) -> str:
    """Multiply gate, x, B, C and Δ by a number each."""
    scales = _space(own).scales
    if set(scales) == {1.0}:
        return projected
    sizes = (own.values, own.values, own.keys, own.keys, own.heads)
    factors = np.repeat(np.array(scales, np.float32), sizes)
    return net.multiply(projected, net.graph.constant(factors, net.float))


def _steps(net: Dialect, space: StateSpace, module: str, steps: str) -> tuple[str, str]:
    """Return Δ, and the logarithm of what is kept, [c + T, heads] each."""
    op, graph = net.graph.op, net.graph
    bias = graph.weight(f"{module}.dt_bias", net.read(f"{module}.dt_bias"))
    step = op("Softplus", op("Add", steps, bias))
    if space.shortest > 0 or space.longest < math.inf:
        longest = min(space.longest, float(np.finfo(np.float32).max))
        bounds = (graph.constant(bound, "float32") for bound in (space.shortest, longest))
        step = op("Clip", step, *bounds)
    speed = -np.exp(net.read(f"{module}.A_log").astype(np.float64)).astype(np.float32)
    return step, op("Mul", step, graph.weight(f"{module}.speed", speed))


def _by_head(net: Dialect, own: Recurrence, x: str, factors: str) -> str:
    """Multiply each head of x [n, values] by its factor [n, heads]."""
    heads = net.reshape(x, [-1, own.heads, own.value_dim])
    product = net.graph.op("Mul", heads, net.reshape(factors, [-1, own.heads, 1]))
    return net.reshape(product, [-1, own.values])


def _gated(net: Dialect, own: Recurrence, module: str, x: str, gate: str) -> str:
    """Gate an answer [T, values] and norm it, in the order of the configuration, in f32."""
    op, order = net.graph.op, _space(own).norm
    if order != "before":
        x = op("Mul", x, gate)
    if order is not None:
        x = _normed(net, own, f"{module}.norm", x)
    return op("Mul", x, gate) if order == "before" else x


def _normed(net: Dialect, own: Recurrence, name: str, x: str) -> str:
    """Divide each group of x [T, values] by its root mean square, and weight it."""
    op, constant = net.graph.op, net.graph.constant
    width = own.values // own.key_heads
    groups = net.reshape(x, [-1, own.key_heads, width])
    squares = op("ReduceSum", op("Mul", groups, groups), constant([2], "int64"), keepdims=1)
    mean = op("Mul", squares, constant(1 / width, "float32"))
    root = op("Sqrt", op("Add", mean, constant(net.config.norm_eps, "float32")))
    normed = net.reshape(op("Div", groups, root), [-1, own.values])
    return op("Mul", normed, net.graph.weight(f"{name}.weight", net.read(f"{name}.weight")))


def _space(own: Recurrence) -> StateSpace:
    assert own.space is not None
    return own.space
