"""Keep some layers of a model: its first layers, or all except some.

In: a `WeightSource` and the number of first layers, or the indices of the layers to leave out. Out:
a `WeightSource` with the other layers in their order, and the same embedding, final norm and head.

Each layer adds to the residual stream, so a model without some of its layers predicts nearly as
before. Without further training, it predicts worse than the whole model. Its name and description
mark it as another model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import Source
from pilotfish.export.blocks import Quantized
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.source import PartOfSource, WeightSource
from pilotfish.export.weights import LAYER, TOKEN_PROJECTION, TOKEN_TABLE, layer_of


def keep_first_layers(whole: WeightSource, layers: int) -> WeightSource:
    """Keep the first layers.

    Raises:
        ExportError: unless the whole model has more than `layers` ≥ 1 layers.
    """
    config = whole.config
    if not 1 <= layers < config.layers:
        raise ExportError(
            f"{config.name} has {config.layers} layers: 1 to {config.layers - 1} layers "
            f"can be kept, not {layers}"
        )
    name = f"{config.name}-{layers}-of-{config.layers}-layers"
    return _LayerSelection(whole, range(layers), name, first_layers=layers)


def leave_out_layers(whole: WeightSource, skipped: Collection[int]) -> WeightSource:
    """Leave out the layers `skipped` of a model whose layers are all of one kind.

    Raises:
        ExportError: if the model has no such layers or no other layers, or if its layers differ.
    """
    config, left_out = whole.config, sorted({*skipped})
    remaining = [layer for layer in range(config.layers) if layer not in left_out]
    if len(remaining) + len(left_out) != config.layers or not remaining:
        raise ExportError(
            f"{config.name} has the layers 0 to {config.layers - 1}, so the layers "
            f"{', '.join(map(str, left_out)) or '(none)'} cannot be left out"
        )
    if len(config.pattern) > 1 or config.recurrence or config.token_inputs:
        raise ExportError(
            f"the layers of {config.name} differ, so none can be left out: keep its first "
            "layers with --first-layers"
        )
    name = f"{config.name}-without-{'-'.join(map(str, left_out))}"
    return _LayerSelection(whole, remaining, name, skipped_layers=left_out)


class _LayerSelection(PartOfSource):
    """A `WeightSource` that wraps a whole model's source and keeps some layers.

    Args:
        whole: the whole model.
        layers: the indices of the layers to keep, ascending.
        name: name of the remaining model.
        origin: the fields of `Source` that describe the selection.
    """

    def __init__(
        self, whole: WeightSource, layers: Sequence[int], name: str, **origin: object
    ) -> None:
        self._layers, self._origin = layers, origin
        super().__init__(
            whole, msgspec.structs.replace(whole.config, layers=len(layers), name=name)
        )
        inputs = self.config.token_inputs
        self._inputs = 0 if inputs is None else len(layers) * inputs.width  # all layers together

    @property
    def description(self) -> Source:
        """The whole model's origin, with the selection of layers."""
        return msgspec.structs.replace(self.whole.description, **self._origin)

    def names(self) -> Collection[str]:
        """Return the names of the remaining weights; layers are counted anew."""
        place = {layer: index for index, layer in enumerate(self._layers)}
        return [
            name if layer is None else LAYER.sub(f".layers.{place[layer]}.", name)
            for name in self.whole.names()
            if (layer := layer_of(name)) is None or layer in place
        ]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read a remaining weight.

        Weights of per-layer embeddings are cut to the remaining layers, which are the first ones.
        """
        if name == TOKEN_TABLE:
            return np.concatenate(list(self.rows(name)))
        weight = super().tensor(name)
        return weight[: self._inputs] if name == f"{TOKEN_PROJECTION}.weight" else weight

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Read a remaining weight in parts."""
        if name == f"{TOKEN_PROJECTION}.weight":
            yield self.tensor(name)
            return
        for part in super().rows(name):
            yield part[:, : self._inputs] if name == TOKEN_TABLE else part

    def quantized(self, name: str) -> Quantized | None:
        """Read the blocks of a remaining weight; None if the cut could divide a block."""
        if name == TOKEN_TABLE:
            return None  # a block may belong to two layers
        blocks = super().quantized(name)
        if blocks is None or name != f"{TOKEN_PROJECTION}.weight":
            return blocks
        return blocks.take(np.arange(self._inputs))

    def name_in_whole(self, name: str) -> str:
        """Return the name that a remaining weight has in the whole model."""
        layer = layer_of(name)
        if layer is None:
            return name
        if layer >= len(self._layers):
            raise ExportError(f"{self.config.name} has no weight {name}")
        return LAYER.sub(f".layers.{self._layers[layer]}.", name)
