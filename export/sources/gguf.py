"""A GGUF file as a source: llama (Mistral is one, too), qwen2 and qwen3.

In: a path. Out: a `WeightSource` in Hugging Face's names and rotary convention: GGUF stores
llama's q and k with the two halves of each head interleaved, and they are put back here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Source
from pilotfish.export.blocks import Quantized
from pilotfish.export.errors import ExportError
from pilotfish.export.sources.gguf_blocks import FORMATS
from pilotfish.export.sources.gguf_config import (
    KEYS,
    LAYER_NAMES,
    ROPE_DIVISORS,
    read_metadata,
)
from pilotfish.export.sources.gguf_file import GgufFile
from pilotfish.export.sources.hashing import hash_files
from pilotfish.export.sources.source import Progress
from pilotfish.export.tokenizers.gguf import GgufVocabulary, gguf_templates
from pilotfish.export.weights import FileSettings, check_weights

T = TypeVar("T", np.float32, np.int64)
FLOATS = frozenset({"F32", "F16", "BF16", "F64"})
# GGUF's names → Hugging Face's; {} is the layer.
GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


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
        ignored: Collection[str] = (),
    ) -> None:
        self._file = GgufFile(path)
        self._progress, self._ignored = progress, list(ignored)
        self._kind: Literal["default", "gguf"] = kind
        self._location = location or path.name
        self._gguf_names = {_canonical(name, path): name for name in self._file.tensors}
        self._gguf_names.pop(ROPE_DIVISORS, None)
        self.config = read_metadata(self._file, ignored)
        self._check_shapes()
        vocabulary = GgufVocabulary(self._file.metadata, path)
        self.tokenizer_json = vocabulary.tokenizer_json
        self.vocab_size = vocabulary.size
        if self.vocab_size > self.config.vocab_size:
            raise ExportError(
                f"{path}: the tokenizer knows {self.vocab_size} tokens, token_embd.weight only "
                f"{self.config.vocab_size}"
            )
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.chat_template, self.chat_templates = gguf_templates(self._file.metadata)

    @cached_property
    def description(self) -> Source:
        """The model's origin; hashes the file at first use."""
        return Source(
            kind=self._kind,
            location=self._location,
            sha256=hash_files([self._file.path], self._progress),
            ignored_keys=self._ignored,
        )

    def names(self) -> Collection[str]:
        """Return the weights' names, as Hugging Face's modules have them."""
        return self._gguf_names.keys()

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read one weight as float32, dequantised, in Hugging Face's layout."""
        if name not in self._gguf_names:
            raise ExportError(f"{self._file.path} has no weight {name}")
        values = self._file.tensor(self._gguf_names[name])
        heads = self._interleaved_heads(name)
        return values if heads is None else _halves_apart(values, heads)

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Read one weight, in one part: none of these classes has one that is looked up only."""
        yield self.tensor(name)

    def blocks(self) -> Collection[str]:
        """Name the types of its blocks; refuse those that no kernel can hold."""
        kinds = self._file.kinds() - FLOATS
        if strange := sorted(kinds - FORMATS.keys()):
            raise ExportError(
                f"{self._file.path} has tensors of type {', '.join(strange)}, and only "
                f"{', '.join(FORMATS)} can be kept: take --precision int8, which dequantises them "
                "first, or --dialect llamacpp, which runs the file itself"
            )
        return sorted(kinds)

    def quantized(self, name: str) -> Quantized | None:
        """Read one weight in its own blocks, in Hugging Face's layout."""
        if name not in self._gguf_names:
            raise ExportError(f"{self._file.path} has no weight {name}")
        found = self._file.quantized(self._gguf_names[name])
        heads = self._interleaved_heads(name)
        if found is None or heads is None:
            return found
        return found.take(_halves_apart(np.arange(len(found.codes)), heads))

    def _interleaved_heads(self, name: str) -> int | None:
        """Return how many heads a weight has whose halves are interleaved; None for others."""
        if self.config.model_type != "llama":
            return None
        heads = {".q_proj.": self.config.heads, ".k_proj.": self.config.kv_heads}
        return next((count for part, count in heads.items() if part in name), None)

    def _check_shapes(self) -> None:
        """Check weights against the metadata; GGUF stores their dimensions too."""
        found = {name: self._file.tensors[gguf].shape for name, gguf in self._gguf_names.items()}
        prefix = f"{self._file.metadata['general.architecture']}."
        keys = {field: f"{prefix}{key}" for field, key in KEYS.items()}
        keys["model_type"] = "general.architecture"
        if keys["head_dim"] not in self._file.metadata:
            keys["head_dim"] += f" = {keys['hidden']} / {keys['heads']} ="
        settings = FileSettings(keys, {})
        check_weights(self.config, found, settings, str(self._file.path), _gguf_name)


def open_gguf(source: str, progress: Progress, ignored: Collection[str] = ()) -> GgufSource:
    """Open a GGUF file."""
    return GgufSource(Path(source), progress, ignored=ignored)


def _halves_apart(values: NDArray[T], heads: int) -> NDArray[T]:
    """Undo GGUF's interleaving of a head's first and second half.

    values: [heads * head_dim, …], where rows (2i, 2i + 1) of a head rotate together;
    returns the same shape, where rows (i, i + head_dim / 2) do.
    """
    # [heads, head_dim / 2, 2, …]
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    restored: NDArray[T] = pairs.swapaxes(1, 2).reshape(values.shape)
    return restored


def _gguf_name(name: str) -> str:
    """Return GGUF's name of a weight: the reverse of `_canonical`."""
    for gguf, canonical in GLOBAL_NAMES.items():
        if name == canonical:
            return gguf
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    for gguf, canonical in LAYER_NAMES.items():
        if module == canonical:
            return f"blk.{layer}.{gguf}.{kind}"
    return name


def _canonical(name: str, path: Path) -> str:
    """Return Hugging Face's name of a GGUF tensor; refuse a tensor that would not be used."""
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
