"""A GGUF file as a source: llama (Mistral is one, too), qwen2 and qwen3.

In: a path. Out: a `WeightSource` in Hugging Face's names and rotary convention: GGUF stores
llama's q and k with the two halves of each head interleaved, and they are put back here.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engines.artifact import Source
from export.config import ModelConfig, ModelType
from export.errors import ExportError
from export.sources.gguf_file import GgufFile
from export.sources.hashing import hash_files
from export.sources.source import Progress
from export.tokenizer import GgufVocabulary

ARCHITECTURES: dict[str, ModelType] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# GGUF's names → Hugging Face's; {} is the layer.
GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
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
ROPE_DIVISORS = "rope_freqs.weight"
# What file names add to a model's name: "-Q4_K_M", ".f16", "-IQ2_XXS" …
PRECISION_SUFFIX = re.compile(
    r"[-._](?:i?q\d\w*|tq\d\w*|b?f16|f32|fp16|fp32|mxfp4)$", re.IGNORECASE
)


class GgufSource:
    """A `WeightSource` over one GGUF file.

    Raises:
        ExportError: if the file is damaged, or its model or tokenizer is not supported.
    """

    def __init__(
        self,
        path: Path,
        progress: Progress,
        *,
        kind: Literal["default", "gguf"] = "gguf",
        location: str | None = None,
    ) -> None:
        self._file = GgufFile(path)
        self._progress = progress
        self._kind: Literal["default", "gguf"] = kind
        self._location = location or path.name
        self._gguf_names = {_canonical(name, path): name for name in self._file.tensors}
        self._gguf_names.pop(ROPE_DIVISORS, None)
        self.config = _read_config(self._file)
        vocabulary = GgufVocabulary(self._file.metadata, path)
        self.tokenizer_json = vocabulary.tokenizer_json
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        template = self._file.metadata.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) else None

    @cached_property
    def description(self) -> Source:
        """Where the model came from; hashes the file when first asked."""
        return Source(
            kind=self._kind,
            location=self._location,
            sha256=hash_files([self._file.path], self._progress),
        )

    def names(self) -> Collection[str]:
        """Names of the weights, as Hugging Face's modules have them."""
        return self._gguf_names.keys()

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One weight as float32, dequantised, in Hugging Face's layout."""
        if name not in self._gguf_names:
            raise ExportError(f"{self._file.path} has no weight {name}")
        values = self._file.tensor(self._gguf_names[name])
        if self.config.model_type == "llama":
            if ".q_proj." in name:
                return self._halves_apart(name, values, self.config.heads)
            if ".k_proj." in name:
                return self._halves_apart(name, values, self.config.kv_heads)
        return values

    def _halves_apart(
        self, name: str, values: NDArray[np.float32], heads: int
    ) -> NDArray[np.float32]:
        """Undo GGUF's interleaving of a head's first and second half.

        values: [heads * head_dim, …], where rows (2i, 2i + 1) of a head rotate together;
        returns the same shape, where rows (i, i + head_dim / 2) do.
        """
        if len(values) % (2 * heads):
            raise ExportError(
                f"{self._file.path}: {name} has {len(values)} rows, which are not {heads} heads"
            )
        # [heads, head_dim / 2, 2, …]
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])
        restored: NDArray[np.float32] = pairs.swapaxes(1, 2).reshape(values.shape)
        return restored


def _canonical(name: str, path: Path) -> str:
    """Hugging Face's name of a GGUF tensor; a tensor that we would not use is refused."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    if name == ROPE_DIVISORS:
        return name
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
    if "_exps." in name or "_shexp." in name:
        raise ExportError(f"{path}: mixture-of-experts models are not supported ({name})")
    raise ExportError(f"{path}: the tensor {name} is not part of an architecture we know")


def _read_config(file: GgufFile) -> ModelConfig:
    """The model's shape from the metadata; ExportError names whatever is not supported."""
    path, metadata = file.path, file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ExportError(
            f"{path}: architecture {architecture!r} is not supported in GGUF; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )

    def number(key: str, default: float | None = None) -> float:
        value = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, int | float):
            raise ExportError(f"{path}: {architecture}.{key} is {value!r}, and must be one number")
        return value

    def integer(key: str, default: int | None = None) -> int:
        value = number(key, default)
        if not 1 <= value < 2**31:
            raise ExportError(f"{path}: {architecture}.{key} is {value!r}, and must be a count")
        return int(value)

    _refuse_variants(file, str(architecture))
    heads, hidden = integer("attention.head_count"), integer("embedding_length")
    head_dim = integer("attention.key_length", hidden // heads)
    if integer("attention.value_length", head_dim) != head_dim:
        raise ExportError(f"{path}: keys and values of different width are not supported")
    if integer("rope.dimension_count", head_dim) != head_dim:
        raise ExportError(f"{path}: rotary embedding of a part of the head is not supported")
    divisors = None
    if ROPE_DIVISORS in file.tensors:
        divisors = tuple(file.tensor(ROPE_DIVISORS).tolist())
        if len(divisors) != head_dim // 2:
            raise ExportError(f"{path}: {ROPE_DIVISORS} has {len(divisors)} entries")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ExportError(f"{path} has no token_embd.weight: is it a vocabulary without a model?")
    return ModelConfig(
        name=PRECISION_SUFFIX.sub("", path.stem),
        model_type=ARCHITECTURES[str(architecture)],
        layers=integer("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=integer("feed_forward_length"),
        context=integer("context_length"),
        vocab_size=embedding.shape[0],
        tied="output.weight" not in file.tensors,
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=number("rope.freq_base", 10000.0),
        rope_divisors=divisors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
    )


def _refuse_variants(file: GgufFile, architecture: str) -> None:
    """Raise for what a supported architecture may carry and we do not."""
    metadata = file.metadata

    def positive(key: str) -> bool:
        value = metadata.get(key)
        return isinstance(value, int | float) and value > 0

    if positive("split.count") and metadata["split.count"] != 1:
        raise ExportError(f"{file.path} is one part of several: merge them with llama-gguf-split")
    if positive(f"{architecture}.expert_count"):
        raise ExportError(f"{file.path}: mixture-of-experts models are not supported")
    if positive(f"{architecture}.attention.sliding_window"):
        raise ExportError(f"{file.path}: sliding-window attention is not supported")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or f"{architecture}.rope.scale_linear" in metadata:
        raise ExportError(f"{file.path}: rotary scaling {scaling!r} is not supported")
