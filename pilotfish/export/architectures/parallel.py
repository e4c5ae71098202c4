"""The classes with layer norms, or with attention and feed-forward part in parallel.

These are Phi, Cohere, GLM, StableLM, Nemotron and StarCoder 2.
"""

from __future__ import annotations

from dataclasses import replace

from pilotfish.export.architectures.architecture import (
    ATTENTION,
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
    windows="all",
    rotations=("default", "longrope", "su"),
    names=Names(fused={"self_attn.qkv_proj": QKV, **GATE_UP}),
    gguf=Gguf(name="phi3", fused={"attn_qkv": QKV, "ffn_up": MLP[:2]}),
)
COHERE = Architecture(
    models="Command R",
    key_names=LAYER_EPS,
    form=Form(norm="layer", norms=ONE_NORM, parallel=True),
    vary=lambda stated: {"qk_norm": "heads"} if stated("use_qk_norm") else {},
    interleaved=True,
    gguf=Gguf(name="command-r", tensors={"use_qk_norm": "self_attn.q_norm.weight"}),
)
GLM = Architecture(
    models="GLM 4, GLM Edge",
    biases={"attention_bias": QKV},
    interleaved=True,
    names=Names(fused=GATE_UP),
)

GLM4 = replace(
    GLM,
    models="GLM 4-0414",
    form=Form(
        norms=("input_layernorm", "attention_out_norm", "post_attention_layernorm", "mlp_out_norm")
    ),
    names=Names(
        modules={
            "post_self_attn_layernorm": "attention_out_norm",
            "post_mlp_layernorm": "mlp_out_norm",
        },
        fused=GATE_UP,
    ),
    gguf=Gguf(name="glm4", fused={"ffn_up": MLP[:2]}),
)

VARIANTS: dict[str, Architecture] = {
    "phi": Architecture(
        models="Phi 1, 1.5 and 2",
        key_names=LAYER_EPS,
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
        keys={"sliding_window_pattern": 4},
        vary=None,
        windows="listed",
        full_every=4,
        unrotated="full",
        gguf=Gguf(name="cohere2"),
    ),
    "glm": GLM,
    "glm4": GLM4,
    "stablelm": Architecture(
        models="StableLM 2",
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
        key_names={"rms_norm_eps": "norm_eps"},
        form=Form(norm="layer", norm_bias=True, gated=False),
        plus_one=True,
        gguf=Gguf(name="nemotron"),
    ),
    "starcoder2": Architecture(
        models="StarCoder 2",
        key_names={"rms_norm_eps": "norm_epsilon"},
        form=Form(norm="layer", norm_bias=True, gated=False),
        windows="all",
        names=Names(modules={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
        gguf=Gguf(name="starcoder2"),
    ),
}  # fmt: skip
