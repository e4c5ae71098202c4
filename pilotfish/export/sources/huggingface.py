"""A Hugging Face checkpoint in a directory as a source.

In: config.json, safetensors (single or sharded), a tokenizer and chat templates
(`huggingface_tokenizer`), and generation_config.json if present. Out: a `WeightSource`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import Source
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.export.blocks import Quantized
from pilotfish.export.export_errors import ExportError
from pilotfish.export.source_names import CONFIG
from pilotfish.export.sources.checkpoint import Checkpoint
from pilotfish.export.sources.directory_vocabulary import read_vocabulary
from pilotfish.export.sources.huggingface_config import Description
from pilotfish.export.sources.huggingface_tokenizer import IGNORABLE, token_ids
from pilotfish.export.sources.json_object import read_object
from pilotfish.export.sources.packed import PackedMatrix, join_packed
from pilotfish.export.sources.packing import Packing
from pilotfish.export.sources.safetensors_file import SafetensorsFile
from pilotfish.export.sources.source import Progress
from pilotfish.export.sources.stored import PlainTensor, StoredTensor, join_blocks
from pilotfish.export.sources.tensor_names import Origin, drop_unread, find_weights
from pilotfish.export.sources.weight_files import describe_folder, open_weights
from pilotfish.export.sources.wrapped import check_logits, text_config, text_weights
from pilotfish.export.weights import EMBEDDING, HEAD, LAYER, wildcard_name

log = logging.getLogger("pilotfish.export")
# Name suffixes of tensors in old checkpoints that are computed, not learned.
COMPUTED = (".rotary_emb.inv_freq",)


class DirectorySource(Checkpoint):
    """A `WeightSource` over a directory with config.json and safetensors.

    Raises:
        ExportError: if files are missing or damaged, or the model is not supported.
    """

    def __init__(
        self,
        path: Path,
        progress: Progress,
        published: Source | None = None,
        *,
        ignored: Collection[str] = (),
    ) -> None:
        published = published or Source(kind="directory", location=path.resolve().name)
        super().__init__(path, progress, published, ignored)
        location = published.location
        described = describe_directory(path, location, ignored)
        self.ignored += described.foreign_keys
        if described.foreign_keys:
            log.warning(
                "%s: transformers' class of this model does not read the keys %s of config.json: "
                "they are ignored",
                location,
                ", ".join(described.foreign_keys),
            )
        self.config, self.weight_names = described.config, described.architecture.names
        self._plus_one = described.architecture.plus_one
        self._files = open_weights(path)
        self._packing = described.packing
        self._tensors = self._find_tensors(described.aside, wrapped=described.wrapped)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.origins = self._find_weights()
        self.vocabulary, self._tokenizer_files = self._read_vocabulary(described.values)
        self.check_weights(described.settings)

    def hashed_files(self) -> Sequence[Path]:
        """Return the paths of configuration, tokenizer and weights."""
        weights = [file.path for file in self._files]
        return [self.path / CONFIG, *self._tokenizer_files, *weights]

    def read_stored(self, name: str, expert: int | None) -> NDArray[np.float32]:
        """Read a tensor of the checkpoint, or an expert's part of it."""
        return self._tensors[name].read(expert)

    def read_blocks(self, origin: Origin) -> Quantized | None:
        """Read a matrix of the checkpoint in its stored blocks; None if it has none."""
        matrix = self._tensors[origin.stored[0]]
        return matrix.quantized() if isinstance(matrix, PackedMatrix) else None

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's name of one of our weights, for errors."""
        stored = super().stored_name(name)
        tensor = self._tensors.get(stored)
        return tensor.name if isinstance(tensor, PlainTensor) else stored

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read one weight as float32, in the layout of `export.weights`."""
        weight = super().tensor(name)
        return np.add(weight, 1, dtype=np.float32) if self._adds_one(name) else weight

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Read one weight in parts if it is a whole plain tensor, else as a single part."""
        origin = self.origins.get(name)
        place = None if origin is None else self._tensors[origin.stored[0]]
        if origin is None or not isinstance(place, PlainTensor) or origin.part is not None:
            yield self.tensor(name)
        else:
            yield from place.rows()

    def stored(self, name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the tensors of a weight, as they are in the checkpoint."""
        origin = self.origins[name]
        for each in origin.stored:
            yield from self._tensors[each].stored(origin.expert)

    def blocks(self) -> Collection[str]:
        """Return the quantisation method if matrices are stored in blocks of integers."""
        packed = (each for each in self._tensors.values() if isinstance(each, PackedMatrix))
        has_blocks = self._packing is not None and any(matrix.in_blocks for matrix in packed)
        return [self._packing.method] if self._packing and has_blocks else []

    def _adds_one(self, name: str) -> bool:
        """Whether this norm multiplies by 1 + weight (Gemma's, Nemotron's, most of Qwen3.5's)."""
        plain = name.endswith("linear_attn.norm.weight")
        return self._plus_one and name.endswith("norm.weight") and not plain

    def _find_tensors(self, apart: Collection[str], *, wrapped: bool) -> Mapping[str, StoredTensor]:
        """Map the text model's tensor names to the stored tensors, without prefixes in `apart`."""
        stored: dict[str, SafetensorsFile] = {}
        aside: dict[str, None] = {}
        for file in self._files:
            for name in file.names():
                if name.endswith(COMPUTED):
                    continue
                prefix = next((each for each in apart if name.startswith(each)), None)
                if prefix is not None:
                    aside[name[: name.find(".", len(prefix) - 1)]] = None
                    continue
                if name in stored:
                    raise ExportError(
                        f"the tensor {name} is in two files, {stored[name].path} and {file.path}"
                    )
                stored[name] = file
        self.left_out = list(aside)
        names: Mapping[str, str] = {name: name for name in stored}
        if wrapped:
            names, self.left_out = text_weights(stored, str(self.path))
            log.warning(
                "%s is multimodal: only its text model is exported, without %s",
                self.published.location,
                ", ".join(self.left_out),
            )
        plain = {name: PlainTensor(stored[there], there) for name, there in names.items()}
        if self._packing is None:
            return join_blocks(plain, self.weight_names, self.published.location)
        return self._join_packed(self._packing, plain)

    def _join_packed(
        self, packing: Packing, plain: Mapping[str, PlainTensor]
    ) -> dict[str, StoredTensor]:
        """Join the tensors of each quantised matrix."""
        if self.weight_names.transposed:
            raise ExportError(
                f"{self.path}: {self.config.model_type} stores its matrices transposed, which "
                f"is not supported for quantised weights ({packing.method}): give the original "
                "weights"
            )
        tensors = join_packed(packing, plain)
        packed = [each for each in tensors.values() if isinstance(each, PackedMatrix)]
        if not packed:
            for each in plain.values():
                _ = each.shape  # raises for tensors of other types than floats
            raise ExportError(
                f"{self.path}: quantization_config states {packing.method}, but no matrix is "
                "quantised: remove this section if these are the original weights"
            )
        if any(not each.in_blocks for each in packed):
            log.warning(
                "%s: the weights are fp8; they are dequantised, because there is no kernel for fp8",
                self.published.location,
            )
        return tensors

    def _find_weights(self) -> dict[str, Origin]:
        """Find the origin of each of our weights."""
        origins = find_weights(self.weight_names, self.shapes)
        drop_unread(origins, self.config)
        if self.config.tied and HEAD in origins:
            self._check_head(origins)
            del origins[HEAD]
        if self._packing is not None:
            self._drop_zero_biases(origins)
        return origins

    def _drop_zero_biases(self, origins: dict[str, Origin]) -> None:
        """Drop biases that are zero and that the model does not have; some quantisers add them."""
        biased = self.config.form.biases
        for name in [name for name in origins if name.endswith("_proj.bias")]:
            module = wildcard_name(LAYER.split(name)[-1].removesuffix(".bias"))
            if module not in biased and not self._tensors[origins[name].stored[0]].read(None).any():
                del origins[name]

    def _check_head(self, origins: Mapping[str, Origin]) -> None:
        """Check that a stored tied head equals the embedding, since programs read either."""
        head, embedding = self._tensors[origins[HEAD].stored[0]], origins.get(EMBEDDING)
        other = None if embedding is None else self._tensors[embedding.stored[0]]
        if not isinstance(head, PlainTensor):
            raise ExportError(f"{self.path}: {HEAD} is quantised, although the head is tied")
        if not isinstance(other, PlainTensor) or not head.holds_same(other):
            raise ExportError(
                f"{self.path}: tie_word_embeddings states that the head is the embedding, but "
                f"{head.file.path.name} has a different {HEAD}: set tie_word_embeddings to "
                "false if that tensor is right, or remove the tensor"
            )

    def _read_vocabulary(self, model: Mapping[str, Any]) -> tuple[Vocabulary, list[Path]]:
        """Read the vocabulary, without special tokens that have no embedding, and its files.

        model: the configuration.
        """
        rows = self.config.vocab_size
        generation = read_object(self.path / "generation_config.json")
        limit = f"the embedding has only {rows} rows"
        vocabulary, files, beyond = read_vocabulary(
            self.path, self.config.name, rows, limit, [generation, model], self.ignored
        )
        if beyond:
            self.left_out = [*self.left_out, *beyond]
            log.warning(
                "%s has no embedding of the tokens %s: they are left out",
                self.published.location,
                ", ".join(beyond),
            )
        if vocabulary.bos_id is None:
            begin = (vocabulary.special_tokens or {}).get("bos_token", "")
            ids = token_ids(vocabulary.tokenizer_json)
            vocabulary = msgspec.structs.replace(vocabulary, bos_id=ids.get(begin))
        return vocabulary, files


def describe_directory(path: Path, location: str, ignored: Collection[str]) -> Description:
    """Read a directory's config.json, without its weights.

    Raises:
        ExportError: if it is missing or damaged, or the model is not supported.
    """
    file = path / CONFIG
    if not os.path.lexists(file):
        advice = describe_folder(path) or "this folder is not a Hugging Face model"
        raise ExportError(f"{path} has no {file.name}: {advice}")
    values = read_object(file)
    inner = text_config(values, str(file))
    name = location.rpartition("/")[2]
    described = Description(inner or values, name, str(file), set(ignored) - IGNORABLE)
    if inner is not None:
        described.wrapped = True
        check_logits(values, described.config, str(file))
    return described
