"""A Hugging Face checkpoint in a directory as a source.

In: config.json, safetensors (single or sharded), a tokenizer and chat templates
(`huggingface_tokenizer`) and, where present, generation_config.json. Out: a `WeightSource`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Source
from pilotfish.engines.errors import ArtifactError
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.export.config import ModelConfig
from pilotfish.export.errors import ExportError
from pilotfish.export.sources.config_keys import keys_of
from pilotfish.export.sources.hashing import hash_files
from pilotfish.export.sources.huggingface_config import read_config
from pilotfish.export.sources.huggingface_tokenizer import read_templates, read_tokenizer
from pilotfish.export.sources.safetensors_file import SafetensorsFile
from pilotfish.export.sources.source import Progress
from pilotfish.export.weights import HEAD, check_weights, embedding_of

INDEX = "model.safetensors.index.json"
# In old checkpoints, although computed or not a weight.
COMPUTED = (".rotary_emb.inv_freq", "decoder.version")


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
        self._ignored = list(ignored)
        values = _read_object(path / "config.json", required=True)
        self.config = read_directory_config(path, self._location, ignored)
        self._files = _open_weights(path)
        self._places = self._find_weights()
        self.tokenizer_json, self._tokenizer_files = read_tokenizer(path)
        self.vocab_size = self._checked_vocabulary()
        self._check_shapes(values)
        self.chat_template, self.chat_templates = read_templates(path)
        generation = _read_object(path / "generation_config.json")
        self.bos_id = self._begin_id(generation, values)
        self.eos_ids = self._end_ids(generation, values)

    @cached_property
    def description(self) -> Source:
        """The model's origin; hashes the files at first use."""
        paths = [self._path / "config.json", *self._tokenizer_files]
        return Source(
            kind=self._kind,
            location=self._location,
            revision=self._revision,
            sha256=hash_files([*paths, *(file.path for file in self._files)], self._progress),
            ignored_keys=self._ignored,
        )

    def names(self) -> Collection[str]:
        """Return the weights' names; without the output projection where it is the embedding."""
        return self._places.keys()

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read one weight as float32, in Hugging Face's layout."""
        if name not in self._places:
            raise ExportError(f"{self._path} has no weight {name}")
        file, stored_name = self._places[name]
        return file.tensor(stored_name)

    def _find_weights(self) -> dict[str, tuple[SafetensorsFile, str]]:
        """Map canonical names to file and name there."""
        stored: dict[str, SafetensorsFile] = {}
        for file in self._files:
            for name in file.names():
                if name.endswith(COMPUTED):
                    continue
                if name in stored:
                    raise ExportError(f"{name} is in {stored[name].path} and in {file.path}")
                stored[name] = file
        # A checkpoint saved without its head leaves out the prefix.
        bare = not any(name.startswith("model.") for name in stored)
        places = {}
        for name, file in stored.items():
            canonical = f"model.{name}" if bare and name != HEAD else name
            places[canonical] = (file, name)
        if self.config.tied and HEAD in places:
            self._check_head(places)
            del places[HEAD]
        return places

    def _check_head(self, places: Mapping[str, tuple[SafetensorsFile, str]]) -> None:
        """Check that a stored tied head equals the embedding: readers differ in which they use."""
        file, name = places[HEAD]
        embedding = places.get(embedding_of(self.config))
        if embedding is None or not file.holds_same(name, *embedding):
            raise ExportError(
                f"{self._path}: tie_word_embeddings says that the head is the embedding, but "
                f"{file.path.name} holds another {HEAD}: set tie_word_embeddings to false if that "
                "one is meant, or remove it"
            )

    def _check_shapes(self, values: Mapping[str, Any]) -> None:
        """Check the weights against the configuration."""
        found = {name: file.shape(stored) for name, (file, stored) in self._places.items()}
        check_weights(self.config, found, keys_of(self.config, values), str(self._path))

    def _checked_vocabulary(self) -> int:
        """Return the number of tokens; refuse a tokenizer that does not fit the model."""
        try:
            size = Tokenizer.from_json(self.tokenizer_json).vocab_size
        except ArtifactError as error:
            raise ExportError(f"{self._path}: {error}") from None
        if size > self.config.vocab_size:
            raise ExportError(
                f"{self._path}: the tokenizer knows {size} tokens, the embedding only "
                f"{self.config.vocab_size}"
            )
        return size

    def _begin_id(self, *objects: dict[str, Any]) -> int | None:
        """Return the id that begins a text, from the first object that names one."""
        for values in objects:
            id = values.get("bos_token_id")
            if isinstance(id, int) and 0 <= id < self.vocab_size:
                return id
        return None

    def _end_ids(self, *objects: dict[str, Any]) -> list[int]:
        """Return ids that end a generation, from the first object that names any."""
        for values in objects:
            stated = values.get("eos_token_id")
            if stated is not None:
                ids = stated if isinstance(stated, list) else [stated]
                if all(isinstance(id, int) and 0 <= id < self.vocab_size for id in ids):
                    return list(dict.fromkeys(ids))
                raise ExportError(
                    f"{self._path}: eos_token_id {stated!r} is not in the vocabulary of "
                    f"{self.vocab_size} tokens"
                )
        return []


def open_directory(
    source: str, progress: Progress, ignored: Collection[str] = ()
) -> DirectorySource:
    """Open a directory with config.json and safetensors."""
    return DirectorySource(Path(source), progress, ignored=ignored)


def read_directory_config(path: Path, location: str, ignored: Collection[str]) -> ModelConfig:
    """Read a directory's config.json; needs no weights.

    Raises:
        ExportError: if it is missing or damaged, or the model is not supported.
    """
    values = _read_object(path / "config.json", required=True)
    return read_config(values, location.rpartition("/")[2], str(path / "config.json"), ignored)


def _read_object(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Read a JSON object; {} if the file may be absent and is."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        if required:
            raise ExportError(
                f"{path.parent} holds no {path.name}: it is not a Hugging Face model"
            ) from None
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise ExportError(f"{path} cannot be read: {error}") from None


def _open_weights(path: Path) -> list[SafetensorsFile]:
    """Open the shards that the index names, or the only safetensors file."""
    if (path / INDEX).is_file():
        shards = _read_object(path / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(v, str) for v in shards.values()):
            raise ExportError(f"{path / INDEX} has no weight_map")
        return [SafetensorsFile(path / Path(name).name) for name in sorted(set(shards.values()))]
    found = sorted(path.glob("*.safetensors"))
    whole = path / "model.safetensors"
    if whole in found or len(found) == 1:
        return [SafetensorsFile(whole if whole in found else found[0])]
    if found:
        raise ExportError(f"{path} holds several safetensors files and no {INDEX}")
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise ExportError(
            f"{path} holds pickled weights only, which can run code when they are read: "
            "convert them to safetensors"
        )
    raise ExportError(f"{path} holds no safetensors")
