"""The classes older than Llama, with other names of modules and keys: GPT-2, NeoX, Falcon, OPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pilotfish.export.architectures.architecture import (
    ALL,
    ATTENTION,
    MLP,
    QKV,
    Architecture,
    Gguf,
    Names,
    Stated,
)
from pilotfish.export.model_config import Form

BOTH = Form().norms
NEOX_MLP = {"mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj"}
TABLE = Form(norm="layer", norm_bias=True, gated=False, learned_positions=True)


def _falcon(stated: Stated) -> Mapping[str, Any]:
    """Return the form of Falcon 40B (new_decoder_architecture) or 7B (parallel_attn)."""
    new, parallel = stated("new_decoder_architecture"), stated("parallel_attn")
    norms = stated("num_ln_in_parallel_attn") or (2 if new else 1)
    if (new and not parallel) or norms not in {1, 2}:
        raise ValueError(
            "new_decoder_architecture requires parallel_attn, and one norm or two norms"
        )
    return {"parallel": parallel, "norms": BOTH[: norms if parallel else 2]}


def _opt(stated: Stated) -> Mapping[str, Any]:
    before = stated("do_layer_norm_before")
    cut = stated("_remove_final_layer_norm")
    return {"sum_norms": not before, "final_norm": before and not cut}


OLDER: dict[str, Architecture] = {
    "gpt2": Architecture(
        models="GPT-2",
        key_names={"hidden_size": "n_embd", "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
                "intermediate_size": "n_inner", "hidden_act": "activation_function",
                "rms_norm_eps": "layer_norm_epsilon"},
        form=TABLE,
        biases={"": ALL},
        unrotated="all",
        names=Names(
            body="transformer", stack="h", transposed=True,
            dropped=(".attn.bias", ".attn.masked_bias"),
            outer={"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm"},
            modules={"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm",
                     "attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.up_proj",
                     "mlp.c_proj": "mlp.down_proj"},
            fused={"attn.c_attn": QKV},
        ),
        gguf=Gguf(name="gpt2"),
    ),
    "gpt_neox": Architecture(
        models="Pythia, GPT-NeoX",
        keys={"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        key_names={"rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base",
                "partial_rotary_factor": "rotary_pct"},
        form=Form(norm="layer", norm_bias=True, gated=False),
        vary=lambda stated: {"parallel": stated("use_parallel_residual")},
        biases={"attention_bias": ATTENTION, "": MLP},
        names=Names(
            body="gpt_neox", by_head=True,
            dropped=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
            outer={"embed_in": "embed_tokens", "embed_out": "lm_head",
                   "final_layer_norm": "norm"},
            modules={"attention.dense": "self_attn.o_proj", **NEOX_MLP},
            fused={"attention.query_key_value": QKV},
        ),
        gguf=Gguf(name="gptneox"),
    ),
    "falcon": Architecture(
        models="Falcon 7B, 40B, 180B",
        keys={"max_position_embeddings": 2048},
        key_names={"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation",
                "num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
        form=Form(norm="layer", norm_bias=True, gated=False),
        vary=_falcon,
        biases={"bias": ALL},
        names=Names(
            body="transformer", stack="h", by_head=True, dropped=(".rotary_emb.inv_freq",),
            outer={"word_embeddings": "embed_tokens", "ln_f": "norm"},
            modules={"ln_attn": "input_layernorm", "ln_mlp": "post_attention_layernorm",
                     "self_attention.dense": "self_attn.o_proj", **NEOX_MLP},
            fused={"self_attention.query_key_value": QKV},
        ),
    ),
    "opt": Architecture(
        models="OPT, Galactica",
        keys={"rms_norm_eps": 1e-5},  # torch's default
        key_names={"intermediate_size": "ffn_dim", "hidden_act": "activation_function",
                "rms_norm_eps": ""},
        form=TABLE,
        vary=_opt,
        biases={"enable_bias": ALL},
        unrotated="all",
        position_offset=2,
        names=Names(
            body="model.decoder",
            dropped=("decoder.version",),
            outer={"final_layer_norm": "norm"},
            modules={"self_attn_layer_norm": "input_layernorm",
                     "final_layer_norm": "post_attention_layernorm",
                     "self_attn.out_proj": "self_attn.o_proj", "fc1": "mlp.up_proj",
                     "fc2": "mlp.down_proj"},
        ),
    ),
}  # fmt: skip
