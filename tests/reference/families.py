"""Tiny random checkpoints with the structure of those that people run, for tests against torch.

FAMILIES must be exported. LATER are refused today, in one sentence. Mixtures of experts without
states are in test_experts.py.

- Vocabularies have 264 rows for 260 tokens, and windows are 16 tokens wide.
- **Weights lie on grids that every precision holds exactly**, so that only arithmetic differs from
  transformers: matrices in 4 bits with a scale for 32 inputs, embeddings (which may be the head) in
  8 bits with a scale for a row; all scales are powers of two, so fp16 has them too.
- Texts of "longrope" end with the original context, to which its artifacts are cut: beyond it
  transformers turns all keys by other factors, also those that a cache holds.
- Norms are not ones, biases not zero; ε, caps and multipliers are such that each shows.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.small_checkpoints import VOCAB, tokenizer_json

WINDOW = 16
CONTEXT = 512
ORIGINAL = 64  # context before a rotary scaling
EPS = 0.02  # a common one, of 10⁻⁵, would not show
# Biases that change which experts are chosen, and not their weights.
CHOICE_BIASES = ("expert_bias", "e_score_correction_bias")
B = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 259,
    "pad_token_id": None,
}
R = B | {"intermediate_size": 96, "num_key_value_heads": 2, "rms_norm_eps": EPS}
N = B | {"intermediate_size": 96, "layer_norm_eps": EPS}
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
WIDE = {"head_dim": 32}
BIASED = {"attention_bias": True, "mlp_bias": True}
TWO = ["sliding_attention", "full_attention"]
FOUR = ["sliding_attention"] * 3 + ["full_attention"]
PATTERN = {"num_hidden_layers": 4, "layer_types": FOUR, "sliding_window": WINDOW}
GEMMA = R | {"query_pre_attn_scalar": 20}
GEMMA4 = R | PATTERN | {"head_dim": 16, "global_head_dim": 32, "final_logit_softcapping": 4.0}
TOLD = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB}
SPARSE = {"activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0, 0.0], "laurel_rank": 32,
          "final_logit_softcapping": 4.0}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.17,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_n_groups": 1,
}
SCALES = {
    "lm_head_multiplier": 0.4,
    "embedding_multiplier": 3.0,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.8, 1.2, 0.7, 1.1, 0.9],
    "mlp_multipliers": [1.4, 0.6],
}
BLOCKS = {key: value for key, value in B.items() if key != "num_hidden_layers"} | {
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_norm_epsilon": EPS,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "mlp_bias": True,
    "time_step_min": 0.2,
}
SELECTIVE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 8,
    "layer_norm_epsilon": EPS,
    "bos_token_id": 0,
    "eos_token_id": 259,
    "pad_token_id": None,
}
DELTA = {
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32}


ROUTED = {"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 32,
          "routed_scaling_factor": 2.5}  # fmt: skip
ERNIE = {"moe_k": 2, "moe_num_experts": 4, "moe_intermediate_size": 32}


def rope(kind: str = "default", theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def by_layer(full: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of the full layers, and plain ones of the windowed."""
    return {
        "rope_parameters": {
            "sliding_attention": rope()["rope_parameters"],
            "full_attention": full["rope_parameters"],
        }
    }


LLAMA3 = rope("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=ORIGINAL)  # fmt: skip
YARN = rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=128)
MINISTRAL = rope("yarn", 1e6, type="yarn", factor=16.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
                 mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
                 original_max_position_embeddings=ORIGINAL)  # fmt: skip
LINEAR = rope("linear", factor=8.0)
ORIGINALLY = {"original_max_position_embeddings": ORIGINAL}
HALF = rope(partial_rotary_factor=0.5)
QUARTER = rope(partial_rotary_factor=0.25)


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    """Factors for so many pairs."""
    return rope(
        "longrope",
        short_factor=[1.0 + 0.05 * i for i in range(pairs)],
        long_factor=[1.0 + 1.0 * i for i in range(pairs)],
        original_max_position_embeddings=ORIGINAL,
        **more,
    )


class Family(NamedTuple):
    """A checkpoint: transformers' model type and its settings, and what is special to it."""

    model_type: str
    settings: dict[str, Any]
    kinds: str = "full"  # of attention, words
    auto: str = "AutoModelForCausalLM"


