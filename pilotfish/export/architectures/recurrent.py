"""The classes with short convolutions or linear attention: LFM2, Qwen3.5, Qwen3-Next."""

from __future__ import annotations

from dataclasses import replace

from pilotfish.export.architectures.architecture import (
    ATTENTION,
    MLP,
    Architecture,
    Gguf,
    Mixture,
    Names,
)
from pilotfish.export.architectures.experts import EVERY, GATE
from pilotfish.export.model_config import Form

NEXT = ("qkv", "z"), ("b", "a")
CONV = ("conv.in_proj", "conv.conv", "conv.out_proj")

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
                "feed_forward.w1": MLP[0],
                "feed_forward.w3": MLP[1],
                "feed_forward.w2": MLP[2],
                "self_attn.out_proj": "self_attn.o_proj",
                "self_attn.q_layernorm": "self_attn.q_norm",
                "self_attn.k_layernorm": "self_attn.k_norm",
            },
        ),
        gguf=Gguf(name="lfm2"),
    ),
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": replace(
        QWEN,
        models="Qwen 3.5 MoE",
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
    keys={"max_position_embeddings": 128000, "hidden_act": "silu", "tie_embedding": None},
    key_names={**LFM2.key_names, "first_k_dense_replace": "num_dense_layers"},
    gguf=None,
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
