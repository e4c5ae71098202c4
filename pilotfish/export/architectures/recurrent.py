"""The classes with short convolutions or linear attention: LFM2, Qwen3.5, Qwen3-Next."""

from __future__ import annotations

from dataclasses import replace

from pilotfish.export.architectures.architecture import (
    ATTENTION,
    DECODER,
    MLP,
    Architecture,
    Gguf,
    Mixture,
    Names,
)
from pilotfish.export.architectures.biased_experts import SCALED
from pilotfish.export.architectures.experts import EVERY, GATE, SPARSE, TRAINING
from pilotfish.export.model_config import Form

NEXT = ("qkv", "z"), ("b", "a")
CONV = ("conv.in_proj", "conv.conv", "conv.out_proj")

EXPERTS = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
QWEN_GGUF = Gguf(
    name="qwen35",
    tiled=True,
    modules={
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "post_attention_norm": "post_attention_layernorm",
    },
    fused={"attn_q": ("self_attn.q_proj", "self_attn.gate_proj")},
    by_head=True,
)
QWEN = Architecture(
    models="Qwen 3.5 dense",
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
    # Keys of the multi-token-prediction head, which is not exported.
    inert=frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers",
                     "mamba_ssm_dtype"}),
    key_names={"hidden_act": ""},  # always silu, also in the convolution
    neutral={"attn_output_gate": (True,), "hidden_act": ("silu",)},
    form=Form(qk_norm="head", gated_attention=True),
    biases={"attention_bias": (*ATTENTION, "self_attn.gate_proj")},
    states={"linear_attention": "delta"},
    plus_one=True,
    names=Names(
        fused={"self_attn.q_proj": ("self_attn.q_proj", "self_attn.gate_proj")}, by_head=True,
    ),
    gguf=QWEN_GGUF,
)  # fmt: skip

RECURRENT: dict[str, Architecture] = {
    "lfm2": Architecture(
        models="LFM2, LFM2.5",
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
        key_names={"rms_norm_eps": "norm_eps", "hidden_act": ""},  # always silu
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
        gguf=Gguf(name="lfm2", derive=lambda _: {"block_auto_adjust_ff_dim": False}),
    ),
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": replace(
        QWEN,
        models="Qwen 3.5 MoE",
        keys={
            **{key: value for key, value in QWEN.keys.items() if key != "intermediate_size"},
            **EXPERTS,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        inert=QWEN.inert | TRAINING,
        mixture=Mixture(normed=True, shared_gate=True),
        names=replace(
            QWEN.names,
            modules=GATE,
            stacked={
                "mlp.experts.gate_up_proj": tuple(f"{name}.weight" for name in EVERY[:2]),
                "mlp.experts.down_proj": (f"{EVERY[2]}.weight",),
            },
        ),
        gguf=replace(QWEN_GGUF, name="qwen35moe"),
    ),
    "qwen3_next": replace(
        QWEN,
        models="Qwen3-Next",
        keys={
            **QWEN.keys,
            **EXPERTS,
            **SPARSE,
            "num_key_value_heads": 2,
            "norm_topk_prob": True,
        },
        inert=TRAINING,
        neutral={"hidden_act": ("silu",)},
        mixture=Mixture(shared_gate=True),
        names=Names(
            modules=GATE,
            fused={
                **QWEN.names.fused,
                **{
                    f"linear_attn.in_proj_{''.join(parts)}": tuple(
                        f"linear_attn.in_proj_{part}" for part in parts
                    )
                    for parts in NEXT
                },
            },
            by_head=True,
            aside=("mtp.",),  # the multi-token-prediction head
        ),
        gguf=replace(
            QWEN_GGUF,
            name="qwen3next",
            derive=lambda _: {"norm_topk_prob": True},
            tiled=False,
            fused={
                **QWEN_GGUF.fused,
                "ssm_in": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),  # older files
                "ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
            },
        ),
    ),
}  # fmt: skip

LFM2 = RECURRENT["lfm2"]
RECURRENT["lfm2_moe"] = replace(
    LFM2,
    models="LFM2 MoE",
    keys={
        **{key: LFM2.keys[key] for key in LFM2.keys if not key.startswith("block_")},
        **SCALED, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792,
        "first_k_dense_replace": 2, "use_expert_bias": True,
    },
    key_names={**LFM2.key_names, "first_k_dense_replace": "num_dense_layers"},
    inert=TRAINING | LFM2.inert,
    gguf=Gguf(
        name="lfm2moe",
        keys={"leading_dense_block_count": "first_k_dense_replace"},
        derive=lambda _: {"norm_topk_prob": True, "routed_scaling_factor": 1.0},
        tensors={"use_expert_bias": "mlp.expert_bias"},
        neutral={"expert_gating_func": (2,)},  # sigmoid
    ),
    mixture=Mixture(scores="sigmoid", epsilon=1e-6),
    names=replace(
        LFM2.names,
        modules={
            **LFM2.names.modules,
            "feed_forward.gate": "mlp.router",
            **{f"feed_forward.experts.*.w{i}": f"mlp.experts.*.{part}_proj"
               for i, part in ((1, "gate"), (2, "down"), (3, "up"))},
        },
        tensors={"feed_forward.expert_bias": "mlp.expert_bias"},
    ),
)  # fmt: skip
