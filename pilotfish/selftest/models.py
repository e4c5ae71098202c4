"""Tiny models of random weights: a checkpoint directory for each kind of attention.

In: a folder. Out: Hugging Face directories in it, the same at every run, which pass through the
exporter like any checkpoint. To add a kind, add a line to `KINDS`.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from pilotfish.export.architectures import Names
    from pilotfish.export.model_config import ModelConfig

Floats = NDArray[np.float32]
Spoil = Callable[[dict[str, Floats]], None]

END = "<|end|>"
TOKENS = 257  # the bytes and END
CONTEXT = 1024
SHARPNESS = 2.0  # standard deviation of the logits, about
TARGET = "llama"

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 264,  # some rows are padding
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": TOKENS - 1,
}
_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_OPT: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 264,
    "hidden_size": 64,
    "word_embed_proj_dim": 32,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": TOKENS - 1,
}
# Models by name; the comments say what is special about their layers.
KINDS: dict[str, dict[str, Any]] = {
    TARGET: _LLAMA,  # fewer keys than queries, rotary positions
    "llama3": {**_LLAMA, "tie_word_embeddings": False, "rope_scaling": _ROPE},
    "qwen2": {**_LLAMA, "model_type": "qwen2"},  # biases
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 32},  # norms of queries and keys
    "gemma2": {  # windows, soft caps, norms on both sides
        **_LLAMA,
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 32,
        "query_pre_attn_scalar": 16,
    },
    "smollm3": {
        **_LLAMA,
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 1],
    },  # one layer without rotary positions
    "cohere": {  # attention and feed-forward in parallel, rotary pairs of neighbours
        **{key: value for key, value in _LLAMA.items() if key != "rms_norm_eps"},
        "model_type": "cohere",
        "layer_norm_eps": 1e-5,
        "use_qk_norm": True,
        "logit_scale": 1.0,
    },
    "olmo2": {**_LLAMA, "model_type": "olmo2"},  # norms over all heads
    # Layers with other head sizes, which read earlier layers' keys and values; a table per layer.
    "gemma4": {
        **{key: value for key, value in _LLAMA.items() if key != "rope_theta"},
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 264,
    },
    "opt": _OPT,  # learned positions, as many keys as queries, projected embeddings
    "gpt_oss": {  # sinks, windows, experts with biases in all layers
        **_LLAMA,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {  # experts in every second layer, with a shared expert
        **_LLAMA,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [1],
    },
    "lfm2": {  # convolutions instead of attention
        **{key: value for key, value in _LLAMA.items() if key != "rms_norm_eps"},
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_5": {  # linear attention, and gated attention with partial rotary positions
        **_LLAMA,
        "model_type": "qwen3_5_text",
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
    },
}
# Models with recurrent states; they read no trees.
STATEFUL = ("lfm2", "qwen3_5")
# Models that cannot be cut into stages: those with states or with shared keys and values.
WITHOUT_STAGES = (*STATEFUL, "gemma4")
# Plain operators cannot express linear attention, so these have no opset17.
LINEAR = ("qwen3_5",)
# Models that also run the protocols.
BOTH_ENDS = (TARGET, "gpt_oss", "qwen2_moe", *STATEFUL)


def drafter_of(kind: str) -> str:
    """Name the drafter of a target: the same weights, but flatter; half of its drafts match."""
    return f"{kind}-drafter"


def tiny_models(folder: Path) -> dict[str, str]:
    """Write all models and the drafters of `BOTH_ENDS`; return their directories by name."""
    sharp = {name: (config, SHARPNESS) for name, config in KINDS.items()}
    flat = {drafter_of(name): (KINDS[name], SHARPNESS / 1.5) for name in BOTH_ENDS}
    written = {}
    for name, (config, sharpness) in (sharp | flat).items():
        write_model(folder / name, config, sharpness)
        written[name] = str(folder / name)
    return written


def write_model(
    path: Path, config: Mapping[str, Any], sharpness: float, spoil: Spoil = lambda _: None
) -> None:
    """Write one model; `spoil` may change its weights, which have our names."""
    from safetensors.numpy import save_file

    from pilotfish.export.sources.huggingface_config import Description

    described = Description(config, "tiny", "config.json")
    weights = _weights(described.config, sharpness)
    spoil(weights)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    (path / "tokenizer.json").write_text(_tokenizer(), "utf-8")
    stored = as_stored(described.architecture.names, described.config, weights)
    save_file(stored, path / "model.safetensors")


def _tokenizer() -> str:
    """Make a tokenizer.json of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate([*alphabet, END])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    text: str = tokenizer.to_str()
    return text


