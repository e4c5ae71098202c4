"""The classes with state spaces: Granite 4, Bamba, Falcon-H1, Nemotron-H, Mamba-2, Mamba."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pilotfish.export.architectures.architecture import (
    ATTENTION,
    BIASES,
    HEAD_DIM,
    MLP,
    Architecture,
    Names,
)
from pilotfish.export.architectures.experts import (
    BIASED,
    CORRECTION,
    GRANITE_MOE,
    SHARED_EXPERT,
    WITH_SHARED,
)
from pilotfish.export.architectures.llama import GRANITE
from pilotfish.export.model_config import Form, Kind

CONV, PROJECTIONS = "mamba.conv1d", ("mamba.in_proj", "mamba.out_proj")
LINEAR: Mapping[str, Kind] = {"linear_attention": "space", "mamba": "space"}
# Nemotron-H's keys of layers with experts, which many models do not have.
MIXTURE = frozenset({
    "n_routed_experts", "moe_intermediate_size", "moe_latent_size", "num_experts_per_tok",
    "moe_shared_expert_intermediate_size", "routed_scaling_factor", "norm_topk_prob",
})  # fmt: skip
# Granite's keys → Mamba-2's and Nemotron-H's.
SPACE_KEYS = {
    "rms_norm_eps": "layer_norm_epsilon",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
BLOCK = {"norm": "input_layernorm", "mixer": "mamba"} | {
    f"mixer.{part}": f"mamba.{part}"
    for part in ("in_proj", "out_proj", "conv1d", "norm", "x_proj", "dt_proj")
}
EXPERT_MODULES = ("", ""), ("experts.*.", "experts.*."), ("shared_experts.", "shared_expert.")
SPACE_BIASES = {"mamba_conv_bias": (CONV,), "mamba_proj_bias": PROJECTIONS}
LATENT = ("mlp.latent_in", "mlp.latent_out")

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
    key_names={"intermediate_size": "shared_intermediate_size"},
    biases={**BIASES, **SPACE_BIASES},
    neutral={"num_local_experts": (0,)},
    unused=frozenset({"intermediate_size", "num_experts_per_tok"}),
    unrotated="listed",
    states=LINEAR,
    names=Names(
        modules={"shared_mlp.output_linear": "mlp.down_proj"},
        fused={"shared_mlp.input_linear": MLP[:2]},
    ),
)  # fmt: skip

MAMBA = Architecture(
    models="Mamba",
    key_names={"rms_norm_eps": "layer_norm_epsilon", "hidden_act": ""},
    keys={"hidden_act": "silu"},
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
            key_names={
                "num_experts": "num_local_experts",
                "shared_expert_intermediate_size": "shared_intermediate_size",
            },
            neutral={},
            unused=frozenset(),
            mixture=GRANITE_MOE.mixture,
            names=WITH_SHARED,
        ),
    ),
    "bamba": Architecture(
        models="Bamba",
        keys={"partial_rotary_factor": 0.5},
        biases={**BIASES, **SPACE_BIASES},
        states=LINEAR,
        names=FED,
    ),
    "falcon_h1": Architecture(
        models="Falcon-H1",
        keys=HEAD_DIM,
        key_names={"logit_scale": "lm_head_multiplier"},
        biases={
            **BIASES,
            **SPACE_BIASES,
            "mamba_proj_bias": PROJECTIONS[:1],
            "projectors_bias": PROJECTIONS[1:],
        },
        states={"hybrid": "both"},
        names=FED,
    ),
    "nemotron_h": Architecture(
        models="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano and Super",
        key_names={
            "num_experts": "n_routed_experts",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
            "hidden_act": "mlp_hidden_act",
            **SPACE_KEYS,
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_d_state": "ssm_state_size",
            "tie_word_embeddings": "",
        },
        unused=MIXTURE,
        form=Form(gated=False),
        biases={
            "mlp_bias": (*MLP[1:], *LATENT, *SHARED_EXPERT[1:]),
            **SPACE_BIASES,
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
    "falcon_mamba": replace(MAMBA, models="Falcon Mamba"),
    "mamba2": Architecture(
        models="Mamba-2, Codestral Mamba",
        key_names={
            **SPACE_KEYS,
            "mamba_n_heads": "num_heads",
            "mamba_d_head": "head_dim",
            "mamba_d_state": "state_size",
            "mamba_expand": "expand",
        },
        biases=SPACE_BIASES,
        unrotated="all",
        states=LINEAR,
        one_part=True,
        names=MAMBA.names,
    ),
}  # fmt: skip
