"""Llama and its close relatives.

Mistral is the same network; Qwen2 adds biases to q, k and v; Qwen3 norms each head of q and k.
"""

from __future__ import annotations

from pilotfish.export.config import ModelConfig
from pilotfish.export.dialects import Dialect

EMBEDDING = "model.embed_tokens.weight"


def llama(net: Dialect, config: ModelConfig) -> None:
    """Write the network; its outputs are declared by `net.finish`."""
    x = net.embed(EMBEDDING)  # [T, hidden]
    for i in range(config.layers):
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"

        h = net.rms_norm(x, f"{layer}.input_layernorm.weight")
        qkv = net.linear(
            h, *(f"{attention}.{part}_proj" for part in "qkv"), bias=config.attention_bias
        )
        attended = net.attention(
            i,
            qkv,
            q_norm=f"{attention}.q_norm.weight" if config.qk_norm else None,
            k_norm=f"{attention}.k_norm.weight" if config.qk_norm else None,
        )
        x = net.add(x, net.linear(attended, f"{attention}.o_proj", bias=config.output_bias))

        h = net.rms_norm(x, f"{layer}.post_attention_layernorm.weight")
        gate_up = net.linear(h, f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=config.mlp_bias)
        x = net.add(x, net.linear(net.gated(gate_up), f"{mlp}.down_proj", bias=config.mlp_bias))

    hidden = net.rms_norm(x, "model.norm.weight")
    net.finish(hidden, EMBEDDING if config.tied else "lm_head.weight")