def _weights(config: ModelConfig, sharpness: float) -> dict[str, Floats]:
    """Make normal random weights, by our names, that depend only on their names."""
    from pilotfish.export.weights import shapes

    weights = {}
    for name, shape in shapes(config).items():
        random = np.random.default_rng(zlib.crc32(name.encode()))
        values = random.standard_normal(shape, np.float32)
        if len(shape) == 1:
            values = 0.1 * values + _typical_value(name)
        else:
            head = name.endswith(("embed_tokens.weight", "lm_head.weight"))
            values *= (sharpness if head else 1.0) / np.sqrt(math.prod(shape[1:]))
        weights[name] = values.astype(np.float32)
    if config.experts is not None:
        _separate_experts(weights, config.experts.count)
    return weights


def _typical_value(name: str) -> float:
    """Return the typical value of a vector's numbers."""
    if name.endswith(".sinks"):
        return 3.0  # visible on long texts, too
    if name.endswith(".A_log"):
        return -2.0  # states remember some dozens of tokens
    return float(name.endswith("layer_scalar") or ("norm" in name and name.endswith("weight")))


def _separate_experts(weights: dict[str, Floats], experts: int) -> None:
    """Make experts depend only on the token's embedding, in channels that nothing else writes.

    The scores are far apart, so that no rounding, not even to half precision, selects others:
    that would be a different but correct answer.
    """
    random = np.random.default_rng(22)
    for name, values in weights.items():
        if name.endswith("embed_tokens.weight"):
            steps = np.arange(experts, dtype=np.float32) - (experts - 1) / 2
            values[:, :experts] = random.permuted(np.tile(steps / 2, (len(values), 1)), axis=1)
        elif ".router.weight" in name:
            values[:] = 4 * np.eye(*values.shape)
        elif ".o_proj." in name or ".down_proj." in name:
            values[:experts] = 0


def as_stored(
    names: Names, config: ModelConfig, weights: Mapping[str, Floats]
) -> dict[str, Floats]:
    """Return the checkpoint tensors that hold these weights.

    `weights` have our names and the order of `export.weights`, which is that within fused tensors.
    """
    from pilotfish.export.sources.tensor_names import stored_name

    together: dict[str, list[Floats]] = {}
    for name, array in weights.items():
        together.setdefault(stored_name(names, name), []).append(array)
    return {
        name: np.ascontiguousarray(_join_arrays(names, config, name, arrays))
        for name, arrays in together.items()
    }


def _join_arrays(names: Names, config: ModelConfig, name: str, arrays: Sequence[Floats]) -> Floats:
    """Combine the weights that share a tensor."""
    if config.experts is not None and name.endswith(tuple(names.stacked)):
        size = len(arrays) // config.experts.count
        experts = [arrays[start : start + size] for start in range(0, len(arrays), size)]
        return np.stack([_expert_tensor(names, parts) for parts in experts])
    if len(arrays) == 1:
        return arrays[0]
    if names.by_head:  # queries and gate of a head
        return _interleave([array.reshape(config.heads, -1, array.shape[1]) for array in arrays])
    return np.concatenate(arrays)


def _expert_tensor(names: Names, parts: Sequence[Floats]) -> Floats:
    array = _interleave([part[:, None] for part in parts])
    if not names.alternating:
        array = np.concatenate(parts)
    return array.T if names.columns and array.ndim == 2 else array


def _interleave(arrays: Sequence[Floats]) -> Floats:
    """Interleave arrays by groups of rows [groups, rows, …], one group of each array in turn."""
    return np.concatenate(arrays, axis=1).reshape(-1, *arrays[0].shape[2:])
