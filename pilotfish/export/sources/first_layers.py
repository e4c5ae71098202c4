"""Cut a model down to its first layers.

In: a `WeightSource` and the number of layers to keep. Out: a `WeightSource` with the same
embedding, the first layers, and the same final norm and head. Without further training, the short
model predicts worse than the whole model. Its name and description mark it as another model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import Source
from pilotfish.export.blocks import Quantized
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.source import PartOfSource, WeightSource
from pilotfish.export.weights import EMBEDDING, HEAD, TOKEN_PROJECTION, TOKEN_TABLE, layer_of


class FirstLayers(PartOfSource):
    """A `WeightSource` that wraps a whole model's source and cuts its layers.

    Raises:
        ExportError: unless the whole model has more than `layers` ≥ 1 layers.
    """

    def __init__(self, whole: WeightSource, layers: int) -> None:
        config = whole.config
        if not 1 <= layers < config.layers:
            raise ExportError(
                f"{config.name} has {config.layers} layers: 1 to {config.layers - 1} layers "
                f"can be kept, not {layers}"
            )
        self._layers = layers
        name = f"{config.name}-{layers}-of-{config.layers}-layers"
        super().__init__(whole, msgspec.structs.replace(config, layers=layers, name=name))

    @property
    def description(self) -> Source:
        """The whole model's origin, with the number of layers."""
        return msgspec.structs.replace(self.whole.description, first_layers=self._layers)

    def names(self) -> Collection[str]:
        """Return the names of the remaining weights."""
        return [name for name in self.whole.names() if self._keeps(name)]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read a remaining weight.

        Weights of per-layer embeddings are cut to the remaining layers.
        """
        if not self._keeps(name):
            raise ExportError(f"{self.config.name} has no weight {name}")
        if name == TOKEN_TABLE:
            return np.concatenate(list(self.rows(name)))
        weight = self.whole.tensor(name)
        return weight[: self._inputs] if name == f"{TOKEN_PROJECTION}.weight" else weight

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Read a remaining weight in parts; the table of per-layer embeddings is cut."""
        if name in {EMBEDDING, HEAD}:
            yield from self.whole.rows(name)
            return
        if name != TOKEN_TABLE or self.config.token_inputs is None:
            yield self.tensor(name)
            return
        for part in self.whole.rows(name):
            yield part[:, : self._layers * self.config.token_inputs.width]

    def quantized(self, name: str) -> Quantized | None:
        """Read the blocks of a remaining weight; None if the cut could divide a block."""
        if not self._keeps(name):
            raise ExportError(f"{self.config.name} has no weight {name}")
        if name == TOKEN_TABLE:
            return None  # a block may belong to two layers
        blocks = self.whole.quantized(name)
        if blocks is None or name != f"{TOKEN_PROJECTION}.weight":
            return blocks
        return blocks.take(np.arange(self._inputs))

    @property
    def _inputs(self) -> int:
        """Return the number of rows of the projection to the remaining per-layer embeddings."""
        inputs = self.config.token_inputs
        return 0 if inputs is None else self._layers * inputs.width

    def _keeps(self, name: str) -> bool:
        return (layer_of(name) or 0) < self._layers
