"""Selective state spaces (Mamba): each channel has a state; its elements decay independently.

    S ← e^(Δ·A) · S + B ⊗ (Δ·x),   y = C · S + D · x,   Δ = softplus(low · W + bias)

x is the output of a convolution. B, C and `low`, the low-rank form of Δ, are projections of x. In
terms of linear attention, each channel is a head with one value; C is the query and B the key, and
all heads share them. `export.recurrent` describes inputs and states.
"""

from __future__ import annotations

from pilotfish.export.dialects import Dialect
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.parts import Recurrence
from pilotfish.export.recurrent import (
    add_skip,
    convolve,
    divide_by_root,
    prepend_earlier,
    recurrence,
    run_recurrence,
    write_rates,
)


def write_selective_scan(net: Dialect, config: ModelConfig, i: int, h: str) -> str:
    """Write the token mixer; h [T, hidden] → [T, hidden]."""
    op, module, dims = net.graph.op, f"model.layers.{i}.mamba", recurrence(config)
    projected = net.linear(h, config.hidden, {f"{module}.in_proj": dims.projected})
    fresh, gate = net.split(projected, [dims.values] * 2)
    inputs = prepend_earlier(net, i, fresh, dims.width)
    # [c + T, values]
    x = net.silu(convolve(net, inputs, f"{module}.conv1d", dims.channels, dims.taps))
    step, b, c = _project(net, dims, module, x)
    steps = net.reshape(step, [-1, dims.heads, 1])
    rates = write_rates(net, module, "A", dims.heads, dims.key_dim)
    log_decay = op("Mul", steps, rates)
    log_decay = net.reshape(log_decay, [-1, dims.heads * dims.key_dim])
    answer = run_recurrence(net, dims, i, [c, b, op("Mul", step, x), log_decay])
    answer = add_skip(net, dims, i, net.reshape(answer, [-1, dims.values]), x)
    gated = op("Mul", answer, net.silu(net.to_float32(gate)))
    return net.linear(net.from_float32(gated), dims.values, {f"{module}.out_proj": config.hidden})


def _project(net: Dialect, dims: Recurrence, module: str, x: str) -> list[str]:
    """Return Δ [c + T, values], B and C [c + T, key_dim], f32."""
    assert dims.space is not None
    assert dims.space.rank is not None
    rank, epsilon = dims.space.rank, dims.space.epsilon
    all_three = net.linear(net.from_float32(x), dims.values, {f"{module}.x_proj": dims.low})
    widths = [rank, dims.key_dim, dims.key_dim]
    parts = net.split(net.to_float32(all_three), widths)
    if epsilon is not None:
        sized = zip(parts, widths, strict=True)
        parts = [divide_by_root(net, part, epsilon, width=width) for part, width in sized]
    # This weight is not quantised: it is small, and it determines the state's decay.
    low = net.from_float32(parts[0])
    steps = net.linear(low, rank, {f"{module}.dt_proj": dims.values}, rounded=False)
    return [net.graph.op("Softplus", net.to_float32(steps)), *parts[1:]]
