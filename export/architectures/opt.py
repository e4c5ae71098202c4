"""OPT: learned positions, layer norms with bias, a plain feed-forward part.

opt-350m norms after each residual sum instead of before, and embeds in a narrower space.
"""

from __future__ import annotations

from pilotfish.export.config import ModelConfig
from pilotfish.export.dialects import Dialect

DECODER = "model.decoder"
EMBEDDING = f"{DECODER}.embed_tokens.weight"


def opt(net: Dialect, config: ModelConfig) -> None:
    """Write the network; its outputs are declared by `net.finish`."""
    x = net.embed(EMBEDDING)
    if config.embedding:
        x = net.linear(x, f"{DECODER}.project_in")
    x = net.add(x, net.embed_positions(f"{DECODER}.embed_positions.weight"))
    for i in range(config.layers):
        layer = f"{DECODER}.layers.{i}"
        attention = f"{layer}.self_attn"

        def norm(value: str, name: str, before: bool) -> str:
            return net.layer_norm(value, name) if before == config.pre_norm else value

        h = norm(x, f"{layer}.self_attn_layer_norm", before=True)
        qkv = net.linear(
            h, *(f"{attention}.{part}_proj" for part in "qkv"), bias=config.attention_bias
        )
        attended = net.attention(i, qkv)
        x = net.add(x, net.linear(attended, f"{attention}.out_proj", bias=config.output_bias))
        x = norm(x, f"{layer}.self_attn_layer_norm", before=False)

        h = norm(x, f"{layer}.final_layer_norm", before=True)
        h = net.activation(net.linear(h, f"{layer}.fc1", bias=config.mlp_bias))
        x = net.add(x, net.linear(h, f"{layer}.fc2", bias=config.mlp_bias))
        x = norm(x, f"{layer}.final_layer_norm", before=False)

    if config.final_norm:
        x = net.layer_norm(x, f"{DECODER}.final_layer_norm")
    if config.embedding:
        x = net.linear(x, f"{DECODER}.project_out")
    net.finish(x, EMBEDDING if config.tied else "lm_head.weight")
