"""The classes with mixtures of experts.

If a class has the key `num_experts`, all layers have experts, except those that
`decoder_sparse_step` and `mlp_only_layers` exclude.
"""

from __future__ import annotations

from dataclasses import replace

from pilotfish.export.architectures.architecture import (
    ATTENTION,
    HEAD_DIM,
    MLP,
    QKV,
    Architecture,
    Gguf,
    Mixture,
    Names,
    number_parts,
    stack_experts,
)
from pilotfish.export.architectures.llama import GRANITE_GGUF
from pilotfish.export.model_config import Form

NORMED = Mixture(normed=True)
GATE = {"mlp.gate": "mlp.router"}
PARTS = ("gate_proj", "up_proj", "down_proj")
EVERY = tuple(f"mlp.experts.*.{part}" for part in PARTS)
SHARED_EXPERT = tuple(f"mlp.shared_expert.{part}" for part in PARTS)
SHARED = {f"mlp.shared_experts.{name[18:]}": name for name in SHARED_EXPERT}

# The router of DeepSeek-V3 without groups, which most classes with a bias have. The bias is a
# tensor of the checkpoint; it changes which experts are chosen, and not their weights.
BIASED = Mixture(scores="sigmoid", biased=True, epsilon=1e-20)
ROUTED = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
CORRECTION = "e_score_correction_bias"
LOCAL = {"num_experts": "num_local_experts"}
MIXTRAL_MODULES = {
    "block_sparse_moe.gate": "mlp.router",
    **number_parts("block_sparse_moe.experts.*", "mlp.experts.*"),
}

GRANITE_MOE = Architecture(
    models="Granite 3 MoE",
    key_names=LOCAL,
    mixture=NORMED,
    names=Names(
        modules={"block_sparse_moe.router.layer": "mlp.router"},
        stacked=stack_experts(
            "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"
        ),
    ),
    gguf=replace(GRANITE_GGUF, name="granitemoe"),
)

