"""Recurrent layers, which have a state instead of keys and values: convolutions, linear attention.

A state cannot be rolled back like keys and values. So a graph starts from an earlier state and
replays the inputs of the c tokens since that state (see pilotfish.engines.states). A run has one
slot, and all these values are f32:

    past.{i}.inputs [M, width]: inputs of the tokens before this pass, M = taps − 1 + c
    present.{i}.inputs [T, width]: inputs of this pass
    past.{i}.state, settled.{i}.state, present.{i}.state [1, heads, key_dim, value_dim]: the states
            c tokens before this pass, just before this pass, and after this pass

The state of a short convolution consists of its last inputs, so c = 0, and there is no `state`.
`export.state_space` and `export.selective_scan` write state spaces.
"""

from __future__ import annotations

import numpy as np

from pilotfish.export.dialects import Dialect
from pilotfish.export.graph import Dim
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.parts import Recurrence

L2_EPS = 1e-6  # added to the squared lengths of queries and keys, against division by 0
ALL = np.iinfo(np.int64).max


def write_short_conv(net: Dialect, config: ModelConfig, i: int, h: str) -> str:
    """Write LFM2's token mixer: a convolution with a gate before and a gate after it."""
    module, dims = f"model.layers.{i}.conv", recurrence(config)
    hidden = config.hidden
    projected = net.linear(h, hidden, {f"{module}.in_proj": 3 * hidden})
    before, after, x = net.split(projected, [hidden] * 3)
    inputs = prepend_earlier(net, i, net.multiply(before, x), hidden)
    mixed = net.from_float32(convolve(net, inputs, f"{module}.conv", hidden, dims.taps))
    return net.linear(net.multiply(after, mixed), hidden, {f"{module}.out_proj": hidden})


def write_delta_rule(net: Dialect, config: ModelConfig, i: int, h: str) -> str:
    """Write Qwen3.5's token mixer: a convolution of q, k and v, then linear attention."""
    module, dims = f"model.layers.{i}.linear_attn", recurrence(config)
    sizes = {"qkv": dims.channels, "b": dims.heads, "a": dims.heads, "z": dims.values}
    outputs = {f"{module}.in_proj_{part}": size for part, size in sizes.items()}
    projected = net.linear(h, config.hidden, outputs)
    fresh, gate = net.split(projected, [dims.width, dims.values])
    inputs = prepend_earlier(net, i, fresh, dims.width)
    mixed, rates = net.split(inputs, [dims.channels, dims.rates])
    # [c + T, channels]
    qkv = net.silu(convolve(net, mixed, f"{module}.conv1d", dims.channels, dims.taps))
    rates = rows(net, rates, dims.taps - 1, ALL)
    answer = run_recurrence(net, dims, i, _operands(net, dims, module, qkv, rates))
    heads = net.reshape(net.from_float32(answer), [-1, dims.value_dim])
    heads = net.norm(heads, f"{module}.norm", dims.value_dim)
    gated = net.multiply(net.reshape(heads, [-1, dims.values]), net.silu(gate))
    return net.linear(gated, dims.values, {f"{module}.out_proj": config.hidden})


def prepend_earlier(net: Dialect, layer: int, inputs: str, width: int) -> str:
    """Declare this pass's inputs [T, width] an output.

    Return earlier and new ones, [M + T, width].
    """
    past, present = f"past.{layer}.inputs", f"present.{layer}.inputs"
    net.graph.input(past, "float32", ["M", width])
    net.graph.op("Identity", net.to_float32(inputs), name=present)
    net.graph.output(present, "float32", ["T", width])
    return net.graph.op("Concat", past, present, axis=0)


def convolve(net: Dialect, inputs: str, name: str, channels: int, taps: int) -> str:
    """Convolve each channel of inputs [n, channels] over tokens; → [n − taps + 1, channels]."""
    op = net.graph.op
    weight = net.read(f"{name}.weight", channels, 1, taps)[:, 0].T  # [taps, channels]
    total = ""
    for i, tap in enumerate(weight):
        shifted = rows(net, inputs, i, i + 1 - taps or ALL)
        product = op("Mul", shifted, net.graph.weight(f"{name}.weight.{i}", tap))
        total = op("Add", total, product) if total else product
    if net.has_bias(name):
        total = op("Add", total, net.float32_weight(f"{name}.bias", channels))
    return total


