"""The classes with mixtures of experts.

If a class has the key `num_experts`, all layers have experts, except those that
`decoder_sparse_step` and `mlp_only_layers` exclude.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pilotfish.export.architectures.architecture import (
    ATTENTION,
    DECODER,
    QKV,
    REQUIRED,
    Architecture,
    Gguf,
    Mixture,
    Names,
)
from pilotfish.export.architectures.llama import GRANITE_GGUF, SCALED
from pilotfish.export.model_config import Form

NORMED = Mixture(normed=True)
TRAINING = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
# Keys without effect. The last two keys have none because use_sliding_window must be false.
UNSWITCHED = TRAINING | {"sliding_window", "max_window_layers"}
GATE = {"mlp.gate": "mlp.router"}
PARTS = ("gate_proj", "up_proj", "down_proj")
EVERY = tuple(f"mlp.experts.*.{part}" for part in PARTS)


def _expert_counts(count: int, chosen: int) -> Mapping[str, Any]:
    """Return the number of experts and the number per token, as keys of a configuration."""
    return {"num_experts": count, "num_experts_per_tok": chosen}


LOCAL = {"num_experts": "num_local_experts"}
ALSO_LOCAL = {"num_local_experts": "num_experts"}
SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}

GRANITE_MOE = Architecture(
    models="Granite 3 MoE",
    keys={**DECODER, **SCALED, **_expert_counts(8, 2), "attention_bias": False},
    key_names=LOCAL,
    aliases=LOCAL,
    inert=TRAINING,
    biases={"attention_bias": ATTENTION},
    mixture=NORMED,
    names=Names(
        modules={"block_sparse_moe.router.layer": "mlp.router"},
        stacked={
            "block_sparse_moe.input_linear.weight": (
                "mlp.experts.*.gate_proj.weight",
                "mlp.experts.*.up_proj.weight",
            ),
            "block_sparse_moe.output_linear.weight": ("mlp.experts.*.down_proj.weight",),
        },
    ),
    gguf=replace(GRANITE_GGUF, name="granitemoe"),
)

WITH_SHARED = replace(
    GRANITE_MOE.names,
    modules={
        **GRANITE_MOE.names.modules,
        "shared_mlp.output_linear": "mlp.shared_expert.down_proj",
    },
    fused={
        "shared_mlp.input_linear": (
            "mlp.shared_expert.gate_proj",
            "mlp.shared_expert.up_proj",
        )
    },
)
MIXTURES: dict[str, Architecture] = {
    "mixtral": Architecture(
        models="Mixtral",
        keys={
            **DECODER,
            **_expert_counts(8, 2),
            "num_key_value_heads": 8,
            "head_dim": None,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "layer_types": None,
        },
        key_names=LOCAL,
        aliases=LOCAL,
        inert=TRAINING,
        windows="all",
        mixture=NORMED,
        names=Names(
            modules={
                "block_sparse_moe.gate": "mlp.router",
                **{
                    f"block_sparse_moe.experts.*.w{i}": f"mlp.experts.*.{part}_proj"
                    for i, part in ((1, "gate"), (2, "down"), (3, "up"))
                },
            }
        ),
        gguf=Gguf(name="llama", when="expert_count", interleaved=True),
    ),
    "qwen2_moe": Architecture(
        models="Qwen1.5-MoE, Qwen2-MoE",
        keys={
            **DECODER,
            **_expert_counts(60, 4),
            **SPARSE,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        aliases=ALSO_LOCAL,
        inert=UNSWITCHED,
        biases={"qkv_bias": QKV},
        mixture=Mixture(shared_gate=True),
        names=Names(modules=GATE),
        gguf=Gguf(name="qwen2moe"),
    ),
    "qwen3_moe": Architecture(
        models="Qwen 3 MoE",
        keys={
            **DECODER,
            **_expert_counts(128, 8),
            **SPARSE,
            "num_key_value_heads": 4,
            "head_dim": None,
            "attention_bias": False,
            "moe_intermediate_size": 768,
        },
        aliases=ALSO_LOCAL,
        inert=UNSWITCHED,
        form=Form(qk_norm="head"),
        biases={"attention_bias": ATTENTION},
        mixture=Mixture(),
        names=Names(modules=GATE),
        gguf=Gguf(name="qwen3moe", derive=lambda _: {"norm_topk_prob": True}),
    ),
    "olmoe": Architecture(
        models="OLMoE",
        keys={
            **DECODER,
            **_expert_counts(64, 8),
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
        },
        aliases=ALSO_LOCAL,
        inert=TRAINING,
        neutral={"clip_qkv": (None,)},
        form=Form(qk_norm="all"),
        biases={"attention_bias": ATTENTION},
        mixture=Mixture(),
        names=Names(modules=GATE),
        gguf=Gguf(name="olmoe"),
    ),
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": replace(
        GRANITE_MOE,
        models="Granite MoE with a shared expert",
        keys={**GRANITE_MOE.keys, "shared_expert_intermediate_size": REQUIRED},
        key_names={**LOCAL, "shared_expert_intermediate_size": "shared_intermediate_size"},
        names=WITH_SHARED,
        gguf=replace(GRANITE_GGUF, name="granitemoe", when="expert_shared_feed_forward_length"),
    ),
    "gpt_oss": Architecture(
        models="gpt-oss",
        keys={
            **DECODER,
            **_expert_counts(128, 4),
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "attention_bias": True,
            "sliding_window": 128,
            "layer_types": None,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        key_names=LOCAL,
        aliases=LOCAL,
        inert=TRAINING | {"experts_per_token", "initial_context_length"},
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
                f"mlp.experts.{stored}{mark}": tuple(
                    f"mlp.experts.*.{part}.{kind}" for part in parts
                )
                for stored, parts in (("gate_up_proj", PARTS[:2]), ("down_proj", PARTS[2:]))
                for mark, kind in (("", "weight"), ("_bias", "bias"))
            },
            columns=True,
            alternating=True,
        ),
        gguf=Gguf(name="gpt-oss", modules={"post_attention_norm": "post_attention_layernorm"}),
    ),
}
