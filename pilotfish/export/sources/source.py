"""The interface of sources of weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import Source
from pilotfish.export.blocks import Quantized
from pilotfish.export.model_config import ModelConfig

Progress = Callable[[str, int, int | None], None]
"""A callback, called as progress(label, done, total); total is None while it is unknown."""


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
    def tokenizer_json(self) -> str:
        """Content of a `tokenizer.json`."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the tokenizer: largest id + 1, without padding rows."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the default chat template; None without one."""
        ...

    @property
    def chat_templates(self) -> dict[str, str]:
        """Jinja sources of further chat templates by name, such as "tool_use"."""
        ...

    @property
    def special_tokens(self) -> dict[str, str]:
        """Tokens that chat templates can write by name, such as "bos_token": name → token."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id of the token that begins a text; None if there is none."""
        ...

    @property
    def eos_ids(self) -> list[int]:
        """The ids of the tokens that end a generation."""
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
        self.tokenizer_json = whole.tokenizer_json
        self.vocab_size = whole.vocab_size
        self.chat_template, self.chat_templates = whole.chat_template, whole.chat_templates
        self.special_tokens = whole.special_tokens
        self.bos_id = whole.bos_id
        self.eos_ids = whole.eos_ids

    def stored(self, name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the published tensors from which a weight is read."""
        return self.whole.stored(name)

    def blocks(self) -> Collection[str]:
        """Return the block types of the whole model's weights."""
        return self.whole.blocks()