def windowed(model_type: str, settings: dict[str, Any], kinds: str = "") -> Family:
    return Family(model_type, settings, f"window {kinds}".strip())


def wrapped(
    model_type: str, text_type: str, text: dict[str, Any], vision: dict[str, Any]
) -> Family:
    """A text model within one that sees, too."""
    tied = bool(text.get("tie_word_embeddings", model_type.startswith("gemma")))
    settings = {
        "text_config": text | {"model_type": text_type, "tie_word_embeddings": tied},
        "vision_config": vision,
        "tie_word_embeddings": tied,
    }
    if model_type == "gemma3":
        settings |= {"mm_tokens_per_image": 4}
    kinds = "window" if text.get("sliding_window") else "full"
    return Family(model_type, settings, kinds, "AutoModelForImageTextToText")


PIXTRAL = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "patch_size": 14,
           "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
           "head_dim": 16}  # fmt: skip
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32,
          "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
          "patch_size": 7}  # fmt: skip
CLIP = SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 32}
GEMMA4_VISION = {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 32,
                 "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
                 "head_dim": 16, "patch_size": 4, "position_embedding_size": 64}  # fmt: skip
QWEN_VL = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
           "out_hidden_size": 64, "num_position_embeddings": 16,
           "deepstack_visual_indexes": [0]}  # fmt: skip

QWEN2_VL = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
UNIFIED_VISION = {"model_type": "gemma4_unified_vision", "patch_size": 4, "mm_embed_dim": 32,
                  "mm_posemb_size": 64, "output_proj_dims": 64}  # fmt: skip
MROPE = rope(theta=1e6, mrope_section=[4, 2, 2])

