"""The classes with mixtures of experts.

If a class has the key `num_experts`, all layers have experts, except those that
`decoder_sparse_step` and `mlp_only_layers` exclude.
"""

from __future__ import annotations

from dataclasses import replace

from pilotfish.export.architectures.architecture import (
    ATTENTION,
    HEAD_DIM,
    QKV,
    Architecture,
    Gguf,
    Mixture,
    Names,
)
from pilotfish.export.architectures.llama import GRANITE_GGUF
from pilotfish.export.model_config import Form

NORMED = Mixture(normed=True)
GATE = {"mlp.gate": "mlp.router"}
PARTS = ("gate_proj", "up_proj", "down_proj")
EVERY = tuple(f"mlp.experts.*.{part}" for part in PARTS)


LOCAL = {"num_experts": "num_local_experts"}

GRANITE_MOE = Architecture(
    models="Granite 3 MoE",
    key_names=LOCAL,
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
        key_names=LOCAL,
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
        biases={"attention_bias": ATTENTION},
        windows="all",
        mixture=Mixture(),
        names=Names(modules=GATE),
        gguf=Gguf(name="qwen3moe", derive=lambda _: {"norm_topk_prob": True}),
    ),
    "olmoe": Architecture(
        models="OLMoE",
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
