"""Gemma 1 to 3: norms of 1 + weight, scaled embeddings; from 2 on, norms on both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pilotfish.export.architectures.architecture import (
    ATTENTION,
    DECODER,
    Architecture,
    Gguf,
    Names,
)
from pilotfish.export.config import Form

BOTH_SIDES = Names(
    modules={
        "post_attention_layernorm": "attention_out_norm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "mlp_out_norm",
    }
)
FOUR = ("input_layernorm", "attention_out_norm", "post_attention_layernorm", "mlp_out_norm")


def _scale_of(largest: int) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Scale scores as llama.cpp does, which knows the 27B model by its number of layers."""

    def given(values: Mapping[str, Any]) -> Mapping[str, Any]:
        of_heads = values["hidden_size"] // values["num_attention_heads"]
        large = values["num_hidden_layers"] == largest
        return {"query_pre_attn_scalar": of_heads if large else values["head_dim"]}

    return given


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
    activations={"gelu": "gelu_tanh"},  # in files of its first days
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
    called={"hidden_act": "hidden_activation"},
    echoes={},
    inert=frozenset({"hidden_act", "cache_implementation", "sliding_window_size"}),
    neutral={"use_bidirectional_attention": (None, False)},
    activations={},
    form=Form(norms=FOUR),
    windows="listed",
    full_every=2,
    names=BOTH_SIDES,
    gguf=Gguf(name="gemma2", given=_scale_of(46)),
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
        # What is made of them differs between its text model and its multimodal one.
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
    },
    form=Form(norms=FOUR, qk_norm="head"),
    full_every=6,
    rope_by_type=True,
    gguf=Gguf(name="gemma3", given=_scale_of(62)),
)
GEMMAS: dict[str, Architecture] = {
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "vaultgemma": replace(
        GEMMA2,
        models="VaultGemma",
        form=Form(),
        names=Names(modules={"pre_feedforward_layernorm": "post_attention_layernorm"}),
        gguf=None,
    ),
}
