"""The classes with state spaces: Granite 4, Bamba, Falcon-H1, Nemotron-H, Mamba-2, Mamba."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pilotfish.export.architectures.architecture import (
    ATTENTION,
    DECODER,
    MLP,
    REQUIRED,
    Architecture,
    Names,
)
from pilotfish.export.architectures.biased_experts import (
    BIASED,
    CORRECTION,
    SCALED,
    SHARED,
    UNGROUPED,
)
from pilotfish.export.architectures.experts import GRANITE_MOE, WITH_SHARED
from pilotfish.export.architectures.llama import GRANITE
from pilotfish.export.model_config import Form, Kind

CONV, PROJECTIONS = "mamba.conv1d", ("mamba.in_proj", "mamba.out_proj")
SPACE: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": None,
}
"""Keys of state spaces in Granite, Bamba and Falcon-H1; steps are unlimited by default."""
LINEAR: Mapping[str, Kind] = {"linear_attention": "space", "mamba": "space"}
UNREAD = frozenset({"mamba_chunk_size", "num_logits_to_keep"})
# Keys for initialisation, and the dtype of the residual stream, which matters only in half
# precision.
INITIAL = frozenset({
    "chunk_size", "expand", "residual_in_fp32", "time_step_floor",
    "time_step_max", "time_step_min", "time_step_rank",
})  # fmt: skip
# This key is for initialisation, too, but if it is true, transformers also changes loaded weights.
UNSCALED = {"rescale_prenorm_residual": (False,)}
BLOCK = {"norm": "input_layernorm", "mixer": "mamba"} | {
    f"mixer.{part}": f"mamba.{part}"
    for part in ("in_proj", "out_proj", "conv1d", "norm", "x_proj", "dt_proj")
}
EXPERT_MODULES = ("", ""), ("experts.*.", "experts.*."), ("shared_experts.", "shared_expert.")
LATENT = ("mlp.latent_in", "mlp.latent_out")
PUBLISHED = frozenset({"normalization_function", "init_method", "shared_expert_num_layers"})

FED = Names(
    outer={"final_layernorm": "norm"},
    modules={
        "pre_ff_layernorm": "post_attention_layernorm",
        **{f"feed_forward.{name[4:]}": name for name in MLP},
    },
)

GRANITE_HYBRID = replace(
    GRANITE,
    models="Granite 4 (models without Mamba also read trees and can be cut into stages)",
    gguf=None,
    keys={
        **{key: value for key, value in GRANITE.keys.items() if key != "mlp_bias"},
        **SPACE,
        "position_embedding_type": None,
        "layer_types": None,
        "num_local_experts": 8,
    },
    key_names={"intermediate_size": "shared_intermediate_size"},
    aliases={"layers_block_type": "layer_types"},
    biases={
        "attention_bias": ATTENTION,
        "mamba_conv_bias": (CONV,),
        "mamba_proj_bias": PROJECTIONS,
    },
    neutral={"num_local_experts": (0,)},
    inert=UNREAD | PUBLISHED | {
        "intermediate_size", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef",
    },
    unrotated="listed",
    states=LINEAR,
    names=Names(
        modules={"shared_mlp.output_linear": "mlp.down_proj"},
        fused={"shared_mlp.input_linear": MLP[:2]},
    ),
)  # fmt: skip

MAMBA = Architecture(
    models="Mamba",
    keys={
        "vocab_size": REQUIRED,
        "hidden_size": REQUIRED,
        "num_hidden_layers": REQUIRED,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "state_size": 16,
        "expand": 2,
        "conv_kernel": 4,
        "time_step_rank": "auto",
        "use_bias": False,
        "use_conv_bias": True,
    },
    key_names={"rms_norm_eps": "layer_norm_epsilon", "hidden_act": ""},
    inert=INITIAL - {"expand", "time_step_rank"} | {
        "time_step_init_scheme", "time_step_scale", "use_mambapy",
        "use_associative_scan",
    },
    neutral={"hidden_act": ("silu",), **UNSCALED},
    biases={"use_bias": PROJECTIONS, "use_conv_bias": (CONV,), "": ("mamba.dt_proj",)},
    unrotated="all",
    states={"linear_attention": "selective"},
    one_part=True,
    names=Names(
        body="backbone",
        outer={"embeddings": "embed_tokens", "embedding": "embed_tokens", "norm_f": "norm"},
        modules=BLOCK,
    ),
)  # fmt: skip

STATE_SPACES: dict[str, Architecture] = {
    "granitemoehybrid": replace(
        GRANITE_HYBRID,
        with_experts=replace(
            GRANITE_HYBRID,
            keys={
                **{k: v for k, v in GRANITE_HYBRID.keys.items() if k != "num_local_experts"},
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "shared_expert_intermediate_size": 1024,
            },
            key_names={
                "num_experts": "num_local_experts",
                "shared_expert_intermediate_size": "shared_intermediate_size",
            },
            neutral={},
            inert=UNREAD | PUBLISHED | GRANITE_MOE.inert,
            mixture=GRANITE_MOE.mixture,
            names=WITH_SHARED,
        ),
    ),
    "bamba": Architecture(
        models="Bamba",
        keys={
            **DECODER,
            **SPACE,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attn_layer_indices": None,
            "partial_rotary_factor": 0.5,
            "attention_bias": False,
            "mlp_bias": False,
        },
        inert=UNREAD | {"z_loss_coefficient", "attn_rotary_emb"},
        biases={
            "attention_bias": ATTENTION,
            "mlp_bias": MLP,
            "mamba_conv_bias": (CONV,),
            "mamba_proj_bias": PROJECTIONS,
        },
        states=LINEAR,
        names=FED,
    ),
    "falcon_h1": Architecture(
        models="Falcon-H1",
        keys={
            **DECODER,
            **SPACE,
            "num_key_value_heads": 8,
            "head_dim": None,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "projectors_bias": False,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "logit_scale": 1.0,
            "embedding_multiplier": 1.0,
            "key_multiplier": 1.0,
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": 1.0,
            "ssm_multipliers": None,
            "mlp_multipliers": None,
        },
        key_names={"logit_scale": "lm_head_multiplier"},
        inert=UNREAD | {"mamba_use_mlp", "mlp_expansion_factor", "attn_layer_indices"},
        biases={
            "attention_bias": ATTENTION,
            "mlp_bias": MLP,
            "mamba_conv_bias": (CONV,),
            "mamba_proj_bias": PROJECTIONS[:1],
            "projectors_bias": PROJECTIONS[1:],
        },
        states={"hybrid": "both"},
        names=FED,
    ),
    "nemotron_h": Architecture(
        models="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano and Super",
        keys={
            **{key: DECODER[key] for key in DECODER if key not in {
                "num_hidden_layers", "rope_theta", "tie_word_embeddings"}},
            "layers_block_type": None,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "mlp_bias": False,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "mamba_hidden_act": "silu",
            "time_step_min": 0.001,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "shared_expert_intermediate_size": 7688,
            "moe_latent_size": None,
            **SCALED,
        },
        key_names={
            "num_experts": "n_routed_experts",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
            "hidden_act": "mlp_hidden_act",
            "rms_norm_eps": "layer_norm_epsilon",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_proj_bias": "use_bias",
            "tie_word_embeddings": "",
        },
        aliases={
            "layer_types": "layers_block_type", "num_local_experts": "n_routed_experts",
        },
        echoes=dict.fromkeys(("norm_eps", "rms_norm_eps"), "layer_norm_epsilon"),
        inert=UNREAD | (INITIAL - {"time_step_min"}) | {
            "hybrid_override_pattern", "num_hidden_layers", "rescale_prenorm_residual",
            "mamba_proj_bias", "time_step_limit", "mamba_ssm_cache_dtype", "use_mamba_kernels",
            "rope_theta", "partial_rotary_factor",
            # Without layers with experts, the keys of experts have no effect.
            "n_routed_experts", "n_shared_experts", "moe_intermediate_size",
            "moe_shared_expert_intermediate_size", "moe_latent_size", "moe_shared_expert_overlap",
            "num_experts_per_tok", "routed_scaling_factor", "norm_topk_prob",
            "output_router_logits", "num_nextn_predict_layers", "mtp_layers_block_type",
            "mtp_hybrid_override_pattern", "attention_head_dim",
        },
        neutral={"tie_word_embeddings": (False,), **UNGROUPED},
        form=Form(gated=False),
        biases={
            "mlp_bias": (*MLP[1:], *LATENT, *list(SHARED.values())[1:]),
            "mamba_conv_bias": (CONV,),
            "mamba_proj_bias": PROJECTIONS,
        },
        unrotated="all",
        states={**LINEAR, "mlp": "none", "moe": "none"},
        one_part=True,
        mixture=BIASED,
        names=Names(
            body="backbone",
            outer={"embeddings": "embed_tokens", "norm_f": "norm"},
            modules={
                **BLOCK,
                **{f"mixer.{name[10:]}": name for name in ATTENTION},
                **{
                    f"mixer.{theirs}{name[4:]}": f"mlp.{ours}{name[4:]}"
                    for theirs, ours in EXPERT_MODULES for name in MLP[1:]
                },
                "mixer.gate": "mlp.router",
                "mixer.fc1_latent_proj": LATENT[0],
                "mixer.fc2_latent_proj": LATENT[1],
            },
            tensors={f"mixer.gate.{CORRECTION}": "mlp.expert_bias"},
            aside=("mtp.",),  # the multi-token-prediction head
        ),
    ),
    "mamba": MAMBA,
    "falcon_mamba": replace(
        MAMBA,
        models="Falcon Mamba",
        keys={**MAMBA.keys, "mixer_rms_eps": 1e-6},
        inert=MAMBA.inert | {"use_falcon_mambapy"},
    ),
    "mamba2": Architecture(
        models="Mamba-2, Codestral Mamba",
        keys={
            "vocab_size": REQUIRED,
            "hidden_size": REQUIRED,
            "num_hidden_layers": REQUIRED,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "mamba_n_heads": REQUIRED,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "time_step_limit": None,
        },
        key_names={
            "rms_norm_eps": "layer_norm_epsilon",
            "mamba_n_heads": "num_heads",
            "mamba_d_head": "head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_expand": "expand",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_proj_bias": "use_bias",
        },
        inert=UNREAD | INITIAL - {"expand"},
        neutral=UNSCALED,
        biases={"mamba_conv_bias": (CONV,), "mamba_proj_bias": PROJECTIONS},
        unrotated="all",
        states=LINEAR,
        one_part=True,
        names=Names(
            body="backbone",
            outer={"embeddings": "embed_tokens", "embedding": "embed_tokens", "norm_f": "norm"},
            modules=BLOCK,
        ),
    ),
}  # fmt: skip
