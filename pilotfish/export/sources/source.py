"""The interface of sources of weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import Source
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.export.blocks import Quantized
from pilotfish.export.model_config import ModelConfig

Progress = Callable[[str, int, int | None], None]
"""A callback, called as progress(label, done, total); total is None while it is unknown."""


def silent(label: str, done: int, total: int | None) -> None:
    """Report no progress."""


class WeightSource(Protocol):
    """A model on disk: configuration, tokenizer, and weights, which are read one at a time."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    @property
    def description(self) -> Source:
        """The model's origin, for the manifest."""
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer, the end tokens, and all chat templates."""
        ...

    def names(self) -> Collection[str]:
        """Return the weights' names, by Hugging Face's modules."""
        ...

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read one weight, dequantised, in Hugging Face's layout ([out, in]) and rotary convention.

        The array may be a read-only view of the file.

        Raises:
            ExportError: if the weight does not exist or cannot be decoded.
        """
        ...

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Read the result of `tensor` in parts: consecutive rows, of a few megabytes each.

        Raises:
            ExportError: see `tensor`.
        """
        ...

    def stored(self, name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the published tensors from which a weight is read, by their names, for errors."""
        ...

    def blocks(self) -> Collection[str]:
        """Return the block types of the weights ("Q4_1", "gptq"); empty if they are floats.

        Raises:
            ExportError: if some types cannot be kept.
        """
        ...

    def quantized(self, name: str) -> Quantized | None:
        """Read one weight in the layout of `tensor`, in its stored blocks; None if it has none.

        Raises:
            ExportError: if the weight does not exist, or its blocks cannot be kept.
        """
        ...


class PartOfSource:
    """The base of sources that select some weights of another source, and keep all else of it.

    Attributes:
        whole: the other source.
        config: configuration of the model that remains.
    """

    def __init__(self, whole: WeightSource, config: ModelConfig) -> None:
        self.whole = whole
        self.config = config
        self.vocabulary = msgspec.structs.replace(whole.vocabulary, model=config.name)

    @property
    def description(self) -> Source:
        """The whole model's origin."""
        return self.whole.description

    def name_in_whole(self, name: str) -> str:
        """Return the name that a weight has in the other source."""
        return name

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read a weight."""
        return self.whole.tensor(self.name_in_whole(name))

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Read a weight in parts."""
        return self.whole.rows(self.name_in_whole(name))

    def stored(self, name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the published tensors from which a weight is read."""
        return self.whole.stored(self.name_in_whole(name))

    def quantized(self, name: str) -> Quantized | None:
        """Read a weight's blocks."""
        return self.whole.quantized(self.name_in_whole(name))

    def blocks(self) -> Collection[str]:
        """Return the block types of the whole model's weights."""
        return self.whole.blocks()
