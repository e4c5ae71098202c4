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
    ATTENTION,
    DECODER,
    Architecture,
    Gguf,
    Mixture,
    Names,
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
    keys={
        **DECODER,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
    biases={"attention_bias": ATTENTION},
    activations={"gelu": "gelu_tanh"},  # the first Gemma files state gelu, but mean gelu_tanh
    neutral={"use_bidirectional_attention": (None, False), "hidden_activation": (None,)},
    echoes={"hidden_activation": "hidden_act"},
    embed_root=True,
    plus_one=True,
    gguf=Gguf(name="gemma"),
)
GEMMA2 = replace(
    GEMMA,
    models="Gemma 2",
    keys={
        **GEMMA.keys,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    key_names={"hidden_act": "hidden_activation"},
    echoes={},
    inert=frozenset({"hidden_act", "cache_implementation", "sliding_window_size"}),
    neutral={"use_bidirectional_attention": (None, False)},
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
    keys={
        **{key: value for key, value in GEMMA2.keys.items() if "softcapping" not in key},
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
    neutral={
        **GEMMA2.neutral,
        # Only null is accepted: text and multimodal models use these keys differently.
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
    },
    form=Form(norms=FOUR, qk_norm="head"),
    full_every=6,
    rope_by_type=True,
    gguf=Gguf(name="gemma3", derive=_derive_score_scale(62)),
)
TOKEN_INPUTS = {
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
}
ONLY_4 = {
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "num_experts": None,
    "num_experts_per_tok": None,
    "moe_intermediate_size": None,
}
GEMMA4 = Architecture(
    models="Gemma 4: E2B, E4B, 31B, 26B-A4B",
    keys={
        **DECODER,
        **TOKEN_INPUTS,
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 512,
        "layer_types": None,
        "final_logit_softcapping": None,
        **ONLY_4,
    },
    key_names={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
    neutral={
        "use_bidirectional_attention": (None, "vision"),  # "vision" affects images only
        "top_k_experts": (None,),
        "moe_intermediate_size": (None,),
    },
    biases={"attention_bias": ATTENTION},
    form=Form(norms=FOUR, qk_norm="head", value_norm=True, layer_scale=True),
    windows="listed",
    full_every=6,
    full_last=True,
    shares_kv=True,
    global_heads=True,
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
        stacked={
            "experts.gate_up_proj": (
                "mlp.experts.*.gate_proj.weight",
                "mlp.experts.*.up_proj.weight",
            ),
            "experts.down_proj": ("mlp.experts.*.down_proj.weight",),
        },
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
    keys={
        **{
            key: value
            for key, value in GEMMA4.keys.items()
            if not key.endswith("per_layer_input") and "expert" not in key and "moe" not in key
        },
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
    },
    key_names={"hidden_act": "hidden_activation"},
    # Files may have Gemma 4's keys of parts that this class does not have.
    inert=GEMMA4.inert | {"vocab_size_per_layer_input"},
    neutral={
        **GEMMA4.neutral,
        "hidden_size_per_layer_input": (0, None),
        "enable_moe_block": (False,),
    },
    mixture=None,
    names=BOTH_SIDES,
)
GEMMA3N = replace(
    GEMMA4,
    models="Gemma 3n: E2B, E4B",
    keys={
        **{key: value for key, value in GEMMA4.keys.items() if key not in ONLY_4},
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "final_logit_softcapping": 30.0,
        "num_kv_shared_layers": 15,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "laurel_rank": 64,
        "activation_sparsity_pattern": None,
    },
    key_names={"hidden_act": "hidden_activation"},
    inert=frozenset({"altup_coef_clip", "hidden_act"}),  # keys for training only
    neutral={},
    form=Form(norms=FOUR, qk_norm="head", value_norm=True),
    not_null=("final_logit_softcapping",),
    full_every=5,
    full_last=False,
    global_heads=False,
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
