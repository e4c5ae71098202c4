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


def write_token_inputs(net: Dialect, config: ModelConfig, x: str) -> Sequence[str | None]:
    """Write the second input of each layer, [T, width], from the embeddings x [T, hidden]."""
    inputs = config.token_inputs
    if inputs is None:
        return [None] * config.layers
    shape = [-1, config.layers, inputs.width]
    projected = net.scale(net.linear(x, TOKEN_PROJECTION), config.hidden**-0.5)
    normed = net.norm(net.reshape(projected, shape), "model.per_layer_projection_norm")
    rows = net.embed_for_layers(TOKEN_TABLE)  # [T, layers · width]
    looked_up = net.scale(net.reshape(rows, shape), inputs.width**0.5)
    both = net.scale(net.graph.op("Add", normed, looked_up), 0.5**0.5)
    if config.layers == 1:
        return [net.reshape(both, [-1, inputs.width])]
    return net.split(
        net.reshape(both, [-1, config.layers * inputs.width]), [inputs.width] * config.layers
    )


def add_layer_inputs(net: Dialect, layer: str, x: str, layer_inputs: str) -> str:
    """Gate a layer's second input by x [T, hidden] and project it; → [T, hidden]."""
    gate = net.activation(net.linear(x, f"{layer}.per_layer_input_gate"), layer)
    projected = net.linear(net.multiply(gate, layer_inputs), f"{layer}.per_layer_projection")
    return net.norm(projected, f"{layer}.post_per_layer_input_norm")
