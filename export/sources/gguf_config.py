"""Read the metadata of a GGUF file into a `ModelConfig`.

llama.cpp is the reference for the meaning of keys and for the defaults of absent ones. Unread keys
of the architecture's own namespace ("llama.…") are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import msgspec

from pilotfish.export.architectures import ARCHITECTURES
from pilotfish.export.config import Layer, ModelConfig, Rope, plain_rope
from pilotfish.export.errors import ExportError
from pilotfish.export.sources.fields import Fields
from pilotfish.export.sources.gguf_file import GgufFile

READ = {own.gguf: name for name, own in ARCHITECTURES.items() if own.gguf is not None}
ROPE_DIVISORS = "rope_freqs.weight"
# GGUF's names of a layer's modules → ours.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What file names add to a model's name: "-Q4_K_M", ".f16", "-IQ2_XXS" …
PRECISION_SUFFIX = re.compile(
    r"[-._](?:i?q\d\w*|tq\d\w*|b?f16|f32|fp16|fp32|mxfp4)$", re.IGNORECASE
)
# Fields of `ModelConfig` → the keys that they come from, for errors.
KEYS = {
    "layers": "block_count",
    "hidden": "embedding_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate": "feed_forward_length",
    "context": "context_length",
    "vocab_size": "vocab_size",
}
# Keys with an effect, and the values at which they have none.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_used_count": (0,),
    "tensor_data_layout": ("Meta AI original pth",),  # the usual one
    "use_parallel_residual": (False,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
}
# Keys that llama.cpp reads for scalings that are refused here, or only shows.
INERT = ("rope.scaling.original_context_length", "rope.scaling.finetuned")


def read_metadata(file: GgufFile, ignored: Collection[str] = ()) -> ModelConfig:
    """Read the model that a GGUF file describes.

    Args:
        file: the opened file.
        ignored: unknown keys to be ignored.

    Raises:
        ExportError: naming what is missing, damaged, not supported or not known.
    """
    path, metadata = file.path, file.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in READ:
        raise ExportError(
            f"{path}: architecture {architecture!r} is not supported in GGUF; "
            f"supported are {', '.join(READ)}"
        )
    if metadata.get("split.count", 1) not in (0, 1):
        raise ExportError(f"{path} is one part of several: merge them with llama-gguf-split")
    prefix = f"{architecture}."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    fields = Fields(own, str(path), prefix)
    config = _read(file, fields, READ[architecture])
    neutral = {f"{prefix}{key}": values for key, values in NEUTRAL.items()}
    fields.refuse_unknown({f"{prefix}{key}" for key in INERT}, neutral, ignored)
    return config


def _read(file: GgufFile, fields: Fields, model_type: str) -> ModelConfig:
    """Read the model's shape; ExportError names what is not supported."""
    path, tensors = file.path, file.tensors
    _refuse_variants(fields)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ExportError(f"{path} has no token_embd.weight: is it a vocabulary without a model?")
    heads, head_dim = _head_shape(fields)
    rows = embedding.shape[0]
    return ModelConfig(
        name=PRECISION_SUFFIX.sub("", path.stem),
        model_type=model_type,
        layers=fields.count("block_count"),
        hidden=fields.count("embedding_length"),
        heads=heads,
        kv_heads=_kv_heads(fields, heads),
        head_dim=head_dim,
        intermediate=fields.count("feed_forward_length"),
        context=fields.count("context_length"),
        vocab_size=fields.count("vocab_size", rows),
        tied="output.weight" not in tensors,
        norm_eps=fields.positive("attention.layer_norm_rms_epsilon"),
        form=msgspec.structs.replace(
            ARCHITECTURES[model_type].form, biases=_biases(file, model_type)
        ),
        pattern=(Layer(_rope(file, fields, head_dim)),),
    )


def _biases(file: GgufFile, model_type: str) -> tuple[str, ...]:
    """Return the modules with a bias: those of the class, and those of the file's first layer."""
    own = ARCHITECTURES[model_type].biases.get("", ())
    found = [
        module
        for gguf, module in LAYER_NAMES.items()
        if f"blk.0.{gguf}.bias" in file.tensors and module not in own
    ]
    return (*own, *found)


def _head_shape(fields: Fields) -> tuple[int, int]:
    """Return the number of heads and their width."""
    heads, hidden = fields.count("attention.head_count"), fields.count("embedding_length")
    if "attention.key_length" not in fields.values and hidden % heads:
        raise fields.error(
            f"{fields.prefix}embedding_length {hidden} is not {heads} heads "
            f"({fields.prefix}attention.head_count) of equal width"
        )
    head_dim = fields.count("attention.key_length", hidden // heads)
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise fields.error("keys and values of different width are not supported")
    if fields.count("rope.dimension_count", head_dim) != head_dim:
        raise fields.error("rotary embedding of a part of the head is not supported")
    if head_dim % 2:
        raise fields.error(f"heads of width {head_dim} cannot be rotated: it must be even")
    return heads, head_dim


def _kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.count("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise fields.error(
            f"{fields.prefix}attention.head_count {heads} is no multiple of "
            f"{fields.prefix}attention.head_count_kv {kv_heads}"
        )
    return kv_heads


def _rope(file: GgufFile, fields: Fields, head_dim: int) -> Rope:
    """Read the rotary embedding, with Llama 3's scaling as its converter writes it."""
    rope = plain_rope(fields.positive("rope.freq_base", 10000.0), head_dim)
    if ROPE_DIVISORS not in file.tensors:
        return rope
    divisors = file.tensor(ROPE_DIVISORS).ravel().tolist()
    if len(divisors) != len(rope.frequencies):
        raise ExportError(f"{file.path}: {ROPE_DIVISORS} has {len(divisors)} entries")
    pairs = zip(rope.frequencies, divisors, strict=True)
    return Rope(tuple(frequency / divisor for frequency, divisor in pairs))


def _refuse_variants(fields: Fields) -> None:
    """Refuse what a supported architecture may have and this exporter does not support."""
    if fields.get("expert_count", int, 0):
        raise fields.error("mixture-of-experts models are not supported")
    if fields.get("attention.sliding_window", int, 0):
        raise fields.error("sliding-window attention is not supported")
    kind = fields.get("rope.scaling.type", str, "")
    # The second is what older files call it.
    factors = {
        f"{fields.prefix}{key}": fields.get(key, float, 1.0)
        for key in ("rope.scaling.factor", "rope.scale_linear")
    }
    if kind not in ("none", "linear", ""):
        raise fields.error(f"rotary scaling {kind!r} is not supported")
    for key, factor in factors.items():
        # Without a type llama.cpp scales linearly, and takes 0 for 1.
        if kind != "none" and factor not in (0.0, 1.0):
            raise fields.error(f"{key} is {factor}: linear rotary scaling is not supported")
