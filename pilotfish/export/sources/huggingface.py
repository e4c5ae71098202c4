"""A Hugging Face checkpoint in a directory as a source.

In: config.json, safetensors (single or sharded), a tokenizer and chat templates
(`huggingface_tokenizer`), and generation_config.json if present. Out: a `WeightSource`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import Source
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.export.blocks import Quantized
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.directory_vocabulary import read_vocabulary
from pilotfish.export.sources.hashing import hash_files
from pilotfish.export.sources.huggingface_config import Description
from pilotfish.export.sources.huggingface_tokenizer import IGNORABLE, token_ids
from pilotfish.export.sources.json_object import read_object
from pilotfish.export.sources.packed import PackedMatrix, join_packed
from pilotfish.export.sources.packing import Packing
from pilotfish.export.sources.safetensors_file import SafetensorsFile
from pilotfish.export.sources.source import Progress
from pilotfish.export.sources.stored import PlainTensor, StoredTensor, join_blocks
from pilotfish.export.sources.tensor_names import (
    Origin,
    TensorSlicer,
    drop_unread,
    find_weights,
    stored_name,
)
from pilotfish.export.sources.weight_check import FileSettings, check_weights
from pilotfish.export.sources.weight_files import describe_folder, open_weights
from pilotfish.export.sources.wrapped import check_logits, text_config, text_weights
from pilotfish.export.weights import EMBEDDING, HEAD, LAYER, wildcard_name

log = logging.getLogger("pilotfish.export")
# Name suffixes of tensors in old checkpoints that are computed, not learned.
COMPUTED = (".rotary_emb.inv_freq",)


class DirectorySource:
    """A `WeightSource` over a directory with config.json and safetensors.

    Raises:
        ExportError: if files are missing or damaged, or the model is not supported.
    """

    def __init__(
        self,
        path: Path,
        progress: Progress,
        *,
        kind: Literal["directory", "hub"] = "directory",
        location: str | None = None,
        revision: str | None = None,
        ignored: Collection[str] = (),
    ) -> None:
        self._path, self._progress = path, progress
        self._kind: Literal["directory", "hub"] = kind
        self._location = location or path.resolve().name
        self._revision = revision
        self._last: tuple[tuple[str, int | None], NDArray[np.float32]] | None = None
        values = _read_config(path)
        described = describe_directory(path, self._location, ignored)
        self._ignored = [*ignored, *described.foreign_keys]
        if described.foreign_keys:
            log.warning(
                "%s: transformers' class of this model does not read the keys %s of config.json: "
                "they are ignored",
                self._location,
                ", ".join(described.foreign_keys),
            )
        self.config, self._names = described.config, described.architecture.names
        self._plus_one = described.architecture.plus_one
        self._files = open_weights(path)
        self._left_out: list[str] = []
        self._packing, self._aside = described.packing, described.aside
        inner = text_config(values, str(path))
        self._tensors = self._find_tensors(wrapped=inner is not None)
        self._slicer = TensorSlicer(self._names, self.config)
        self._origins = self._find_weights()
        self.vocabulary, self._tokenizer_files = self._read_vocabulary(
            values if inner is None else inner
        )
        self._check_shapes(described.settings)

    @cached_property
    def description(self) -> Source:
        """The model's origin; the files are hashed at the first use."""
        paths = [self._path / "config.json", *self._tokenizer_files]
        return Source(
            kind=self._kind,
            location=self._location,
            revision=self._revision,
            sha256=hash_files([*paths, *(file.path for file in self._files)], self._progress),
            ignored_keys=self._ignored,
            left_out=self._left_out,
        )

    def names(self) -> Collection[str]:
        """Return the weights' names; a tied output projection is not among them."""
        return self._origins.keys()

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read one weight as float32, in the layout of `export.weights`."""
        if name not in self._origins:
            raise ExportError(f"{self._path} has no weight {name}")
        origin = self._origins[name]
        stored = [self._read_stored(each, origin.expert) for each in origin.stored]
        weight = self._slicer.take(name, origin, stored)
        return np.add(weight, 1, dtype=np.float32) if self._adds_one(name) else weight

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Read one weight in parts if it is a whole plain tensor, else as a single part."""
        origin = self._origins.get(name)
        place = None if origin is None else self._tensors[origin.stored[0]]
        if origin is None or not isinstance(place, PlainTensor) or origin.part is not None:
            yield self.tensor(name)
        else:
            yield from place.rows()

    def stored(self, name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the tensors of a weight, as they are in the checkpoint."""
        origin = self._origins[name]
        for each in origin.stored:
            yield from self._tensors[each].stored(origin.expert)

    def blocks(self) -> Collection[str]:
        """Return the quantisation method if matrices are stored in blocks of integers."""
        packed = (each for each in self._tensors.values() if isinstance(each, PackedMatrix))
        has_blocks = self._packing is not None and any(matrix.in_blocks for matrix in packed)
        return [self._packing.method] if self._packing and has_blocks else []

    def quantized(self, name: str) -> Quantized | None:
        """Read one weight in its stored blocks."""
        if name not in self._origins:
            raise ExportError(f"{self._path} has no weight {name}")
        origin = self._origins[name]
        matrix = self._tensors[origin.stored[0]]
        blocks = matrix.quantized() if isinstance(matrix, PackedMatrix) else None
        if blocks is None or origin.part is None:
            return blocks
        return blocks.take(self._slicer.rows(name, origin, len(blocks.codes)))

    def _adds_one(self, name: str) -> bool:
        """Whether this norm multiplies by 1 + weight (Gemma's, Nemotron's, most of Qwen3.5's)."""
        plain = name.endswith("linear_attn.norm.weight")
        return self._plus_one and name.endswith("norm.weight") and not plain

    def _read_stored(self, name: str, expert: int | None) -> NDArray[np.float32]:
        """Read a tensor, or an expert's part; cache the last tensor, for its next part."""
        if self._last is None or self._last[0] != (name, expert):
            self._last = (name, expert), self._tensors[name].read(expert)
        return self._last[1]

    def _find_tensors(self, *, wrapped: bool) -> Mapping[str, StoredTensor]:
        """Map the text model's tensor names to the stored tensors."""
        stored: dict[str, SafetensorsFile] = {}
        aside: dict[str, None] = {}
        for file in self._files:
            for name in file.names():
                if name.endswith(COMPUTED):
                    continue
                prefix = next((each for each in self._aside if name.startswith(each)), None)
                if prefix is not None:
                    aside[name[: name.find(".", len(prefix) - 1)]] = None
                    continue
                if name in stored:
                    raise ExportError(
                        f"the tensor {name} is in two files, {stored[name].path} and {file.path}"
                    )
                stored[name] = file
        self._left_out = list(aside)
        if not wrapped:
            plain = {name: PlainTensor(file, name) for name, file in stored.items()}
            return self._join(plain)
        names, self._left_out = text_weights(stored, str(self._path))
        log.warning(
            "%s is multimodal: only its text model is exported, without %s",
            self._location,
            ", ".join(self._left_out),
        )
        plain = {name: PlainTensor(stored[there], there) for name, there in names.items()}
        return self._join(plain)

    def _join(self, plain: Mapping[str, PlainTensor]) -> Mapping[str, StoredTensor]:
        """Join the tensors of quantised matrices, or of experts in MXFP4."""
        if self._packing is not None:
            return self._join_packed(self._packing, plain)
        return join_blocks(plain, self._names, self._location)

    def _join_packed(
        self, packing: Packing, plain: Mapping[str, PlainTensor]
    ) -> dict[str, StoredTensor]:
        """Join the tensors of each quantised matrix."""
        if self._names.transposed:
            raise ExportError(
                f"{self._path}: {self.config.model_type} stores its matrices transposed, which "
                f"is not supported for quantised weights ({packing.method}): give the original "
                "weights"
            )
        tensors = join_packed(packing, plain)
        packed = [each for each in tensors.values() if isinstance(each, PackedMatrix)]
        if not packed:
            for each in plain.values():
                _ = each.shape  # raises for tensors of other types than floats
            raise ExportError(
                f"{self._path}: quantization_config states {packing.method}, but no matrix is "
                "quantised: remove this section if these are the original weights"
            )
        if any(not each.in_blocks for each in packed):
            log.warning(
                "%s: the weights are fp8; they are dequantised, because there is no kernel for fp8",
                self._location,
            )
        return tensors

    def _find_weights(self) -> dict[str, Origin]:
        """Find the origin of each of our weights."""
        stored = {name: tensor.shape for name, tensor in self._tensors.items()}
        origins = find_weights(self._names, stored)
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
            raise ExportError(f"{self._path}: {HEAD} is quantised, although the head is tied")
        if not isinstance(other, PlainTensor) or not head.holds_same(other):
            raise ExportError(
                f"{self._path}: tie_word_embeddings states that the head is the embedding, but "
                f"{head.file.path.name} has a different {HEAD}: set tie_word_embeddings to "
                "false if that tensor is right, or remove the tensor"
            )

    def _check_shapes(self, settings: FileSettings) -> None:
        """Check the weights against the configuration."""
        stored_shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        shapes = {
            name: self._slicer.shape(name, origin, stored_shapes)
            for name, origin in self._origins.items()
        }
        check_weights(self.config, shapes, settings, str(self._path), self._stored_name)

    def _stored_name(self, name: str) -> str:
        """Return the name of a weight in the checkpoint."""
        if name in self._origins:
            stored = self._origins[name].stored[0]
            tensor = self._tensors[stored]
            return tensor.name if isinstance(tensor, PlainTensor) else stored
        return stored_name(self._names, name)

    def _read_vocabulary(self, model: dict[str, Any]) -> tuple[Vocabulary, list[Path]]:
        """Read the vocabulary, without special tokens that have no embedding, and its files.

        model: the configuration.
        """
        rows, generation = (
            self.config.vocab_size,
            read_object(self._path / "generation_config.json"),
        )
        limit = f"the embedding has only {rows} rows"
        vocabulary, files, beyond = read_vocabulary(
            self._path, self.config.name, rows, limit, [generation, model], self._ignored
        )
        if beyond:
            self._left_out = [*self._left_out, *beyond]
            log.warning(
                "%s has no embedding of the tokens %s: they are left out",
                self._location,
                ", ".join(beyond),
            )
        if vocabulary.bos_id is None:
            begin = (vocabulary.special_tokens or {}).get("bos_token", "")
            ids = token_ids(vocabulary.tokenizer_json)
            vocabulary = msgspec.structs.replace(vocabulary, bos_id=ids.get(begin))
        return vocabulary, files


def open_directory(
    source: str, progress: Progress, ignored: Collection[str] = ()
) -> DirectorySource:
    """Open a directory with config.json and safetensors."""
    return DirectorySource(Path(source), progress, ignored=ignored)


def describe_directory(path: Path, location: str, ignored: Collection[str]) -> Description:
    """Read a directory's config.json, without its weights.

    Raises:
        ExportError: if it is missing or damaged, or the model is not supported.
    """
    values, where = _read_config(path), str(path / "config.json")
    text_values = text_config(values, where)
    name = location.rpartition("/")[2]
    model_keys = set(ignored) - IGNORABLE
    if text_values is None:
        return Description(values, name, where, model_keys)
    description = Description(text_values, name, where, model_keys)
    check_logits(values, description.config, where)
    return description


def _read_config(path: Path) -> dict[str, Any]:
    """Read a directory's config.json, which must exist."""
    file = path / "config.json"
    if not os.path.lexists(file):
        advice = describe_folder(path) or "this folder is not a Hugging Face model"
        raise ExportError(f"{path} has no {file.name}: {advice}")
    return read_object(file)