# Names say what is particular, or whose flags these are.
FAMILIES: dict[str, Family] = {
    "llama": Family("llama", R),
    "llama-3.2": Family("llama", R | TIED | LLAMA3),
    "llama-yarn": Family("llama", R | YARN),
    "llama-linear": Family("llama", R | LINEAR),
    "llama-dynamic": Family("llama", R | rope("dynamic", factor=4.0)),
    "llama-longrope": Family("llama", R | longrope(8), "longrope"),
    "llama-biases": Family("llama", R | BIASED | TIED),
    "llama-wide": Family("llama", R | WIDE | rope(theta=1000042.0)),
    "mistral-v0.1": windowed("mistral", R | {"sliding_window": WINDOW}),
    "mistral-v0.3": Family("mistral", R | {"sliding_window": None} | rope(theta=1e6)),
    "mistral-nemo": Family("mistral", R | WIDE | {"sliding_window": None}),
    "ministral": windowed("ministral", R | {
        "head_dim": 16, "sliding_window": WINDOW, "layer_types": TWO}),
    "ministral3": Family("ministral3", R | WIDE | TIED | MINISTRAL, "positions"),
    "qwen2.5": Family("qwen2", R | TIED | rope(theta=1e6) | {
        "use_sliding_window": False, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2-windowed": windowed("qwen2", R | {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2-yarn": Family("qwen2", R | YARN),
    "internlm3": Family("internlm3", R | BIASED | {"head_dim": 32}),
    "iquestcoder": Family("iquestcoder", R | {"head_dim": 32} | rope(theta=5e5)),
    "mobilellm-r1": Family("llama4_text", R | TIED | rope(theta=5e5) | {
        "head_dim": 16, "intermediate_size": 8, "intermediate_size_mlp": 96, "moe_layers": [],
        "no_rope_layers": [1, 1], "layer_types": ["full_attention"] * 2, "num_local_experts": 0,
        "attn_temperature_tuning": False}, "late qknorm interleaved"),
    "cwm": windowed("cwm", R | LLAMA3 | {
        "head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 4,
        "layer_types": FOUR[::-1]}),
    "qwen3-0.6b": Family("qwen3", R | WIDE | TIED | rope(theta=1e6), "qknorm"),
    "qwen3-8b": Family("qwen3", R | UNTIED | {"head_dim": 16, "attention_bias": True}, "qknorm"),
    "gemma": Family("gemma", R | WIDE | {"num_key_value_heads": 1}),
    "gemma2": windowed("gemma2", GEMMA | WIDE | {
        "sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0,
        "layer_types": TWO}, "softcap"),
    "gemma3": windowed("gemma3_text", GEMMA | WIDE | PATTERN | {"num_key_value_heads": 1}
                       | by_layer(rope(theta=1e6)), "qknorm"),
    "gemma3-4b": windowed("gemma3_text", GEMMA | WIDE | PATTERN
                          | by_layer(rope("linear", 1e6, factor=8.0)), "qknorm"),
    "gemma4-e2b": windowed("gemma4_text", GEMMA4 | TOLD | {
        "num_key_value_heads": 1, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
        "num_hidden_layers": 6, "layer_types": (TWO * 3)}, "qknorm"),
    "gemma4-e4b": windowed("gemma4_text", GEMMA4 | TOLD | {
        "num_kv_shared_layers": 2, "layer_types": TWO * 2}, "qknorm"),
    "gemma4-31b": windowed("gemma4_text", GEMMA4 | {
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "use_bidirectional_attention": "vision"}, "qknorm"),
    "gemma4-26b": windowed("gemma4_text", GEMMA4 | {
        "num_experts": 4, "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "enable_moe_block": True, "top_k_experts": 2}, "qknorm experts"),
    "gemma4-12b": windowed("gemma4_unified_text", GEMMA4 | {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1}, "qknorm"),
    "gemma3n": windowed("gemma3n_text", R | PATTERN | TOLD | SPARSE | {
        "head_dim": 16, "num_hidden_layers": 5, "layer_types": (TWO * 3)[1:],
        "num_kv_shared_layers": 2, "intermediate_size": [96, 96, 96, 160, 96]}, "qknorm"),
    "phi-2": Family("phi", N | HALF, "partial"),
    "phi3-4k": windowed("phi3", R | {"num_key_value_heads": 4, "sliding_window": WINDOW}),
    "phi3-128k": Family("phi3", R | {"num_key_value_heads": 4} | ORIGINALLY | longrope(8),
                        "longrope"),
    "phi4-mini": Family("phi3", R | TIED | ORIGINALLY | longrope(6, partial_rotary_factor=0.75),
                        "partial longrope"),
    "smollm3": Family("smollm3", R | TIED | {
        "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}, "nope"),
    "olmo": Family("olmo", B | TIED | {"intermediate_size": 96}),
    "olmo2": Family("olmo2", R | rope(theta=5e5), "wide"),
    "olmo3": windowed("olmo3", R | PATTERN, "wide"),
    "olmo3-yarn": windowed("olmo3", R | PATTERN | by_layer(YARN), "wide"),
    "granite": Family("granite", R | TIED | MULTIPLIERS),
    "granite4-dense": Family("granitemoehybrid", R | TIED | MAMBA | MULTIPLIERS | {
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96,
        "layer_types": ["attention"] * 2, "position_embedding_type": "rope"}),
    "exaone4-32b": windowed("exaone4", R | PATTERN, "nope qknorm"),
    "exaone4-1.2b": Family("exaone4", R | TIED | LLAMA3 | {
        "sliding_window": None, "layer_types": ["full_attention"] * 2}, "qknorm"),
    "cohere": Family("cohere", N | {"num_key_value_heads": 2, "logit_scale": 0.4}, "interleaved"),
    "cohere-plus": Family("cohere", N | {
        "num_key_value_heads": 2, "logit_scale": 0.4, "use_qk_norm": True}, "interleaved qknorm"),
    "cohere2": windowed("cohere2", N | PATTERN | {
        "num_key_value_heads": 2, "head_dim": 16, "logit_scale": 0.4}, "nope interleaved"),
    "glm": Family("glm", R | HALF | {"head_dim": 16}, "partial interleaved"),
    "glm4": Family("glm4", R | HALF | {"head_dim": 16, "attention_bias": True},
                   "partial interleaved"),
    "ernie4.5": Family("ernie4_5", R | WIDE | TIED | rope(theta=5e5) | {"use_bias": False},
                       "interleaved"),
    "ernie4.5-bias": Family("ernie4_5", R | UNTIED | {"head_dim": 16, "use_bias": True},
                            "interleaved"),
    "hunyuan": Family("hunyuan_v1_dense", R | TIED | {"head_dim": 16}
                      | rope("dynamic", alpha=1000.0, factor=1.0), "late"),
    "glm4.5-air": Family("glm4_moe", R | HALF | ROUTED | {
        "head_dim": 32, "attention_bias": True}, "partial experts"),
    "minimax-m2": Family("minimax_m2", R | HALF | {
        "head_dim": 32, "num_experts_per_tok": 2, "num_local_experts": 4}, "partial experts"),
    "glm4.6": Family("glm4_moe", R | HALF | ROUTED | {
        "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 0,
        "n_shared_experts": 2, "num_nextn_predict_layers": 0}, "partial experts"),
    "ernie4.5-moe": Family("ernie4_5_moe", R | TIED | ERNIE | rope(theta=5e5) | {
        "moe_num_shared_experts": 2, "head_dim": 32}, "interleaved experts"),
    "ernie4.5-moe-bias": Family("ernie4_5_moe", R | UNTIED | ERNIE | {
        "use_bias": True, "num_hidden_layers": 4, "moe_num_shared_experts": 1,
        "moe_layer_end_index": 2, "moe_layer_interval": 2, "moe_norm_min": 0.4},
        "interleaved experts"),
    "k-exaone": windowed("exaone_moe", R | PATTERN | EXPERTS | {
        "num_shared_experts": 1}, "nope qknorm experts"),
    "nemotron": Family("nemotron", B | HALF | {
        "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "norm_eps": EPS},
        "partial"),
    "starcoder2": windowed("starcoder2", B | {
        "intermediate_size": 96, "num_key_value_heads": 2, "sliding_window": WINDOW,
        "use_bias": True, "norm_epsilon": EPS}),
    "stablelm": Family("stablelm", N | QUARTER | {
        "num_key_value_heads": 4, "use_qkv_bias": True}, "partial"),
    "stablelm-12b": Family("stablelm", N | QUARTER | {
        "num_key_value_heads": 2, "qk_layernorm": True, "use_parallel_residual": True},
        "partial qknorm"),
    "falcon-7b": Family("falcon", B | {
        "bias": False, "multi_query": True, "parallel_attn": True, "layer_norm_epsilon": EPS,
        "new_decoder_architecture": False}),
    "falcon-40b": Family("falcon", B | {
        "num_kv_heads": 2, "new_decoder_architecture": True, "layer_norm_epsilon": EPS}),
    "gpt-neox": Family("gpt_neox", N | QUARTER | {"use_parallel_residual": True}, "partial"),
    "gpt-neox-serial": Family("gpt_neox", N | rope() | {"use_parallel_residual": False}),
    "gpt2": Family("gpt2", {
        "vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT,
        "bos_token_id": 0, "eos_token_id": 259, "layer_norm_epsilon": EPS}),
    "bitnet": Family("bitnet", R | TIED),
    "apertus": Family("apertus", R | LLAMA3, "qknorm"),
    "opt-125m": Family("opt", B | {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 1}),
    "opt-350m": Family("opt", B | {
        "ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False,
        "pad_token_id": 1}),
    "galactica": Family("opt", B | {
        "ffn_dim": 96, "word_embed_proj_dim": 64, "activation_function": "gelu",
        "enable_bias": False, "pad_token_id": 1}),
    "seed-oss": Family("seed_oss", R | {"head_dim": 32}),
    "arcee": Family("arcee", R | {"head_dim": 16} | YARN),
    "helium": Family("helium", R | {"head_dim": 16}, "interleaved"),
    "lfm2": Family("lfm2", B | {
        "intermediate_size": 96, "num_key_value_heads": 2, "norm_eps": EPS,
        "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, "states"),
    "qwen3.5": Family("qwen3_5_text", R | DELTA | {
        "layer_types": ["linear_attention", "full_attention"]}, "states"),
    "lfm2-8b-a1b": Family("lfm2_moe", B | EXPERTS | {
        "intermediate_size": 96, "num_key_value_heads": 2, "norm_eps": EPS, "num_dense_layers": 1,
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "routed_scaling_factor": 1.5}, "states experts"),
    "lfm2-moe-unbiased": Family("lfm2_moe", B | EXPERTS | {
        "intermediate_size": 96, "num_key_value_heads": 2, "norm_eps": EPS, "num_dense_layers": 0,
        "layer_types": ["conv", "full_attention"], "use_expert_bias": False,
        "norm_topk_prob": False, "conv_bias": True, "tie_word_embeddings": False},
        "states experts"),
    "qwen3-next": Family("qwen3_next", R | DELTA | EXPERTS | {
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"]}, "states experts"),
    "qwen3.5-moe": Family("qwen3_5_moe_text", {
        key: value for key, value in (R | DELTA | EXPERTS).items() if key != "intermediate_size"
    } | {"shared_expert_intermediate_size": 32,
         "layer_types": ["linear_attention", "full_attention"]}, "states experts"),
    "granite4-hybrid": Family("granitemoehybrid", R | MAMBA | MULTIPLIERS | {
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96,
        "layer_types": ["mamba", "attention"], "position_embedding_type": "nope"}, "states"),
    "granite4-experts": Family("granitemoehybrid", R | TIED | MAMBA | MULTIPLIERS | {
        "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"],
        "position_embedding_type": "rope", "mamba_n_groups": 2}, "states experts"),
    "bamba": Family("bamba", R | MAMBA | {
        "mamba_n_groups": 4, "attn_layer_indices": [1], "mamba_proj_bias": True}, "states"),
    "falcon-h1": Family("falcon_h1", R | MAMBA | SCALES | {
        "mamba_d_ssm": 96, "mamba_d_head": 12, "mamba_n_groups": 2}, "states"),
    "falcon-h1-normed": Family("falcon_h1", R | MAMBA | {
        "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": True,
        "mamba_n_groups": 2, "head_dim": 32, "attention_bias": True, "mlp_bias": True,
        "projectors_bias": True}, "states"),
    "nemotron-h": Family("nemotron_h", BLOCKS | {
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention",
                              "mlp"]}, "states"),
    "nemotron-3-nano": Family("nemotron_h", BLOCKS | ROUTED | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "moe_shared_expert_intermediate_size": 64, "mlp_bias": False}, "states experts"),
    "nemotron-3-super": Family("nemotron_h", BLOCKS | ROUTED | {
        "layers_block_type": ["moe", "linear_attention", "full_attention", "mlp", "moe"],
        "moe_shared_expert_intermediate_size": 96, "moe_latent_size": 32,
        "norm_topk_prob": False}, "states experts"),
    "mamba2": Family("mamba2", {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8,
        "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16, "bos_token_id": 0,
        "eos_token_id": 259, "pad_token_id": None, "layer_norm_epsilon": EPS,
        "time_step_limit": (0.3, 2.5)}, "states unbounded"),
    "mamba": Family("mamba", SELECTIVE, "states unbounded"),
    "falcon-mamba": Family("falcon_mamba", SELECTIVE | {
        "mixer_rms_eps": EPS, "use_bias": True, "conv_kernel": 3, "expand": 3,
        "tie_word_embeddings": False}, "states unbounded"),
    "gemma4-vision": wrapped("gemma4", "gemma4_text", GEMMA4 | TOLD | {
        "pad_token_id": 1,
        "num_kv_shared_layers": 2, "layer_types": TWO * 2}, GEMMA4_VISION),
    "gemma4-12b-vision": wrapped("gemma4_unified", "gemma4_unified_text", GEMMA4 | {
        "pad_token_id": 1, "num_kv_shared_layers": 1, "layer_types": TWO * 2}, UNIFIED_VISION),
    "gemma3-vision": wrapped("gemma3", "gemma3_text", GEMMA | WIDE | PATTERN
                             | by_layer(rope("linear", 1e6, factor=8.0)), SIGLIP),
    "mistral3-ministral3": wrapped("mistral3", "ministral3", R | WIDE | TIED | MINISTRAL,
                                   PIXTRAL),
    "mistral3-mistral": wrapped("mistral3", "mistral", R | UNTIED | WIDE | {
        "sliding_window": None}, PIXTRAL),
    "qwen2-vl": wrapped("qwen2_vl", "qwen2_vl_text", R | UNTIED | MROPE, QWEN2_VL),
    "qwen2.5-vl": wrapped("qwen2_5_vl", "qwen2_5_vl_text", R | TIED | MROPE, QWEN_VL),
    "exaone4.5": wrapped("exaone4_5", "exaone4", R | UNTIED | PATTERN | LLAMA3, QWEN_VL | {
        "num_key_value_heads": 2}),
    "qwen3-vl": wrapped("qwen3_vl", "qwen3_vl_text", R | TIED | {"head_dim": 16}
                        | rope(mrope_section=[4, 2, 2], mrope_interleaved=True), QWEN_VL),
    "qwen3-vl-moe": wrapped("qwen3_vl_moe", "qwen3_vl_moe_text", R | UNTIED | EXPERTS
                            | {"head_dim": 16, "moe_intermediate_size": 96}
                            | rope(mrope_section=[4, 2, 2], mrope_interleaved=True),
                            QWEN_VL)._replace(kinds="experts"),
    "llava": wrapped("llava", "llama", R, CLIP),
}  # fmt: skip

LATER: dict[str, Family] = {
    "falcon-rw": Family("falcon", B | {
        "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
        "layer_norm_epsilon": EPS}, "alibi"),
    "olmo-clipped": Family("olmo", B | {"intermediate_size": 96, "clip_qkv": 1.5}),
    "phi-qknorm": Family("phi", N | QUARTER | {"qk_layernorm": True, "num_key_value_heads": 2},
                         "partial qknorm"),
}  # fmt: skip
EVERY = FAMILIES | LATER


def write_checkpoint(name: str, path: Path) -> Path:
    """Write the directory of one, as transformers saves it, with a tokenizer."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = EVERY[name]
    torch.manual_seed(5)
    config = CONFIG_MAPPING[family.model_type](**copy.deepcopy(family.settings))
    model = getattr(transformers, family.auto).from_config(config, attn_implementation="eager")
    liven(model.float())
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    return path


def liven(model: Any) -> None:
    """Give all weights values that show a mistake, and that lie on a grid."""
    import torch
    from transformers.pytorch_utils import Conv1D

    inputs_first = {id(m.weight) for m in model.modules() if isinstance(m, Conv1D)}
    # Rows that have a scale: an embedding's, and a layer's part of one for all layers.
    embeddings = {
        id(module.weight): layers_of(name, module.weight)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }
    # Where nothing divides scores, attention would be so sharp that ties in rounding decide all.
    unscaled = {"Gemma3nTextAttention", "Gemma4TextAttention"} & {
        type(module).__name__ for module in model.modules()
    }
    with torch.no_grad():
        for name, number in model.named_buffers():
            if name.endswith("layer_scalar"):  # no parameter, and yet stored
                number.fill_(0.75 + 0.125 * (int(name.split(".")[-2]) % 3))
            if name.endswith(CHOICE_BIASES):
                number.copy_(0.3 * torch.randn_like(number))
        for name, weight in model.named_parameters():
            if name.endswith(CHOICE_BIASES):  # classes whose router takes a softmax train the bias
                weight.copy_(0.3 * torch.randn_like(weight))
                continue
            if weight.dim() < 2:
                if "A_log" not in name and "dt_bias" not in name:
                    weight.copy_((weight + 0.2 * torch.randn_like(weight)).half())
                if unscaled and name.endswith("q_norm.weight"):
                    weight.mul_(0.25)
                continue
            across = id(weight) in inputs_first
            drawn = torch.randn_like(weight.T if across else weight)
            drawn *= 1.5 / drawn.shape[-1] ** 0.5
            if drawn.shape[-1] % 32 == 0:  # not a convolution's; of all experts at once
                parts = embeddings.get(id(weight), 1)
                by_part = drawn.reshape(-1, drawn.shape[-1] // parts)
                drawn = on_grid(by_part, whole_rows=id(weight) in embeddings).reshape_as(drawn)
            weight.copy_(drawn.T if across else drawn)


def layers_of(name: str, weight: Any) -> int:
    """How many layers the rows of an embedding have a part for."""
    width = TOLD["hidden_size_per_layer_input"]
    return int(weight.shape[1] // width) if name.endswith("embed_tokens_per_layer") else 1


def on_grid(weight: Any, *, whole_rows: bool) -> Any:
    """Round [N, K] to −8 … 7 steps in each block of 32, or to −127 … 127 steps in each row."""
    import torch

    blocks = weight.reshape(len(weight), -1, 32)
    most = 127 if whole_rows else 8
    largest = blocks.abs().amax((1, 2) if whole_rows else 2, keepdim=True)
    step = torch.exp2(torch.round(torch.log2(largest / most)))
    codes = torch.round(blocks / step).clamp(-most, most - (not whole_rows))
    # A block's largest weight says where its steps end, so each has one there.
    return (codes.scatter(2, blocks.abs().argmax(2, keepdim=True), -most) * step).reshape_as(weight)
