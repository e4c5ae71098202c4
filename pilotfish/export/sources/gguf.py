"""A GGUF file as a source, for architectures with the attribute `gguf`.

In: a path. Out: a `WeightSource` with Hugging Face's names and order of rows and columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import Source
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.export.architectures import ARCHITECTURES
from pilotfish.export.blocks import Quantized
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.checkpoint import Checkpoint
from pilotfish.export.sources.gguf_blocks import FORMATS
from pilotfish.export.sources.gguf_config import GgufDescription, find_class
from pilotfish.export.sources.gguf_file import GgufFile
from pilotfish.export.sources.gguf_layers import head_layers, layer_number
from pilotfish.export.sources.gguf_names import DIVISORS, LONG, SHORT, gguf_names
from pilotfish.export.sources.gguf_order import full_shape, stored_order
from pilotfish.export.sources.huggingface_tokenizer import TEMPLATE_KEY
from pilotfish.export.sources.source import Progress
from pilotfish.export.sources.tensor_names import Origin, drop_unread, find_weights
from pilotfish.export.tokenizers.gguf import GgufVocabulary, gguf_templates
from pilotfish.export.weights import EMBEDDING, HEAD, TOKEN_TABLE

FLOATS = frozenset({"F32", "F16", "BF16", "F64"})


class GgufSource(Checkpoint):
    """A `WeightSource` over one GGUF file.

    Raises:
        ExportError: if the file is damaged, or its model or tokenizer is not supported.
    """

    def __init__(
        self,
        path: Path,
        progress: Progress,
        published: Source | None = None,
        *,
        ignored: Collection[str] = (),
    ) -> None:
        published = published or Source(kind="gguf", location=path.name)
        super().__init__(path, progress, published, ignored)
        self._file = GgufFile(path)
        model_type, self._variant = find_class(self._file)
        mixture = ARCHITECTURES[model_type].mixture
        self.weight_names = gguf_names(self._variant, experts=mixture is not None)
        aside = head_layers(self._file, self._variant.name)
        # Tensors with rotary factors are not weights.
        self.shapes = {
            name: info.shape
            for name, info in self._file.tensors.items()
            if name not in {DIVISORS, SHORT, LONG} and layer_number(name) not in aside
        }
        numbers = sorted({*map(layer_number, self._file.tensors)})
        self.left_out = [f"blk.{number}" for number in numbers if number in aside]
        self.origins = find_weights(self.weight_names, self.shapes)
        stored_shapes = {
            name: self.shapes[origin.stored[0]] for name, origin in self.origins.items()
        }
        model_keys = set(ignored) - {TEMPLATE_KEY}
        described = GgufDescription(self._file, model_type, stored_shapes, model_keys)
        self.config = described.config
        drop_unread(self.origins, self.config)
        self.check_weights(described.settings)
        self.vocabulary = gguf_vocabulary(self._file, self.config.name, ignored)
        if self.vocabulary.vocab_size > self.config.vocab_size:
            raise ExportError(
                f"{path}: the tokenizer has {self.vocabulary.vocab_size} tokens, but "
                f"token_embd.weight has only {self.config.vocab_size} rows"
            )

    def hashed_files(self) -> Sequence[Path]:
        """Return the file's path."""
        return [self.path]

    def read_stored(self, name: str, expert: int | None) -> NDArray[np.float32]:
        """Read a tensor of the file, or an expert's part of it."""
        return self._file.tensor(name, expert)

    def read_blocks(self, origin: Origin) -> Quantized | None:
        """Read a matrix of the file in its stored blocks; None without a kernel for them."""
        return self._file.quantized(origin.stored[0], origin.expert)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight, in Hugging Face's layout."""
        return full_shape(name, super().shape(name))

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read one weight as float32, dequantised, in Hugging Face's layout."""
        values = super().tensor(name)
        for axis in range(min(values.ndim, 2)):
            order = stored_order(self._variant, self.config, name, values.shape[axis], axis)
            values = values if order is None else values.take(order, axis)
        if name.endswith(".linear_attn.A_log"):
            if not (values < 0).all():
                raise ExportError(f"{self.path}: {self.stored_name(name)} must be below 0")
            values = np.log(-values.astype(np.float64)).astype(np.float32)
        return values.reshape(full_shape(name, values.shape))

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Read the embeddings and the head in parts, other weights as a single part."""
        origin = self.origins.get(name)
        whole = {EMBEDDING, HEAD, TOKEN_TABLE}
        if origin is None or origin.part is not None or name not in whole:
            yield self.tensor(name)
        else:
            yield from self._file.rows(origin.stored[0])

    def stored(self, name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield name and values of the tensor from which a weight is read."""
        tensor, expert = self.origins[name].stored[0], self.origins[name].expert
        label = tensor if expert is None else f"{tensor}[{expert}]"
        yield label, self._file.tensor(tensor, expert)

    def blocks(self) -> Collection[str]:
        """Return the weights' block types; refuse types for which there is no kernel."""
        kinds = self._file.kinds() - FLOATS
        if unsupported := sorted(kinds - FORMATS.keys()):
            raise ExportError(
                f"{self.path} has tensors of type {', '.join(unsupported)}, but only "
                f"{', '.join(FORMATS)} can be kept: use --precision int8, which dequantises "
                "the tensors first, or --dialect llamacpp, with which llama.cpp runs the file "
                "unchanged"
            )
        return sorted(kinds)

    def quantized(self, name: str) -> Quantized | None:
        """Read one weight in its stored blocks, in Hugging Face's layout."""
        blocks = super().quantized(name)
        if blocks is None:
            return None
        for axis, count in enumerate(blocks.codes.shape):
            order = stored_order(self._variant, self.config, name, count, axis)
            if order is not None:
                blocks = blocks.take_columns(order) if axis else blocks.take(order)
        return blocks


def gguf_vocabulary(file: GgufFile, model: str, ignored: Collection[str]) -> Vocabulary:
    """Read the vocabulary of a file; the key "chat_template" omits the chat templates."""
    read = GgufVocabulary(file.metadata, file.path)
    ignores_chat = TEMPLATE_KEY in ignored
    template, named = (None, {}) if ignores_chat else gguf_templates(file.metadata)
    return Vocabulary(
        model=model,
        tokenizer_json=read.tokenizer_json,
        vocab_size=read.size,
        bos_id=read.bos_id,
        eos_ids=read.eos_ids,
        chat_template=template,
        chat_templates=named,
        special_tokens=read.special_tokens,
    )