WITH_SHARED = replace(
    GRANITE_MOE.names,
    modules={
        **GRANITE_MOE.names.modules,
        "shared_mlp.output_linear": SHARED_EXPERT[2],
    },
    fused={"shared_mlp.input_linear": SHARED_EXPERT[:2]},
)
MIXTURES: dict[str, Architecture] = {
    "mixtral": Architecture(
        models="Mixtral",
        key_names=LOCAL,
        windows="all",
        mixture=NORMED,
        names=Names(modules=MIXTRAL_MODULES),
        gguf=Gguf(name="llama", when="expert_count", interleaved=True),
    ),
    "qwen2_moe": Architecture(
        models="Qwen1.5-MoE, Qwen2-MoE",
        biases={"qkv_bias": QKV},
        windows="switched",
        full_every=2,
        mixture=Mixture(shared_gate=True),
        names=Names(modules=GATE),
        gguf=Gguf(name="qwen2moe"),
    ),
    "qwen3_moe": Architecture(
        models="Qwen 3 MoE",
        keys=HEAD_DIM,
        form=Form(qk_norm="head"),
        windows="all",
        mixture=Mixture(),
        names=Names(modules=GATE),
        gguf=Gguf(name="qwen3moe", derive=lambda _: {"norm_topk_prob": True}),
    ),
    "qwen3_vl_moe_text": Architecture(
        models="the text of Qwen3-VL MoE",
        keys={**HEAD_DIM, "tie_word_embeddings": False},
        form=Form(qk_norm="head"),
        biases={"attention_bias": ATTENTION},
        mixture=NORMED,
        names=Names(
            modules=GATE,
            stacked={
                "mlp.experts.gate_up_proj": tuple(f"{name}.weight" for name in EVERY[:2]),
                "mlp.experts.down_proj": (f"{EVERY[2]}.weight",),
            },
            columns=None,  # published files are [experts, in, out]
        ),
    ),
    "olmoe": Architecture(
        models="OLMoE",
        form=Form(qk_norm="all"),
        mixture=Mixture(),
        names=Names(modules=GATE),
        gguf=Gguf(name="olmoe"),
    ),
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": replace(
        GRANITE_MOE,
        models="Granite MoE with a shared expert",
        key_names={**LOCAL, "shared_expert_intermediate_size": "shared_intermediate_size"},
        names=WITH_SHARED,
        gguf=replace(GRANITE_GGUF, name="granitemoe", when="expert_shared_feed_forward_length"),
    ),
    "gpt_oss": Architecture(
        models="gpt-oss",
        keys={"hidden_act": "silu"},
        key_names={**LOCAL, "hidden_act": ""},
        form=Form(sinks=True),
        biases={"attention_bias": ATTENTION, "": ("mlp.router", *EVERY)},
        windows="listed",
        full_every=2,
        rope_default={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        mixture=Mixture(normed=True, lift=1.0),
        names=Names(
            stacked={
                **stack_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
                **stack_experts(
                    "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias", "bias"
                ),
            },
            columns=True,
            alternating=True,
        ),
        gguf=Gguf(name="gpt-oss", modules={"post_attention_norm": "post_attention_layernorm"}),
    ),
    "glm4_moe": Architecture(
        models="GLM 4.5, 4.6, 4.7",
        keys={**HEAD_DIM, "partial_rotary_factor": 0.5},
        key_names={"num_experts": "n_routed_experts", "num_nextn_predict_layers": "num_mtp_layers"},
        neutral=ROUTED,
        vary=lambda stated: {"qk_norm": "head" if stated("use_qk_norm") else None},
        biases={"attention_bias": QKV},
        mixture=BIASED,
        names=Names(
            modules={**GATE, **SHARED}, tensors={f"mlp.gate.{CORRECTION}": "mlp.expert_bias"},
        ),
    ),
    "ernie4_5_moe": Architecture(
        models="ERNIE 4.5 MoE",
        keys=HEAD_DIM,
        key_names={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k",
                   "n_shared_experts": "moe_num_shared_experts",
                   "first_k_dense_replace": "moe_layer_start_index",
                   "decoder_sparse_step": "moe_layer_interval"},
        neutral={"moe_gate_act": (None, "softmax")},
        biases={"use_bias": (*ATTENTION, *MLP, *SHARED_EXPERT, "lm_head")},
        mixture=Mixture(normed=True, biased=True),
        interleaved=True,
        names=Names(
            modules={**GATE, **SHARED},
            tensors={f"mlp.moe_statics.{CORRECTION}": "mlp.expert_bias"},
            aside=("model.mtp_",),  # the multi-token-prediction head
        ),
    ),
    "minimax_m2": Architecture(
        models="MiniMax M2, M2.1, M2.5, M2.7",
        keys={"partial_rotary_factor": 1.0, "rotary_dim": None},
        key_names=LOCAL,
        neutral={"scoring_func": ("sigmoid",), "use_routing_bias": (True,), "use_qk_norm": (True,),
                 "qk_norm_type": ("per_layer",), "shared_intermediate_size": (0,)},
        form=Form(qk_norm="all"),
        mixture=Mixture(normed=True, scores="sigmoid", biased=True),
        names=Names(
            modules=MIXTRAL_MODULES,
            tensors={f"block_sparse_moe.{CORRECTION}": "mlp.expert_bias"},
        ),
    ),
    "exaone_moe": Architecture(
        models="K-EXAONE",
        keys={**HEAD_DIM, "sliding_window_pattern": 4},
        key_names={"n_shared_experts": "num_shared_experts"},
        neutral=ROUTED,
        form=Form(qk_norm="head"),
        windows="listed",
        full_every=4,
        unrotated="full",
        mixture=BIASED,
        names=Names(
            modules={**GATE, **SHARED},
            tensors={f"mlp.{gate}{CORRECTION}": "mlp.expert_bias" for gate in ("gate.", "")},
            aside=("mtp.",),  # the multi-token-prediction head
        ),
    ),
}  # fmt: skip
