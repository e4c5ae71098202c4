"""Classes some of whose layers keep a state instead of keys and values: LFM2, Qwen3.5."""

from __future__ import annotations

from pilotfish.export.architectures.architecture import ATTENTION, DECODER, MLP, Architecture, Names
from pilotfish.export.config import Form

CONV = ("conv.in_proj", "conv.conv", "conv.out_proj")

RECURRENT: dict[str, Architecture] = {
    "lfm2": Architecture(
        keys={
            **DECODER,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 128000,
            "tie_word_embeddings": True,
            "tie_embedding": None,
            "layer_types": None,
            "full_attn_idxs": None,
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_ff_dim": None,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        called={"rms_norm_eps": "norm_eps", "hidden_act": ""},  # silu, whatever the file says
        inert=frozenset({
            "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
            "block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out",
            "conv_use_xavier_init", "num_heads", "theta", "use_pos_enc",
        }),
        form=Form(qk_norm="head"),
        biases={"conv_bias": CONV},
        states={"conv": "conv"},
        names=Names(
            outer={"embedding_norm": "norm"},
            modules={
                "operator_norm": "input_layernorm",
                "ffn_norm": "post_attention_layernorm",
                "feed_forward.w1": MLP[0],
                "feed_forward.w3": MLP[1],
                "feed_forward.w2": MLP[2],
                "self_attn.out_proj": "self_attn.o_proj",
                "self_attn.q_layernorm": "self_attn.q_norm",
                "self_attn.k_layernorm": "self_attn.k_norm",
            },
        ),
    ),
    "qwen3_5_text": Architecture(
        keys={
            **DECODER,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "attention_bias": False,
            "partial_rotary_factor": 0.25,
            "layer_types": None,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
        # of the multi-token-prediction head, which is no part of the text model
        inert=frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers",
                         "mamba_ssm_dtype"}),
        called={"hidden_act": ""},  # of the convolution too
        neutral={"attn_output_gate": (True,), "hidden_act": ("silu",)},
        form=Form(qk_norm="head", gated_attention=True),
        biases={"attention_bias": (*ATTENTION, "self_attn.gate_proj")},
        states={"linear_attention": "delta"},
        plus_one=True,
        names=Names(
            fused={"self_attn.q_proj": ("self_attn.q_proj", "self_attn.gate_proj")}, by_head=True,
        ),
    ),
}  # fmt: skip
