"""Tiny models of random weights, a checkpoint directory of each kind of attention.

In: a folder. Out: Hugging Face directories in it, the same at every run: this way they pass through
the exporter as any checkpoint does. To add a kind, add a line to `KINDS`, and to
`_shapes` what weights it has.
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
# By name: what of the attention each has that others have not.
KINDS: dict[str, dict[str, Any]] = {
    TARGET: _LLAMA,  # fewer keys than queries, rotary positions
    "llama3": {**_LLAMA, "tie_word_embeddings": False, "rope_scaling": _ROPE},
    "qwen2": {**_LLAMA, "model_type": "qwen2"},  # biases
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 32},  # norms of queries and keys
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
    shapes = _opt_shapes(config) if config["model_type"] == "opt" else _shapes(config)
    weights = {}
    for name, shape in shapes.items():
        random = np.random.default_rng(zlib.crc32(name.encode()))
        values = random.standard_normal(shape, np.float32)
        if len(shape) == 1:
            values = 0.1 * values + float("norm" in name and name.endswith("weight"))
        else:
            head = name.endswith(("embed_tokens.weight", "lm_head.weight"))
            values *= (sharpness if head else 1.0) / np.sqrt(shape[1])
        weights[name] = values.astype(np.float32)
    return weights


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of llama and its relatives, by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = (config[f"num_{heads}_heads"] * width for heads in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
        if config["model_type"] == "qwen2":
            for name, rows in (("q", queries), ("k", keys), ("v", keys)):
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        if config["model_type"] == "qwen3":
            shapes |= {f"{layer}.self_attn.{name}_norm.weight": (width,) for name in "qk"}
    return shapes


def _opt_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of OPT, by name."""
    hidden, inner, width = (
        config[name] for name in ("hidden_size", "ffn_dim", "word_embed_proj_dim")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.decoder.embed_tokens.weight": (config["vocab_size"], width),
        "model.decoder.embed_positions.weight": (CONTEXT + 2, hidden),
        "model.decoder.project_in.weight": (hidden, width),
        "model.decoder.project_out.weight": (width, hidden),
    }
    norms = ["model.decoder.final_layer_norm"]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.decoder.layers.{i}"
        norms += [f"{layer}.self_attn_layer_norm", f"{layer}.final_layer_norm"]
        for name, rows, columns in (
            *((f"self_attn.{part}_proj", hidden, hidden) for part in ("q", "k", "v", "out")),
            ("fc1", inner, hidden),
            ("fc2", hidden, inner),
        ):
            shapes |= {f"{layer}.{name}.weight": (rows, columns), f"{layer}.{name}.bias": (rows,)}
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return shapes
