"""The weights of recurrent layers, by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pilotfish.export.model_config import Kind, ModelConfig
from pilotfish.export.weight_sizes import Weights, WeightSize, linear_weights, size_of


def _conv_weights(config: ModelConfig) -> Weights:
    """Yield the weights of a gated short convolution."""
    hidden, taps = size_of(config, "hidden"), size_of(config, "recurrence.taps")
    both = WeightSize(3 * hidden.value, hidden.fields)
    yield from linear_weights(config, "conv.in_proj", both, hidden)
    yield from linear_weights(config, "conv.out_proj", hidden, hidden)
    yield "conv.conv.weight", (hidden, WeightSize(1, ()), taps)
    if "conv.conv" in config.form.biases:
        yield "conv.conv.bias", (hidden,)


def _delta_weights(config: ModelConfig) -> Weights:
    """Yield the weights of linear attention by the gated delta rule."""
    hidden, taps = size_of(config, "hidden"), size_of(config, "recurrence.taps")
    channels, values = size_of(config, "recurrence.channels"), size_of(config, "recurrence.values")
    heads = size_of(config, "recurrence.heads")
    projections = (
        ("linear_attn.in_proj_qkv", channels, hidden),
        ("linear_attn.in_proj_b", heads, hidden),
        ("linear_attn.in_proj_a", heads, hidden),
        ("linear_attn.in_proj_z", values, hidden),
        ("linear_attn.out_proj", hidden, values),
    )
    for name, rows, columns in projections:
        yield from linear_weights(config, name, rows, columns)
    yield "linear_attn.conv1d.weight", (channels, WeightSize(1, ()), taps)
    yield "linear_attn.norm.weight", (size_of(config, "recurrence.value_dim"),)
    yield "linear_attn.A_log", (heads,)
    yield "linear_attn.dt_bias", (heads,)


def _space_weights(config: ModelConfig) -> Weights:
    """Yield the weights of a state space."""
    hidden, taps = size_of(config, "hidden"), size_of(config, "recurrence.taps")
    channels, values = size_of(config, "recurrence.channels"), size_of(config, "recurrence.values")
    heads = size_of(config, "recurrence.heads")
    yield from linear_weights(
        config, "mamba.in_proj", size_of(config, "recurrence.projected"), hidden
    )
    yield from linear_weights(config, "mamba.out_proj", hidden, values)
    yield "mamba.conv1d.weight", (channels, WeightSize(1, ()), taps)
    if "mamba.conv1d" in config.form.biases:
        yield "mamba.conv1d.bias", (channels,)
    if config.recurrence and config.recurrence.space and config.recurrence.space.norm:
        yield "mamba.norm.weight", (values,)
    for name in ("A_log", "D", "dt_bias"):
        yield f"mamba.{name}", (heads,)


def _selective_weights(config: ModelConfig) -> Weights:
    """Yield the weights of a selective state space, in which each channel is a head."""
    hidden, taps = size_of(config, "hidden"), size_of(config, "recurrence.taps")
    values, low = size_of(config, "recurrence.values"), size_of(config, "recurrence.low")
    yield from linear_weights(
        config, "mamba.in_proj", size_of(config, "recurrence.projected"), hidden
    )
    yield from linear_weights(config, "mamba.out_proj", hidden, values)
    yield from linear_weights(config, "mamba.x_proj", low, values)
    yield from linear_weights(
        config, "mamba.dt_proj", values, size_of(config, "recurrence.space.rank")
    )
    yield "mamba.conv1d.weight", (values, WeightSize(1, ()), taps)
    if "mamba.conv1d" in config.form.biases:
        yield "mamba.conv1d.bias", (values,)
    yield "mamba.A_log", (values, size_of(config, "recurrence.key_dim"))
    yield "mamba.D", (values,)


STATES: Mapping[Kind, Callable[[ModelConfig], Weights]] = {
    "conv": _conv_weights,
    "delta": _delta_weights,
    "space": _space_weights,
    "both": _space_weights,
    "selective": _selective_weights,
}
