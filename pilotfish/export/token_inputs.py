"""Per-layer embeddings of the tokens, a second input of each layer (Gemma 3n and 4).

They are the sum of the token's row in a table, with `width` numbers per layer, and of a projection
of the token's embedding, with a norm per layer. The table is the largest weight of these models,
and is used only for look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.export.dialects import Dialect
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.weights import TOKEN_PROJECTION, TOKEN_TABLE


def write_token_inputs(net: Dialect, config: ModelConfig, x: str) -> Sequence[str]:
    """Write the second input of each layer, [T, width], from the embeddings x [T, hidden].

    The result is empty if layers have no second input.
    """
    inputs = config.token_inputs
    if inputs is None:
        return []
    shape, width = [-1, config.layers, inputs.width], config.layers * inputs.width
    projected = net.linear(x, config.hidden, {TOKEN_PROJECTION: width})
    projected = net.reshape(net.scale(projected, config.hidden**-0.5), shape)
    normed = net.norm(projected, "model.per_layer_projection_norm", inputs.width)
    rows = net.embed_for_layers(TOKEN_TABLE)  # [T, layers · width]
    looked_up = net.scale(net.reshape(rows, shape), inputs.width**0.5)
    both = net.scale(net.graph.op("Add", normed, looked_up), 0.5**0.5)
    if config.layers == 1:
        return [net.reshape(both, [-1, inputs.width])]
    return net.split(net.reshape(both, [-1, width]), [inputs.width] * config.layers)


def add_layer_inputs(net: Dialect, layer: str, x: str, layer_inputs: str) -> str:
    """Gate a layer's second input by x [T, hidden] and project it; → [T, hidden]."""
    assert net.config.token_inputs is not None
    hidden, width = net.config.hidden, net.config.token_inputs.width
    gate = net.linear(x, hidden, {f"{layer}.per_layer_input_gate": width})
    gated = net.multiply(net.activation(gate, layer), layer_inputs)
    projected = net.linear(gated, width, {f"{layer}.per_layer_projection": hidden})
    return net.norm(projected, f"{layer}.post_per_layer_input_norm", hidden)
