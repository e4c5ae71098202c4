"""The classes with layer norms, or with attention and feed-forward part in parallel.

These are Phi, Cohere, GLM, StableLM, Nemotron and StarCoder 2.
"""

from __future__ import annotations

from dataclasses import replace

from pilotfish.export.architectures.architecture import (
    ALL,
    ATTENTION,
    DECODER,
    GATE_UP,
    MLP,
    QKV,
    Architecture,
    Gguf,
    Names,
)
from pilotfish.export.model_config import Form

LAYER_NORMS = Form(norm="layer", norm_bias=True)
ONE_NORM = ("input_layernorm",)
LAYER_EPS = {"rms_norm_eps": "layer_norm_eps"}

PHI3 = Architecture(
    models="Phi 3, 3.5, 4 and 4 mini",
    keys={
        **DECODER,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 4096,
    },
    inert=frozenset({"auto_map", "full_attn_mod", "interpolate_factor", "embd_pdrop"}),
    neutral={"lm_head_bias": (False,)},
    windows="all",
    rotations=("default", "longrope", "su"),
    names=Names(fused={"self_attn.qkv_proj": QKV, **GATE_UP}),
    gguf=Gguf(name="phi3", fused={"attn_qkv": QKV, "ffn_up": MLP[:2]}),
)
COHERE = Architecture(
    models="Command R",
    keys={
        **DECODER,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "logit_scale": 0.0625,
        "use_qk_norm": False,
        "rope_theta": 5e5,
    },
    key_names=LAYER_EPS,
    inert=frozenset({"model_max_length"}),
    form=Form(norm="layer", norms=ONE_NORM, parallel=True),
    vary=lambda stated: {"qk_norm": "heads"} if stated("use_qk_norm") else {},
    biases={"attention_bias": ATTENTION},
    interleaved=True,
    gguf=Gguf(name="command-r", tensors={"use_qk_norm": "self_attn.q_norm.weight"}),
)
GLM = Architecture(
    models="GLM 4, GLM Edge",
    keys={
        **DECODER,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    biases={"attention_bias": QKV},
    interleaved=True,
    names=Names(fused=GATE_UP),
)

VARIANTS: dict[str, Architecture] = {
    "phi": Architecture(
        models="Phi 1, 1.5 and 2",
        keys={**DECODER, "hidden_act": "gelu_new", "rms_norm_eps": 1e-5,
              "partial_rotary_factor": 0.5},
        key_names=LAYER_EPS,
        neutral={"qk_layernorm": (False,)},
        form=Form(norm="layer", norm_bias=True, norms=ONE_NORM, parallel=True, gated=False),
        biases={"": (*ATTENTION, *MLP, "lm_head")},
        names=Names(
            outer={"final_layernorm": "norm"},
            modules={"self_attn.dense": "self_attn.o_proj", "mlp.fc1": "mlp.up_proj",
                     "mlp.fc2": "mlp.down_proj"},
        ),
        gguf=Gguf(name="phi2"),
    ),
    "phi3": PHI3,
    "cohere": COHERE,
    "cohere2": replace(
        COHERE,
        models="Command R7B, Command A",
        keys={
            **{key: value for key, value in COHERE.keys.items() if key != "use_qk_norm"},
            "rope_theta": 1e4,
            "sliding_window": 4096,
            "layer_types": None,
            "sliding_window_pattern": 4,
        },
        inert=frozenset({"head_dim", "cache_implementation", "layer_switch",
                         "order_of_interleaved_layers",
                         "position_embedding_type", "rotary_pct", "use_embedding_sharing",
                         "use_gated_activation", "use_parallel_block",
                         "use_parallel_embedding"}),
        vary=None,
        windows="listed",
        full_every=4,
        unrotated="full",
        gguf=Gguf(name="cohere2"),
    ),
    "glm": GLM,
    "glm4": replace(
        GLM,
        models="GLM 4-0414",
        form=Form(norms=("input_layernorm", "attention_out_norm", "post_attention_layernorm",
                         "mlp_out_norm")),
        names=Names(
            modules={"post_self_attn_layernorm": "attention_out_norm",
                     "post_mlp_layernorm": "mlp_out_norm"},
            fused=GATE_UP,
        ),
        gguf=Gguf(name="glm4", fused={"ffn_up": MLP[:2]}),
    ),
    "stablelm": Architecture(
        models="StableLM 2",
        keys={**DECODER, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "use_qkv_bias": False,
              "qk_layernorm": False, "use_parallel_residual": False,
              "partial_rotary_factor": 0.25},
        key_names=LAYER_EPS,
        form=LAYER_NORMS,
        vary=lambda stated: {
            "qk_norm": "heads" if stated("qk_layernorm") else None,
            "parallel": stated("use_parallel_residual"),
            "norms": ONE_NORM if stated("use_parallel_residual") else LAYER_NORMS.norms,
        },
        biases={"use_qkv_bias": QKV},
        names=Names(
            listed={"self_attn.q_layernorm.norms": "self_attn.q_norm",
                    "self_attn.k_layernorm.norms": "self_attn.k_norm"},
        ),
        gguf=Gguf(name="stablelm"),
    ),
    "nemotron": Architecture(
        models="Nemotron mini, Minitron",
        keys={**DECODER, "head_dim": None, "hidden_act": "relu2", "rms_norm_eps": 1e-5,
              "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 0.5},
        key_names={"rms_norm_eps": "norm_eps"},
        echoes={"rope_percent": "partial_rotary_factor", "kv_channels": "head_dim"},
        form=Form(norm="layer", norm_bias=True, gated=False),
        biases={"attention_bias": ATTENTION, "mlp_bias": MLP},
        plus_one=True,
        gguf=Gguf(name="nemotron"),
    ),
    "starcoder2": Architecture(
        models="StarCoder 2",
        keys={**DECODER, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
              "rms_norm_eps": 1e-5, "sliding_window": None, "use_bias": True,
              "tie_word_embeddings": True},
        key_names={"rms_norm_eps": "norm_epsilon"},
        echoes={"layer_norm_epsilon": "norm_epsilon"},
        inert=frozenset({"residual_dropout", "embedding_dropout", "norm_type", "mlp_type",
                         "activation_function", "attention_softmax_in_fp32",
                         "scale_attention_softmax_in_fp32", "scale_attn_weights"}),
        form=Form(norm="layer", norm_bias=True, gated=False),
        biases={"use_bias": ALL},
        windows="all",
        names=Names(modules={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
        gguf=Gguf(name="starcoder2"),
    ),
}  # fmt: skip
