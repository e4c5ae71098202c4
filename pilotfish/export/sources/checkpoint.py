"""The base of sources that read weights from a model's files, safetensors or GGUF."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import Source
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.export.architectures import Names
from pilotfish.export.blocks import Quantized
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.sources.hashing import hash_files
from pilotfish.export.sources.source import Progress
from pilotfish.export.sources.tensor_names import Origin, TensorSlicer, stored_name
from pilotfish.export.sources.weight_check import FileSettings, check_weights


class Checkpoint(ABC):
    """A model's files, whose tensors `Names` maps to our weights.

    A subclass sets the attributes below, before it calls `check_weights`.

    Attributes:
        path: the file or directory.
        published: the model's origin, without hashes.
        config: the model's shape.
        vocabulary: the tokenizer, the end tokens, and all chat templates.
        weight_names: the files' names and layouts of weights.
        origins: our name of a weight → its origin in the files.
        shapes: name of a tensor in the files → its shape.
        ignored: keys of the configuration that are ignored.
        left_out: modules of the files that are not exported.
    """

    config: ModelConfig
    vocabulary: Vocabulary
    weight_names: Names
    origins: dict[str, Origin]
    shapes: Mapping[str, tuple[int, ...]]

    def __init__(
        self, path: Path, progress: Progress, published: Source, ignored: Collection[str]
    ) -> None:
        self.path, self.published, self._progress = path, published, progress
        self.ignored: list[str] = [*ignored]
        self.left_out: list[str] = []
        self._last: tuple[tuple[str, int | None], NDArray[np.float32]] | None = None

    @abstractmethod
    def hashed_files(self) -> Sequence[Path]:
        """Return the files that determine the model."""

    @abstractmethod
    def read_stored(self, name: str, expert: int | None) -> NDArray[np.float32]:
        """Read a tensor of the files, or an expert's part of it."""

    @abstractmethod
    def read_blocks(self, origin: Origin) -> Quantized | None:
        """Read a matrix of the files in its stored blocks; None if it has none."""

    @cached_property
    def description(self) -> Source:
        """The model's origin; the files are hashed at the first use."""
        hashes = hash_files(self.hashed_files(), self._progress)
        return msgspec.structs.replace(
            self.published, sha256=hashes, ignored_keys=self.ignored, left_out=self.left_out
        )

    @cached_property
    def slicer(self) -> TensorSlicer:
        """The extractor of our weights from the files' tensors."""
        return TensorSlicer(self.weight_names, self.config)

    def names(self) -> Collection[str]:
        """Return the weights' names; a tied output projection is not among them."""
        return self.origins.keys()

    def origin(self, name: str) -> Origin:
        """Return the origin of a weight, which must exist."""
        if name not in self.origins:
            raise ExportError(f"{self.path} has no weight {name}")
        return self.origins[name]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read one weight as float32, dequantised, in Hugging Face's layout."""
        origin = self.origin(name)
        stored = [self._read_once(each, origin) for each in origin.stored]
        return self.slicer.take(name, origin, stored)

    def quantized(self, name: str) -> Quantized | None:
        """Read one weight in its stored blocks, in Hugging Face's layout."""
        origin = self.origin(name)
        blocks = self.read_blocks(origin)
        if blocks is None or origin.part is None:
            return blocks
        return blocks.take(self.slicer.rows(name, origin, len(blocks.codes)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight, without reading it."""
        return self.slicer.shape(name, self.origins[name], self.shapes)

    def stored_name(self, name: str) -> str:
        """Return the files' name of one of our weights, for errors."""
        origin = self.origins.get(name)
        return stored_name(self.weight_names, name) if origin is None else origin.stored[0]

    def check_weights(self, settings: FileSettings) -> None:
        """Check the weights against the configuration."""
        shapes = {name: self.shape(name) for name in self.origins}
        check_weights(self.config, shapes, settings, str(self.path), self.stored_name)

    def _read_once(self, name: str, origin: Origin) -> NDArray[np.float32]:
        """Read a tensor; cache a fused tensor until its next part is read."""
        place = name, origin.expert
        if len(origin.parts) < 2:
            self._last = None
            return self.read_stored(*place)
        if self._last is None or self._last[0] != place:
            self._last = place, self.read_stored(*place)
        return self._last[1]
