"""Llama, and the classes that differ from Llama in a few parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pilotfish.export.architectures.architecture import (
    ATTENTION,
    HEAD_DIM,
    MLP,
    QKV,
    Architecture,
    Gguf,
    Names,
    Stated,
)
from pilotfish.export.model_config import Form

SANDWICH = ("attention_out_norm", "mlp_out_norm")
OUT_NORMS = Names(
    modules={
        "post_attention_layernorm": "attention_out_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    }
)
BY_HEAD = Form(qk_norm="head")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _internlm3(stated: Stated) -> Mapping[str, Any]:
    if stated("attention_bias") != stated("mlp_bias"):
        raise ValueError("qkv_bias and bias differ, which transformers does not support either")
    return {}


def _llama4(stated: Stated) -> Mapping[str, Any]:
    rotations = stated("no_rope_layers")
    rotated = isinstance(rotations, list) and rotations and all(rotations)
    if stated("moe_layers") != [] or not rotated or not stated("layer_types"):
        raise ValueError(
            "Llama 4 is supported only with moe_layers [] (without experts), layer_types and "
            "rotation in all layers (no_rope_layers without 0): take a GGUF file with --dialect "
            "llamacpp, if llama.cpp has this model"
        )
    return {"qk_norm": "head" if stated("use_qk_norm") else None}


LLAMA = Architecture(
    models="Llama 2 to 3.3, SmolLM 1 and 2, TinyLlama, Falcon 3, Yi, DeepSeek-R1-Distill-Llama",
    gguf=Gguf(name="llama", interleaved=True),  # Mistral's files also have this name
)
MISTRAL = Architecture(
    models="Mistral 7B, Nemo, Small",
    windows="all",
    gguf=Gguf(name="mistral3", interleaved=True),
)
QWEN2 = Architecture(
    models="Qwen 2, 2.5 and 2.5-Coder, DeepSeek-R1-Distill-Qwen",
    keys=HEAD_DIM,
    biases={"": QKV},
    windows="switched",
    gguf=Gguf(name="qwen2"),
)
QWEN2_VL = replace(
    QWEN2,
    keys={"tie_word_embeddings": False},
    rope_states=("mrope_section",),
    gguf=None,
)  # fmt: skip
QWEN3 = Architecture(
    models="Qwen 3 dense",
    form=BY_HEAD,
    windows="switched",
    gguf=Gguf(name="qwen3"),
)
OLMO2 = Architecture(
    models="OLMo 2",
    form=Form(norms=SANDWICH, qk_norm="all"),
    names=OUT_NORMS,
    gguf=Gguf(name="olmo2"),
)
GRANITE_GGUF = Gguf(
    name="granite",
    keys={"logit_scale": "logits_scaling"},
    neutral={"rope.scaling.finetuned": (True,)},  # llama.cpp rotates only if this is true
    interleaved=True,
)
GRANITE = replace(LLAMA, models="Granite 3", keys=HEAD_DIM, gguf=GRANITE_GGUF)

RELATIVES: dict[str, Architecture] = {
    "llama": LLAMA,
    "internlm3": replace(
        LLAMA,
        models="InternLM 3",
        vary=_internlm3,
        gguf=None,
    ),
    "iquestcoder": replace(
        LLAMA,
        models="IQuest-Coder V1",
        gguf=None,
    ),
    "llama4_text": replace(
        LLAMA,
        models="MobileLLM-R1 (Llama 4's text without experts)",
        key_names={"intermediate_size": "intermediate_size_mlp"},
        # Keys of experts, and of layers without rotation.
        unused=frozenset({"intermediate_size", "num_local_experts", "num_experts_per_tok",
                          "interleave_moe_layer_step", "attn_scale", "attention_chunk_size",
                          "attn_temperature_tuning", "floor_scale", "no_rope_layer_interval"}),
        form=Form(learned_qk_norm=False, qk_norm_late=True),
        vary=_llama4,
        interleaved=True,
        names=Names(modules={f"feed_forward.{name[4:]}": name for name in MLP}),
        gguf=None,
    ),
    "cwm": replace(
        MISTRAL,
        models="Code World Model (CWM)",
        keys={"rope_theta": 1e6},
        biases={},  # mlp_bias was not compared with transformers: it is refused
        windows="listed",
        full_first=True,
        full_every=4,
        rope_default={**LLAMA3_ROPE, "rope_theta": 1e6, "factor": 16.0},
        gguf=None,
    ),
    "mistral": MISTRAL,
    "ministral": replace(MISTRAL, models="Ministral 8B", windows="listed", gguf=None),
    "ministral3": replace(
        MISTRAL,
        models="Ministral 3",
        keys={"rope_theta": 1e6},
        rotations=("yarn",),
        rope_states=(
            "rope_theta",
            "factor",
            "original_max_position_embeddings",
            "llama_4_scaling_beta",
        ),
        rope_default={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        gguf=Gguf(name="mistral3", when="attention.temperature_scale", interleaved=True),
    ),
    "qwen2": QWEN2,
    "qwen2_vl_text": replace(QWEN2_VL, models="the text of Qwen2-VL"),
    "qwen2_5_vl_text": replace(QWEN2_VL, models="the text of Qwen2.5-VL, olmOCR 2"),
    "qwen3": QWEN3,
    "qwen3_vl_text": replace(
        QWEN3,
        models="the text of Qwen3-VL dense",
        keys={"tie_word_embeddings": False},
        windows="none",
        gguf=None,
    ),
    "smollm3": Architecture(
        models="SmolLM 3",
        keys=HEAD_DIM,
        windows="switched",
        unrotated="listed",
        gguf=Gguf(name="smollm3", interleaved=True),
    ),
    "olmo": Architecture(
        models="OLMo 1",
        keys={"rms_norm_eps": 1e-5},
        key_names={"rms_norm_eps": ""},
        form=Form(norm="layer", learned_norms=False),
        gguf=Gguf(name="olmo", interleaved=True),
    ),
    "olmo2": OLMO2,
    "olmo3": replace(
        OLMO2,
        models="OLMo 3",
        keys={"rope_theta": 5e5},
        windows="listed",
        full_every=4,
        rope_by_type=True,
        gguf=Gguf(name="olmo2", when="attention.sliding_window"),
    ),
    "granite": GRANITE,
    "exaone4": Architecture(
        models="EXAONE 4 and the text of 4.5",
        keys=HEAD_DIM,
        form=Form(norms=SANDWICH, qk_norm="head"),
        windows="listed",
        full_every=4,
        unrotated="full",
        names=OUT_NORMS,
        gguf=Gguf(name="exaone4"),
    ),
    "ernie4_5": Architecture(
        models="ERNIE 4.5 dense",
        interleaved=True,
        gguf=Gguf(name="ernie4_5"),
    ),
    "hunyuan_v1_dense": Architecture(
        models="Hunyuan dense",
        form=Form(qk_norm="head", qk_norm_late=True),
        reads_alpha=True,
        names=Names(
            modules={
                "self_attn.query_layernorm": "self_attn.q_norm",
                "self_attn.key_layernorm": "self_attn.k_norm",
            }
        ),
        gguf=Gguf(name="hunyuan-dense"),
    ),
    "apertus": Architecture(
        models="Apertus",
        keys={**HEAD_DIM, "rope_theta": 12e6},
        rope_default={**LLAMA3_ROPE, "rope_theta": 12e6, "factor": 8.0},
        form=Form(qk_norm="head", gated=False),
        activations={"xielu": "xielu"},
        names=Names(
            modules={
                "attention_layernorm": "input_layernorm",
                "feedforward_layernorm": "post_attention_layernorm",
            }
        ),
    ),
    "bitnet": Architecture(
        models="BitNet b1.58, its unpacked weights",
        keys=HEAD_DIM,
        form=Form(sub_norms=True),
        names=Names(
            modules={
                "self_attn.attn_sub_norm": "self_attn.sub_norm",
                "mlp.ffn_sub_norm": "mlp.sub_norm",
            }
        ),
    ),
    "seed_oss": Architecture(
        models="Seed-OSS",
        biases={"attention_bias": QKV, "attention_out_bias": ATTENTION[3:], "mlp_bias": MLP},
        gguf=Gguf(
            name="seed_oss", modules={"post_attention_norm": "post_attention_layernorm"}
        ),
    ),
    "arcee": Architecture(
        models="AFM 4.5B",
        form=Form(gated=False),
        gguf=Gguf(name="arcee", interleaved=True),
    ),
    "helium": Architecture(
        models="Helium 1",
        biases={"attention_bias": QKV, "mlp_bias": MLP},
        interleaved=True,
    ),
}  # fmt: skip
