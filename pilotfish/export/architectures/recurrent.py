"""The classes with short convolutions or linear attention: LFM2, Qwen3.5, Qwen3-Next."""

from __future__ import annotations

from dataclasses import replace

from pilotfish.export.architectures.architecture import (
    ATTENTION,
    Architecture,
    Gguf,
    Mixture,
    Names,
    number_parts,
    stack_experts,
)
from pilotfish.export.architectures.experts import GATE
from pilotfish.export.model_config import Form

QKVZ = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
BA = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
CONV = ("conv.in_proj", "conv.conv", "conv.out_proj")

QWEN_GGUF = Gguf(
    name="qwen35",
    tiled=True,
    modules={
        "attn_qkv": QKVZ[0],
        "attn_gate": QKVZ[1],
        "post_attention_norm": "post_attention_layernorm",
    },
    fused={"attn_q": ("self_attn.q_proj", "self_attn.gate_proj")},
    by_head=True,
)
QWEN = Architecture(
    models="Qwen 3.5 dense",
    keys={"full_attention_interval": 4},
    key_names={"hidden_act": ""},  # always silu, also in the convolution
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
        keys={"max_position_embeddings": 128000, "tie_embedding": None, "block_ff_dim": None,
              "hidden_act": "silu"},
        key_names={"rms_norm_eps": "norm_eps", "hidden_act": ""},
        form=Form(qk_norm="head"),
        biases={"conv_bias": CONV},
        states={"conv": "conv"},
        names=Names(
            outer={"embedding_norm": "norm"},
            modules={
                "operator_norm": "input_layernorm",
                "ffn_norm": "post_attention_layernorm",
                **number_parts("feed_forward", "mlp"),
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
        mixture=Mixture(normed=True, shared_gate=True),
        names=replace(
            QWEN.names,
            modules=GATE,
            stacked=stack_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ),
        gguf=replace(QWEN_GGUF, name="qwen35moe"),
    ),
    "qwen3_next": replace(
        QWEN,
        models="Qwen3-Next",
        mixture=Mixture(shared_gate=True),
        names=Names(
            modules=GATE,
            fused={
                **QWEN.names.fused,
                "linear_attn.in_proj_qkvz": QKVZ,
                "linear_attn.in_proj_ba": BA,
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
                "ssm_in": QKVZ,  # older files
                "ssm_ba": BA,
            },
        ),
    ),
}  # fmt: skip

LFM2 = RECURRENT["lfm2"]
RECURRENT["lfm2_moe"] = replace(
    LFM2,
    models="LFM2 MoE",
    keys={"max_position_embeddings": 128000, "hidden_act": "silu", "tie_embedding": None},
    key_names={**LFM2.key_names, "first_k_dense_replace": "num_dense_layers"},
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
            **number_parts("feed_forward.experts.*", "mlp.experts.*"),
        },
        tensors={"feed_forward.expert_bias": "mlp.expert_bias"},
    ),
)  # fmt: skip
