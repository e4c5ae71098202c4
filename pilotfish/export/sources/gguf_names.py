"""GGUF's names of weights and keys that all its architectures share.

`Architecture.gguf` holds a class's exceptions. Sources: gguf's constants and the name mapping of
llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pilotfish.export.architectures import Gguf, Names
from pilotfish.export.architectures.architecture import QKV

# --- weights -------------------------------------------------------------------------------------

OUTER = {
    "token_embd": "embed_tokens",
    "position_embd": "embed_positions",
    "output_norm": "norm",
    "token_embd_norm": "norm",  # LFM2's name of its last norm
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
    "output": "lm_head",
}
MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "attention_out_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "mlp_out_norm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "pre_ffw_norm_2": "mlp.experts_norm",
    "post_ffw_norm_1": "mlp.own_norm",
    "post_ffw_norm_2": "mlp.experts_out_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
TENSORS = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.expert_bias",
    "ffn_gate_inp.scale": "mlp.router_norm.weight",
    "ffn_down_exps.scale": "mlp.router_scale",
    "layer_output_scale.weight": "layer_scalar",
    "ssm_a": "linear_attn.A_log",  # −exp(A_log)
    "ssm_dt.bias": "linear_attn.dt_bias",
}
STACKED = {
    f"ffn_{part}_exps.{kind}": (f"mlp.experts.*.{part}_proj.{kind}",)
    for part in ("gate", "up", "down")
    for kind in ("weight", "bias")
} | {
    "ffn_gate_up_exps.weight": tuple(f"mlp.experts.*.{part}_proj.weight" for part in ("gate", "up"))
}
# Divisors of the rotary frequencies: computed, not weights.
DIVISORS, SHORT, LONG = (
    f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")
)


def gguf_names(variant: Gguf, *, experts: bool) -> Names:
    """Return the weight names in files of an architecture, which may have `experts`."""
    fused = {part for parts in variant.fused.values() for part in parts}
    other = fused | {*variant.modules.values()}
    modules = {theirs: ours for theirs, ours in MODULES.items() if ours not in other}
    return Names(
        body="",
        stack="blk",
        outer=OUTER,
        modules={**modules, **variant.modules},
        fused={**({} if "attn_qkv" in variant.modules else {"attn_qkv": QKV}), **variant.fused},
        by_head=variant.by_head,
        stacked=STACKED if experts else {},
        tensors=TENSORS,
    )


# --- keys ----------------------------------------------------------------------------------------

# GGUF's key → Llama's key; only keys that the class has are used.
KEYS: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.scale": "attention_multiplier",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "full_attention_interval": "full_attention_interval",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
EPSILON = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}
# Keys for which 0 means none.
OPTIONAL = frozenset({
    "attention.scale", "attention.sliding_window", "embedding_scale", "residual_scale",
    "logit_scale", "rope.freq_base_swa",
})  # fmt: skip
# Keys with an effect → their values that have no effect, for classes that do not have the key.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "tensor_data_layout": ("Meta AI original pth",),  # the usual layout
    "use_parallel_residual": (False,),
    "attention.clamp_kqv": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
}
# Llama's keys that every file states.
NEEDED = frozenset({
    "num_experts", "num_experts_per_tok", "use_parallel_residual", "hidden_size_per_layer_input",
    "conv_L_cache", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads",
    "linear_num_value_heads",
})  # fmt: skip
# Keys without effect: they belong to other rotary scalings, or llama.cpp only displays them.
INERT = frozenset({"rope.scaling.original_context_length", "rope.scaling.finetuned"})
