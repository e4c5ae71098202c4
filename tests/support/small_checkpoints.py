"""Write tiny checkpoints in the formats of real ones, for tests of `export.sources`.

`write_directory` makes a Hugging Face directory, `write_gguf` a GGUF file. Both hold the same
weights, made from a seed, so a test can compare what it reads with `tiny_weights`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the")]
SPECIAL = "<|end|>"
TOKENS = [*BYTES, "th", "the", "Ġthe", SPECIAL]  # the last is a special token
VOCAB = 264  # rows of the embedding: some are padding
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 259,
}


def tokenizer_json() -> str:
    """Make a byte-level BPE with three merges and one special token; 260 tokens."""
    vocabulary = {token: id for id, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    return tokenizer.to_str()


def tiny_weights(config: Mapping[str, Any], seed: int = 1) -> dict[str, NDArray[np.float32]]:
    """Make weights of a llama, mistral, qwen2 or qwen3, by Hugging Face's names."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
        if config["model_type"] == "qwen2":
            for name, width in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (width * head_dim,)
        if config["model_type"] == "qwen3":
            shapes |= {f"{prefix}self_attn.{n}_norm.weight": (head_dim,) for n in "qk"}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_directory(
    path: Path,
    config: Mapping[str, Any] = LLAMA,
    *,
    dtype: str = "F32",
    shards: int = 1,
    weights: Mapping[str, NDArray[np.float32]] | None = None,
    files: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face directory; `files` are further JSON objects or texts by file name."""
    path.mkdir(parents=True, exist_ok=True)
    stored = {
        name: value.astype(DTYPES[dtype])
        for name, value in (tiny_weights(config) if weights is None else weights).items()
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    for name, content in (files or {}).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name).write_text(text, "utf-8")
    if shards == 1:
        save_file(stored, path / "model.safetensors")
        return path
    names = list(stored)
    places = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        chosen = names[index::shards]
        save_file({name: stored[name] for name in chosen}, path / file)
        places |= dict.fromkeys(chosen, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path


def write_gguf(
    path: Path,
    config: Mapping[str, Any] = LLAMA,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    weights: Mapping[str, NDArray[np.float32]] | None = None,
    settings: Mapping[str, Any] | None = None,
    extra: Mapping[str, NDArray[np.float32]] | None = None,
    say: Mapping[str, Any] | None = None,
    vocabulary: bool = True,
    ends: bool = True,
) -> Path:
    """Write a GGUF file, with names and permutations as by llama.cpp's converter.

    settings: further metadata (with {} for the architecture's prefix). extra: further tensors by
    their GGUF names. say: metadata that contradict the weights. kind: the type of matrices;
    kinds: of those that hold a part of a name.
    """
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    fields = {**config, **(say or {})}
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_rope_freq_base(fields["rope_theta"])
    if "head_dim" in fields:
        writer.add_key_length(fields["head_dim"])
        writer.add_value_length(fields["head_dim"])
    for key, value in (settings or {}).items():
        add_setting(writer, key.format(architecture), value)
    if vocabulary:
        add_byte_vocabulary(writer, ends=ends)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"]
    )
    for name, value in (tiny_weights(config) if weights is None else weights).items():
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            value = interleave(value, config[key])
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        ours = [other for part, other in (kinds or {}).items() if part in name]
        add_tensor(writer, gguf_name, value, ours[0] if ours else kind)
    for name, value in (extra or {}).items():
        add_tensor(writer, name, value, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_byte_vocabulary(
    writer: gguf.GGUFWriter, pretokenizer: str = "gpt-2", *, ends: bool = True
) -> None:
    """Add the vocabulary of `tokenizer_json`, and the padding that converters add."""
    padding = [f"[PAD{id}]" for id in range(len(TOKENS), VOCAB)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pretokenizer)
    writer.add_token_list([*TOKENS, *padding])
    writer.add_token_types([1] * (len(TOKENS) - 1) + [3] + [5] * len(padding))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(0)
    if ends:
        writer.add_eos_token_id(TOKENS.index(SPECIAL))


def interleave(value: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Permute as llama.cpp's `permute` (convert_hf_to_gguf.py), word for word."""
    return (
        value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        .swapaxes(1, 2)
        .reshape(value.shape)
    )


def add_setting(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, Sequence):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    value: NDArray[np.float32],
    kind: gguf.GGMLQuantizationType,
) -> None:
    """Add a tensor; norms and biases stay float32, as in real files."""
    kind = kind if value.ndim >= 2 else gguf.GGMLQuantizationType.F32
    try:
        stored = gguf.quantize(value, kind)
    except NotImplementedError:  # of K-quants: any blocks will do
        stored = random_blocks(np.random.default_rng(len(name)), kind, *value.shape)
    writer.add_tensor(name, stored, raw_dtype=kind)


# Where blocks have their half-precision scales, in bytes.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
SCALES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}


def random_blocks(
    random: np.random.Generator, kind: gguf.GGMLQuantizationType, rows: int, width: int
) -> NDArray[np.uint8]:
    """Make rows of blocks with random codes and scales, u8 [rows, bytes]; weights are below 1."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows, width // weights, size), np.uint8)
    most = 2.0**-15 if kind.name.endswith("_K") else 2.0**-9
    for start in SCALES[kind.name]:
        scales = random.uniform(-most, most, (rows, width // weights, 1)).astype(np.float16)
        blocks[..., start : start + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)
