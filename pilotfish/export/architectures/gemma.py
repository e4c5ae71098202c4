"""Gemma 1 to 4. All scale the embeddings; Gemma 2 to 4 have norms before and after each part.

In Gemma 1 to 3, norms multiply by 1 + weight. Gemma 3n and 4 add per-layer embeddings, norms of
values, and layers that read the keys and values of earlier layers. Gemma 3n has parallel residual
streams. Gemma 4 has heads of another width in layers without a window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pilotfish.export.architectures.architecture import (
    Architecture,
    Gguf,
    Mixture,
    Names,
    stack_experts,
)
from pilotfish.export.model_config import Form

BOTH_SIDES = Names(
    modules={
        "post_attention_layernorm": "attention_out_norm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "mlp_out_norm",
    }
)
FOUR = ("input_layernorm", "attention_out_norm", "post_attention_layernorm", "mlp_out_norm")


def _derive_score_scale(largest: int) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return a rule for the score scale; as in llama.cpp, it recognises 27B by the layer count."""

    def derive(values: Mapping[str, Any]) -> Mapping[str, Any]:
        of_heads = values["hidden_size"] // values["num_attention_heads"]
        large = values["num_hidden_layers"] == largest
        return {"query_pre_attn_scalar": of_heads if large else values["head_dim"]}

    return derive


GEMMA = Architecture(
    models="Gemma 1",
    activations={"gelu": "gelu_tanh"},  # the first Gemma files state gelu, but mean gelu_tanh
    neutral={"use_bidirectional_attention": (False,)},
    embed_root=True,
    plus_one=True,
    gguf=Gguf(name="gemma"),
)
GEMMA2 = replace(
    GEMMA,
    models="Gemma 2",
    key_names={"hidden_act": "hidden_activation"},
    activations={},
    form=Form(norms=FOUR),
    windows="listed",
    full_every=2,
    names=BOTH_SIDES,
    gguf=Gguf(name="gemma2", derive=_derive_score_scale(46)),
)
GEMMA3 = replace(
    GEMMA2,
    models="Gemma 3, all sizes",
    keys={"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
    neutral={
        **GEMMA2.neutral,
        # Only null is accepted: text and multimodal models use these keys differently.
        "final_logit_softcapping": (),
        "attn_logit_softcapping": (),
    },
    form=Form(norms=FOUR, qk_norm="head"),
    full_every=6,
    rope_by_type=True,
    gguf=Gguf(name="gemma3", derive=_derive_score_scale(62)),
)
GEMMA4 = Architecture(
    models="Gemma 4: E2B, E4B, 31B, 26B-A4B",
    keys={"rope_theta": 1e6, "global_head_dim": 512, "num_global_key_value_heads": None},
    key_names={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
    neutral={"use_bidirectional_attention": ("vision",)},  # "vision" affects images only
    form=Form(norms=FOUR, qk_norm="head", value_norm=True, layer_scale=True),
    windows="listed",
    full_every=6,
    full_last=True,
    score_scale=1.0,
    rope_by_type=True,
    rotations=("default", "proportional", "linear"),
    rope_states=("rope_type", "rope_theta"),
    rope_default={
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
    },
    mixture=Mixture(normed=True, switch="enable_moe_block", parallel_mlp=True),
    embed_root=True,
    names=Names(
        modules={
            **BOTH_SIDES.modules,
            "router.proj": "mlp.router",
            "post_feedforward_layernorm_1": "mlp.own_norm",
            "post_feedforward_layernorm_2": "mlp.experts_out_norm",
            "pre_feedforward_layernorm_2": "mlp.experts_norm",
        },
        tensors={
            "router.scale": "mlp.router_norm.weight",
            "router.per_expert_scale": "mlp.router_scale",
        },
        stacked=stack_experts("experts.gate_up_proj", "experts.down_proj"),
    ),
    gguf=Gguf(
        name="gemma4",
        keys={"attention.key_length": "global_head_dim", "attention.key_length_swa": "head_dim"},
        tensors={"enable_moe_block": "mlp.router.weight"},
    ),
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    models="Gemma 4 12B",
    key_names={"hidden_act": "hidden_activation"},
    mixture=None,
    names=BOTH_SIDES,
)
GEMMA3N = replace(
    GEMMA4,
    models="Gemma 3n: E2B, E4B",
    keys={"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    key_names={"hidden_act": "hidden_activation"},
    neutral={},
    form=Form(norms=FOUR, qk_norm="head", value_norm=True),
    not_null=("final_logit_softcapping",),
    full_every=5,
    full_last=False,
    rotations=("default", "linear"),
    rope_states=(),
    rope_default=None,
    mixture=None,
    names=BOTH_SIDES,
    gguf=None,
)
GEMMAS: dict[str, Architecture] = {
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4_UNIFIED,
    "gemma3n_text": GEMMA3N,
    "vaultgemma": replace(
        GEMMA2,
        models="VaultGemma",
        form=Form(),
        names=Names(modules={"pre_feedforward_layernorm": "post_attention_layernorm"}),
        gguf=None,
    ),
}
