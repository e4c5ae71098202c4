"""Tiny models of random weights, a checkpoint directory of each kind of attention.

In: a folder. Out: Hugging Face directories in it, the same at every run: this way they pass through
the exporter as any checkpoint does. To add a kind, add a line to `KINDS`; its class must neither
fuse weights nor stack them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
TOKENS = 257  # the bytes and END
CONTEXT = 1024
SHARPNESS = 2.0  # the logits' standard deviation, about
# A drafter with the target's weights, but flatter: about half of its drafts are accepted.
TARGET, DRAFTER = "llama", "drafter"

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
UNCUT = {"gemma4"}  # of which no stages are made
# By name: what of the attention each has that others have not.
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
    "smollm3": {**_LLAMA, "model_type": "smollm3", "no_rope_layers": [1, 0, 1]},  # a layer unturned
    "cohere": {  # attention and feed-forward part side by side, neighbours turn together
        **{key: value for key, value in _LLAMA.items() if key != "rms_norm_eps"},
        "model_type": "cohere",
        "layer_norm_eps": 1e-5,
        "use_qk_norm": True,
        "logit_scale": 1.0,
    },
    "olmo2": {**_LLAMA, "model_type": "olmo2"},  # norms over all heads
    # Layers of other heads, which read the keys and values of earlier ones; a table for each layer.
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
}


def tiny_models(folder: Path) -> dict[str, str]:
    """Write all, and the drafter of `TARGET`; name → directory, a source for the exporter."""
    from safetensors.numpy import save_file

    sharp = {name: (config, SHARPNESS) for name, config in KINDS.items()}
    flat = {DRAFTER: (KINDS[TARGET], SHARPNESS / 1.5)}
    written = {}
    for name, (config, sharpness) in (sharp | flat).items():
        path = folder / name
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config), "utf-8")
        (path / "tokenizer.json").write_text(_tokenizer(), "utf-8")
        save_file(_weights(config, sharpness), path / "model.safetensors")
        written[name] = str(path)
    return written


def _tokenizer() -> str:
    """Make a tokenizer.json of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate([*alphabet, END])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    text: str = tokenizer.to_str()
    return text


def _weights(config: Mapping[str, Any], sharpness: float) -> dict[str, NDArray[np.float32]]:
    """Make normal random weights that depend on their names alone."""
    shapes = _shapes(config)
    weights = {}
    for name, shape in shapes.items():
        random = np.random.default_rng(zlib.crc32(name.encode()))
        values = random.standard_normal(shape, np.float32)
        if len(shape) == 1:
            factor = name.endswith("layer_scalar") or ("norm" in name and name.endswith("weight"))
            values = 0.1 * values + float(factor)
        else:
            head = name.endswith(("embed_tokens.weight", "lm_head.weight"))
            values *= (sharpness if head else 1.0) / np.sqrt(shape[1])
        weights[name] = values.astype(np.float32)
    return weights


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight, by the name that a checkpoint has for it."""
    from pilotfish.export.sources.huggingface_config import Description
    from pilotfish.export.sources.tensor_names import stored_name
    from pilotfish.export.weights import shapes

    described = Description(config, "tiny", "config.json")
    names = described.architecture.names
    return {stored_name(names, name): shape for name, shape in shapes(described.config).items()}