def _operands(net: Dialect, dims: Recurrence, module: str, qkv: str, rates: str) -> list[str]:
    """Return q, k, v, the log decay and the write rate, [c + T, …] each."""
    op = net.graph.op
    q, k, v = net.split(qkv, [dims.keys, dims.keys, dims.values])
    writing, forgetting = net.split(rates, [dims.heads] * 2)
    bias = net.float32_weight(f"{module}.dt_bias", dims.heads)
    steps = op("Softplus", op("Add", forgetting, bias))
    log_decay = op("Mul", steps, write_rates(net, module, "speed", dims.heads))
    return [
        _unit_heads(net, dims, q),
        _unit_heads(net, dims, k),
        v,
        log_decay,
        op("Sigmoid", writing),
    ]


def _unit_heads(net: Dialect, dims: Recurrence, x: str) -> str:
    """Scale each head of [n, keys] to length 1."""
    heads = net.reshape(x, [-1, dims.key_heads, dims.key_dim])
    return net.reshape(divide_by_root(net, heads, L2_EPS), [-1, dims.keys])


def divide_by_root(net: Dialect, groups: str, epsilon: float, *, width: int = 1) -> str:
    """Divide each group […, width] by √(Σx² / width + ε), in f32."""
    op, constant = net.graph.op, net.graph.constant
    total = op("ReduceSum", op("Mul", groups, groups), constant([-1], "int64"), keepdims=1)
    if width > 1:
        total = op("Mul", total, constant(1 / width, "float32"))
    return op("Div", groups, op("Sqrt", op("Add", total, constant(epsilon, "float32"))))


def run_recurrence(net: Dialect, dims: Recurrence, layer: int, rows: list[str]) -> str:
    """Write the recurrence over c replayed and T new tokens; return the new outputs, [1, T, …]."""
    graph = net.graph
    shape: list[Dim] = [1, dims.heads, dims.key_dim, dims.value_dim]
    names = [f"{when}.{layer}.state" for when in ("past", "settled", "present")]
    graph.input(names[0], "float32", shape)
    answer = net.update_state(rows, missing_tokens(net, dims, layer), names)
    for name in names[1:]:
        graph.output(name, "float32", shape)
    return answer


def add_skip(net: Dialect, dims: Recurrence, layer: int, answer: str, x: str) -> str:
    """Add D · x to a state space's output [T, values]; x is [c + T, values]."""
    op, name = net.graph.op, f"model.layers.{layer}.mamba.D"
    start, end, axis = (
        missing_tokens(net, dims, layer),
        *(net.graph.constant([bound], "int64") for bound in (ALL, 0)),
    )
    factors = np.repeat(net.read(name, dims.heads), dims.values // dims.heads)
    through = net.graph.weight(name, factors)
    return op("Add", answer, op("Mul", op("Slice", x, start, end, axis), through))


def write_rates(net: Dialect, module: str, name: str, *shape: int) -> str:
    """Write the rates −e^A_log, f32 of this shape, as `module`.`name`."""
    logs = net.read(f"{module}.A_log", *shape).astype(np.float64)
    return net.graph.weight(f"{module}.{name}", -np.exp(logs).astype(np.float32))


def missing_tokens(net: Dialect, dims: Recurrence, layer: int) -> str:
    """Return c, the number of tokens to replay, i64 [1]."""
    earlier = net.graph.op("Shape", f"past.{layer}.inputs", start=0, end=1)
    return net.graph.op("Sub", earlier, net.graph.constant([dims.taps - 1], "int64"))


def rows(net: Dialect, x: str, start: int, end: int) -> str:
    """Return rows start … end of x [n, width]."""
    bounds = (net.graph.constant([bound], "int64") for bound in (start, end, 0))
    return net.graph.op("Slice", x, *bounds)


def recurrence(config: ModelConfig) -> Recurrence:
    """Return the sizes of the recurrent layers, which the model must have."""
    assert config.recurrence is not None
    return config.recurrence
