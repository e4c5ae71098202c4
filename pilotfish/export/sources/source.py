"""The interface of every source of weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import Source
from pilotfish.export.blocks import Quantized
from pilotfish.export.model_config import ModelConfig

Progress = Callable[[str, int, int | None], None]
"""Called as progress(label, done, total); total is None while it is unknown."""


class WeightSource(Protocol):
    """A model on disk: configuration, tokenizer, and weights that are read one at a time."""

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
        """Number of the tokenizer's tokens: largest id + 1, without padding rows."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template, if the model has one."""
        ...

    @property
    def chat_templates(self) -> dict[str, str]:
        """Jinja sources of further chat templates by their names, such as "tool_use"."""
        ...

    @property
    def special_tokens(self) -> dict[str, str]:
        """Tokens that chat templates may write by a name, such as "bos_token"."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        ...

    @property
    def eos_ids(self) -> list[int]:
        """Tokens that end a generation."""
        ...

    def names(self) -> Collection[str]:
        """Return the weights' names, as Hugging Face's modules have them."""
        ...

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read one weight: Hugging Face's layout ([out, in]) and rotary convention, dequantised.

        The array may be a read-only view of the file.

        Raises:
            ExportError: if the source has no such weight or cannot decode it.
        """
        ...

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Read one weight as `tensor` would, in parts: neighbouring rows each, some megabytes.

        Raises:
            ExportError: as `tensor`.
        """
        ...

    def blocks(self) -> Collection[str]:
        """Name the kinds of blocks that weights are stored in ("Q4_1", "gptq"); none: as floats.

        Raises:
            ExportError: if some of them cannot be kept.
        """
        ...

    def quantized(self, name: str) -> Quantized | None:
        """Read one weight as `tensor` would return it, in the blocks that it is stored in.

        None for a weight that is stored in none.

        Raises:
            ExportError: if the source has no such weight, or its blocks cannot be kept.
        """
        ...
