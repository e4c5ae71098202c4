"""Small random models of every architecture, exported like real ones; the same for the same seed.

`tiny_artifact(path)` writes a complete artifact in a fraction of a second.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact, Precision, Source
from pilotfish.export.config import ModelConfig, RopeScaling
from pilotfish.export.model import export_model

EOS = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
BASE = ModelConfig(
    name="tiny",
    model_type="llama",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    context=256,
    vocab_size=128,
    tied=True,
    norm_eps=1e-5,
    rope_theta=10000.0,
)
OPT = {
    "model_type": "opt",
    "kv_heads": 4,
    "rope_theta": None,
    "attention_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "activation": "relu",
    "position_offset": 2,
}
# Each family's differences from BASE.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {
        "tied": False,
        "rope_scaling": RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64
        ),
    },
    "mistral": {"model_type": "mistral", "tied": False},
    "qwen2": {"model_type": "qwen2", "attention_bias": True},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "head_dim": 32, "tied": False},
    "opt": OPT,
    "opt-post-norm": {**OPT, "pre_norm": False, "final_norm": False, "embedding": 32},
}


def tiny_config(architecture: str = "llama", **changes: Any) -> ModelConfig:
    """Make the small configuration of a family, with `changes`."""
    return msgspec.structs.replace(BASE, **{**FAMILIES[architecture], **changes})


class RandomSource:
    """A `WeightSource` of normal random weights that depend on seed and name alone.

    `sharpness` scales the output projection, and so the peakedness of the predictions.
    """

    bos_id = None

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        *,
        vocab: int | None = None,
        tokens: Sequence[str] | None = None,
        eos: str = EOS,
        sharpness: float = 1.0,
        template: str = TEMPLATE,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.chat_template, self.chat_templates = template, dict(templates or {})
        self.vocab_size = vocab or config.vocab_size
        self.eos_ids = [self.vocab_size - 1]
        self.tokenizer_json = tiny_tokenizer(self.vocab_size, tokens, eos)
        self.description = Source(kind="random", location=f"seed {seed}")
        self._seed = seed
        self._sharpness = sharpness
        self._shapes = opt_shapes(config) if config.model_type == "opt" else llama_shapes(config)

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def tensor(self, name: str) -> NDArray[np.float32]:
        shape = self._shapes[name]
        random = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        values = random.standard_normal(shape, np.float32)
        if "norm" in name:
            return 0.1 * values + (1.0 if name.endswith("weight") else 0.0)
        if len(shape) == 1:
            return 0.1 * values
        gain = self._sharpness if name.endswith(("embed_tokens.weight", "lm_head.weight")) else 1.0
        return values * np.float32(gain / np.sqrt(shape[1]))


def tiny_artifact(
    path: str | Path,
    *,
    architecture: str = "llama",
    vocab: int = 128,
    tokens: Sequence[str] | None = None,
    eos: str = EOS,
    padded_vocab: int | None = None,
    seed: int = 0,
    precision: Precision = "fp32",
    dialect: str = "auto",
    sharpness: float = 2.0,
    template: str = TEMPLATE,
    templates: Mapping[str, str] | None = None,
    **changes: Any,
) -> Artifact:
    """Export a random model to `path`; `changes` are fields of its ModelConfig.

    tokens: its vocabulary, instead of `vocab` tokens; `eos` comes after them.
    """
    if tokens is not None:
        vocab = len(tokens) + 1
    config = tiny_config(architecture, vocab_size=padded_vocab or vocab, **changes)
    source = RandomSource(
        config,
        seed,
        vocab=vocab,
        tokens=tokens,
        eos=eos,
        sharpness=sharpness,
        template=template,
        templates=templates,
    )
    return export_model(source, Path(path), precision=precision, dialect=dialect)


def tiny_tokenizer(vocab: int, wanted: Sequence[str] | None = None, eos: str = EOS) -> str:
    """Make a byte-level BPE tokenizer.json of `vocab` tokens; the last one is EOS.

    wanted: the other tokens, in GPT-2's characters; longer ones are merged in this order. By
    default letters come first, then the other bytes, then pairs of letters. Bytes without a token
    vanish when text is encoded.
    """
    if wanted is not None:
        assert len({*wanted, eos}) == len(wanted) + 1, "a token is there twice"
        return _tokenizer_json([*wanted], _merges(wanted), eos)
    tokens = sorted(_byte_characters(), key=lambda char: (not char.isalpha(), char))[: vocab - 1]
    merges = []
    letters = [char for char in tokens if "a" <= char <= "z"]
    for first in letters:
        for second in letters:
            if len(tokens) < vocab - 1:
                tokens.append(first + second)
                merges.append([first, second])
    while len(tokens) < vocab - 1:
        tokens.append(f"<{len(tokens)}>")
    return _tokenizer_json(tokens, merges, eos)


def _merges(tokens: Sequence[str]) -> list[list[str]]:
    """Return the merge of each longer token: the first part is as long as possible."""
    merges = []
    for token in tokens:
        splits = [[token[:at], token[at:]] for at in range(len(token) - 1, 0, -1)]
        fitting = [split for split in splits if split[0] in tokens and split[1] in tokens]
        assert fitting or len(token) == 1, f"{token} cannot be put together"
        merges += fitting[:1]
    return merges


def _tokenizer_json(tokens: list[str], merges: list[list[str]], eos: str) -> str:
    end = {
        "id": len(tokens),
        "content": eos,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end],
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "use_regex": True},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {token: id for id, token in enumerate(tokens)},
                "merges": merges,
            },
        }
    )


def _byte_characters() -> list[str]:
    """Return GPT-2's character of each byte: printable Latin-1 as is, the others from 256 up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def llama_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of llama and its relatives, by name."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden, config.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.layers):
        layer = f"model.layers.{i}"
        for name, rows, columns, bias in (
            ("self_attn.q_proj", queries, hidden, config.attention_bias),
            ("self_attn.k_proj", keys, hidden, config.attention_bias),
            ("self_attn.v_proj", keys, hidden, config.attention_bias),
            ("self_attn.o_proj", hidden, queries, config.output_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        ):
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (hidden,)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                shapes[f"{layer}.self_attn.{name}.weight"] = (config.head_dim,)
    return shapes


def opt_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of OPT, by name."""
    decoder, hidden, inner = "model.decoder", config.hidden, config.intermediate
    width = config.embedding or hidden
    shapes: dict[str, tuple[int, ...]] = {
        f"{decoder}.embed_tokens.weight": (config.vocab_size, width),
        f"{decoder}.embed_positions.weight": (config.context + config.position_offset, hidden),
    }
    if config.embedding:
        shapes[f"{decoder}.project_in.weight"] = (hidden, width)
        shapes[f"{decoder}.project_out.weight"] = (width, hidden)
    norms = [f"{decoder}.final_layer_norm"] if config.final_norm else []
    for i in range(config.layers):
        layer = f"{decoder}.layers.{i}"
        norms += [f"{layer}.self_attn_layer_norm", f"{layer}.final_layer_norm"]
        for name, rows, columns in (
            *((f"self_attn.{part}_proj", hidden, hidden) for part in ("q", "k", "v", "out")),
            ("fc1", inner, hidden),
            ("fc2", hidden, inner),
        ):
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            shapes[f"{layer}.{name}.bias"] = (rows,)
    for name in norms:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (hidden,)
    return shapes
