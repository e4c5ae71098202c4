"""The classes with mixtures of experts that a router with a bias for the choice selects.

The bias is a tensor of the checkpoint; it changes which experts are chosen, and not their weights.
"""

from __future__ import annotations

from pilotfish.export.architectures.architecture import (
    ATTENTION,
    DECODER,
    MLP,
    QKV,
    Architecture,
    Mixture,
    Names,
)
from pilotfish.export.architectures.experts import ALSO_LOCAL, GATE, PARTS, TRAINING
from pilotfish.export.model_config import Form

# The router of DeepSeek-V3 without groups, which most of these classes have.
BIASED = Mixture(scores="sigmoid", biased=True, epsilon=1e-20)
UNGROUPED = {"n_group": (1,), "topk_group": (1,)}
ROUTED = {**UNGROUPED, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
CORRECTION = "e_score_correction_bias"
SHARED = {f"mlp.shared_experts.{part}": f"mlp.shared_expert.{part}" for part in PARTS}
GQA = {**DECODER, "head_dim": None, "rms_norm_eps": 1e-5}
SCALED = {"norm_topk_prob": True, "routed_scaling_factor": 1.0}

BIASED_MIXTURES: dict[str, Architecture] = {
    "glm4_moe": Architecture(
        models="GLM 4.5, 4.6, 4.7",
        keys={
            **GQA, **SCALED, "num_key_value_heads": 8, "attention_bias": False,
            "partial_rotary_factor": 0.5, "use_qk_norm": False, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
        },
        key_names={"num_experts": "n_routed_experts"},
        aliases={"num_local_experts": "n_routed_experts",
                 "num_mtp_layers": "num_nextn_predict_layers"},
        inert=TRAINING,
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
        keys={
            **GQA, "num_key_value_heads": 4, "rope_theta": 5e5, "tie_word_embeddings": True,
            "use_bias": False, "num_experts": 64, "num_experts_per_tok": 6,
            "moe_intermediate_size": 1536, "n_shared_experts": 2, "first_k_dense_replace": 1,
            "moe_layer_end_index": -1, "decoder_sparse_step": 1, "moe_norm_min": 1e-12,
        },
        key_names={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k",
                   "n_shared_experts": "moe_num_shared_experts",
                   "first_k_dense_replace": "moe_layer_start_index",
                   "decoder_sparse_step": "moe_layer_interval"},
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        inert=TRAINING | {
            "moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers",
        },
        neutral={"moe_gate_act": (None, "softmax")},
        biases={"use_bias": (*ATTENTION, *MLP, *SHARED.values(), "lm_head")},
        mixture=Mixture(normed=True, biased=True),
        interleaved=True,
        names=Names(
            modules={**GATE, **SHARED},
            tensors={f"mlp.moe_statics.{CORRECTION}": "mlp.expert_bias"},
            aside=("model.mtp_",),  # the multi-token-prediction head
        ),
    ),
    "exaone_moe": Architecture(
        models="K-EXAONE",
        keys={
            **GQA, **SCALED, "num_key_value_heads": 32, "sliding_window": 4096,
            "layer_types": None, "sliding_window_pattern": 4, "num_experts": 64,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "mlp_layer_types": None, "routed_scaling_factor": 2.5,
        },
        key_names={"n_shared_experts": "num_shared_experts"},
        aliases=ALSO_LOCAL,
        # The first two keys repeat which layers are dense.
        inert=TRAINING | {
            "is_moe_layer", "first_last_k_dense_replace", "num_nextn_predict_layers",
        },
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
