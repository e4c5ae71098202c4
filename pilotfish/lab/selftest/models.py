"""Tiny models with random weights: a checkpoint directory for each kind of attention.

In: a folder. Out: Hugging Face directories in this folder, with the same content at every run. The
exporter reads them like any checkpoint. To add a model, add a line to `KINDS`.
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
TOKENS = 257  # vocabulary size: one token for each byte value, and END
CONTEXT = 1024
SHARPNESS = 2.0  # scale of the head's weights: the logits' standard deviation, approximately
TARGET = "llama"

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 264,  # more than TOKENS, since rows of the embedding may be padding
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
# Models by name. The comment beside a model lists the special features of its layers.
KINDS: dict[str, dict[str, Any]] = {
    TARGET: _LLAMA,  # fewer key heads than query heads, rotary positions
    "llama3": {**_LLAMA, "tie_word_embeddings": False, "rope_scaling": _ROPE},
    "qwen2": {**_LLAMA, "model_type": "qwen2"},  # biases of queries, keys and values
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 32},  # norms of queries and keys
    "gemma2": {  # sliding windows, soft caps, norms before and after each block
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
    # parallel attention and feed-forward, rotary positions on pairs of adjacent dimensions
    "cohere": {
        **{key: value for key, value in _LLAMA.items() if key != "rms_norm_eps"},
        "model_type": "cohere",
        "layer_norm_eps": 1e-5,
        "use_qk_norm": True,
        "logit_scale": 1.0,
    },
    "olmo2": {**_LLAMA, "model_type": "olmo2"},  # query and key norms over all heads together
    # Layers with different head sizes; layers that read earlier layers' keys and values; one
    # embedding table per layer.
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
    "opt": _OPT,  # learned positions, equal numbers of key and query heads, projected embeddings
    "gpt_oss": {  # attention sinks, sliding windows, experts with biases in all layers
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
# Models with recurrent states; they cannot read trees.
STATEFUL = ("lfm2", "qwen3_5")
# Models that cannot be cut into stages: they have recurrent states, or layers that share keys and
# values.
WITHOUT_STAGES = (*STATEFUL, "gemma4")
# Models with linear attention. Plain operators cannot express it, so they have no opset17 variant.
LINEAR = ("qwen3_5",)
# Models with which the protocols are also checked.
BOTH_ENDS = (TARGET, "gpt_oss", "qwen2_moe", *STATEFUL)


def drafter_of(kind: str) -> str:
    """Return the name of a target's drafter.

    The drafter has the same weights, but a flatter distribution; about half of its drafts match.
    """
    return f"{kind}-drafter"


def tiny_models(folder: Path) -> dict[str, str]:
    """Write all models, and the drafters for `BOTH_ENDS`; return the directories by model name."""
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
    """Write one model. `spoil` may change its weights, by their names in `export.weights`."""
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
    """Make a tokenizer.json whose tokens are single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate([*alphabet, END])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    text: str = tokenizer.to_str()
    return text


def _weights(config: ModelConfig, sharpness: float) -> dict[str, Floats]:
    """Draw normal random weights, by their names in `export.weights`.

    A weight's name seeds its values, so they do not depend on the other weights.
    """
    from pilotfish.export.weight_recorder import shapes

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
    """Return the mean of the numbers in a weight vector of this name."""
    if name.endswith(".sinks"):
        return 3.0  # large enough that it changes the outputs after long texts, too
    if name.endswith(".A_log"):
        return -2.0  # the states then remember some dozens of tokens
    return float(name.endswith("layer_scalar") or ("norm" in name and name.endswith("weight")))


def _separate_experts(weights: dict[str, Floats], experts: int) -> None:
    """Make the choice of experts depend only on the token, by hidden channels that no layer writes.

    The experts' scores are far apart, so that rounding, even to half precision, cannot select other
    experts. If it did, the output would be correct but different from the reference's.
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
    """Convert weights to the tensors of a checkpoint.

    `weights` have the names and the order of `export.weights`; the order determines their places in
    fused tensors.
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
    """Combine the weights that a checkpoint stores in one tensor."""
    if config.experts is not None and name.endswith(tuple(names.stacked)):
        size = len(arrays) // config.experts.count
        experts = [arrays[start : start + size] for start in range(0, len(arrays), size)]
        return np.stack([_expert_tensor(names, parts) for parts in experts])
    if len(arrays) == 1:
        return arrays[0]
    if names.by_head:  # each head's queries and gate are adjacent
        return _interleave([array.reshape(config.heads, -1, array.shape[1]) for array in arrays])
    return np.concatenate(arrays)


def _expert_tensor(names: Names, parts: Sequence[Floats]) -> Floats:
    array = _interleave([part[:, None] for part in parts])
    if not names.alternating:
        array = np.concatenate(parts)
    return array.T if names.columns and array.ndim == 2 else array


def _interleave(arrays: Sequence[Floats]) -> Floats:
    """Interleave arrays [groups, rows, …]: one group of rows from each array in turn."""
    return np.concatenate(arrays, axis=1).reshape(-1, *arrays[0].shape[2:])
