"""Cut a model's head to some of its tokens.

In: a `WeightSource` and the tokens to keep. Out: a `WeightSource` with the same weights, except
that the output projection has only the rows of these tokens. The embedding stays whole, because
prompts contain other tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.export.blocks import Quantized
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.source import PartOfSource, WeightSource
from pilotfish.export.weights import EMBEDDING, HEAD, HEAD_BIAS


class CutHead(PartOfSource):
    """A `WeightSource` that wraps a whole model's source and cuts the head.

    Raises:
        ExportError: unless `tokens`, i64 [N], is an ascending proper subset of the vocabulary.
    """

    def __init__(self, whole: WeightSource, tokens: NDArray[np.int64]) -> None:
        config, size = whole.config, whole.vocabulary.vocab_size
        if not 0 < len(tokens) < size:
            raise ExportError(
                f"{config.name} has {size} tokens: its head can be cut to 1 or "
                f"more tokens, but fewer than that, not to {len(tokens)}"
            )
        if tokens[0] < 0 or tokens[-1] >= size or (np.diff(tokens) <= 0).any():
            raise ExportError("the tokens of a cut head must ascend within the vocabulary")
        self._tokens = tokens
        self._head = EMBEDDING if config.tied else HEAD
        super().__init__(
            whole, msgspec.structs.replace(config, tied=False, head_tokens=len(tokens))
        )

    def names(self) -> Collection[str]:
        """Return the names of the whole model's weights, and of an untied head."""
        return [*(name for name in self.whole.names() if name != HEAD), HEAD]

    def name_in_whole(self, name: str) -> str:
        """Return the name of the whole head, or any other name unchanged."""
        return self._head if name == HEAD else name

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read a weight. Of the head, read only the rows of the kept tokens."""
        weight = super().tensor(name)
        return weight[self._tokens] if name in {HEAD, HEAD_BIAS} else weight

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Read a weight in parts; the head in a single part."""
        return iter([self.tensor(name)]) if name in {HEAD, HEAD_BIAS} else super().rows(name)

    def quantized(self, name: str) -> Quantized | None:
        """Read a weight's blocks. Of the head, read only the rows of the kept tokens."""
        blocks = super().quantized(name)
        return blocks if blocks is None or name != HEAD else blocks.take(self._tokens)
