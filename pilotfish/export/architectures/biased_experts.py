"""The classes with mixtures of experts that a router with a bias for the choice selects.

The bias is a tensor of the checkpoint; it changes which experts are chosen, and not their weights.
"""

from __future__ import annotations

from pilotfish.export.architectures.architecture import (
    ATTENTION,
    HEAD_DIM,
    MLP,
    QKV,
    Architecture,
    Mixture,
    Names,
)
from pilotfish.export.architectures.experts import GATE, LOCAL, MIXTRAL_MODULES, PARTS
from pilotfish.export.model_config import Form

# The router of DeepSeek-V3 without groups, which most of these classes have.
BIASED = Mixture(scores="sigmoid", biased=True, epsilon=1e-20)
ROUTED = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
CORRECTION = "e_score_correction_bias"
SHARED = {f"mlp.shared_experts.{part}": f"mlp.shared_expert.{part}" for part in PARTS}

BIASED_MIXTURES: dict[str, Architecture] = {
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
        biases={"use_bias": (*ATTENTION, *MLP, *SHARED.values(), "lm_head")},
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
