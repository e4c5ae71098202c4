"""The names of a model's weights.

Names are those of Llama's modules in Hugging Face's checkpoints, even if a file uses others.
`export.weight_recorder` lists the weights of a model, with their shapes.

    model.embed_tokens, model.embed_positions, model.embed_norm, model.project_in, model.project_out
    model.layers.{i}.input_layernorm            before attention
    model.layers.{i}.attention_out_norm         after it, before the sum
    model.layers.{i}.post_attention_layernorm   before the feed-forward part
    model.layers.{i}.mlp_out_norm               after it, before the sum
    model.layers.{i}.self_attn.{q,k,v,o}_proj, .gate_proj, .q_norm, .k_norm, .sub_norm
    model.layers.{i}.self_attn.sinks [heads]
    model.layers.{i}.conv.{in,out}_proj, .conv                            instead of attention
    model.layers.{i}.linear_attn.in_proj_{qkv,z,b,a}, .out_proj, .conv1d, .norm, .A_log, .dt_bias
    model.layers.{i}.mamba.{in,out}_proj, .conv1d, .norm, .A_log, .D, .dt_bias, .x_proj,
        .dt_proj
    model.layers.{i}.mlp.{gate,up,down}_proj, .sub_norm, .act_fn.{alpha_p,alpha_n,beta,eps}
    model.layers.{i}.mlp.router, .experts.{j}.{gate,up,down}_proj, .shared_expert.{…}_proj,
        .shared_expert_gate, .expert_bias, .latent_{in,out}     mixture of experts
    model.norm, lm_head
    model.embed_tokens_per_layer, .per_layer_model_projection, .per_layer_projection_norm and, in a
        layer, .per_layer_input_gate, .per_layer_projection, .post_per_layer_input_norm,
        .layer_scalar                           Gemma 3n and 4
    model.altup_projections.{j}, .altup_unembed_projections.{j} and, in a layer, .altup.{…},
        .laurel.{…}                             Gemma 3n
    model.layers.{i}.mlp.router_norm, .router_scale, .own_norm, .experts_norm, .experts_out_norm
                                                mixture parallel to a dense part
"""

from __future__ import annotations

import re

EMBEDDING, HEAD, HEAD_BIAS = "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"
TOKEN_TABLE = "model.embed_tokens_per_layer.weight"
TOKEN_PROJECTION = "model.per_layer_model_projection"
XIELU = ("alpha_p", "alpha_n", "beta", "eps")
LAYER = re.compile(r"\.layers\.(\d+)\.")
NUMBER = re.compile(r"\.\d+\.")


def layer_of(name: str) -> int | None:
    """Return the index of the layer to which a weight belongs; None if it belongs to no layer."""
    match = LAYER.search(name)
    return None if match is None else int(match[1])


def wildcard_name(name: str) -> str:
    """Replace an expert's number in a name by *."""
    return NUMBER.sub(".*.", name)
