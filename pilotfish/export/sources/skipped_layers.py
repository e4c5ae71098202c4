"""Leave out some layers of a model whose layers are all of one kind.

In: a `WeightSource` and the indices of the layers to leave out. Out: a `WeightSource` with the
other layers in their order, and the same embedding, final norm and head. Each layer adds to the
residual stream, so a model without one of its middle layers predicts nearly as before. Without
further training, it predicts worse than the whole model. Its name and description mark it as
another model.
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
from pilotfish.export.weights import LAYER, layer_of


class SkippedLayers(PartOfSource):
    """A `WeightSource` that wraps a whole model's source and leaves out the layers `skipped`.

    Raises:
        ExportError: if the model has no such layers or no other layers, or if its layers differ.
    """

    def __init__(self, whole: WeightSource, skipped: Sequence[int]) -> None:
        config = whole.config
        self._skipped = sorted({*skipped})
        self._remaining = [layer for layer in range(config.layers) if layer not in self._skipped]
        if len(self._remaining) + len(self._skipped) != config.layers or not self._remaining:
            raise ExportError(
                f"{config.name} has the layers 0 to {config.layers - 1}, so the layers "
                f"{_listed(self._skipped)} cannot be left out"
            )
        if len(config.pattern) > 1 or config.recurrence or config.token_inputs:
            raise ExportError(
                f"the layers of {config.name} differ, so none can be left out: keep its first "
                "layers with --first-layers"
            )
        name = f"{config.name}-without-{'-'.join(map(str, self._skipped))}"
        super().__init__(
            whole, msgspec.structs.replace(config, layers=len(self._remaining), name=name)
        )

    @property
    def description(self) -> Source:
        """The whole model's origin, with the layers that are left out."""
        return msgspec.structs.replace(self.whole.description, skipped_layers=self._skipped)

    def names(self) -> Collection[str]:
        """Return the names of the remaining weights; layers are counted anew."""
        place = {layer: index for index, layer in enumerate(self._remaining)}
        return [
            _renumber(name, place[layer]) if layer is not None else name
            for name in self.whole.names()
            if (layer := layer_of(name)) is None or layer in place
        ]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read a remaining weight."""
        return self.whole.tensor(self._name_in_whole(name))

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Read a remaining weight in parts."""
        return self.whole.rows(self._name_in_whole(name))

    def stored(self, name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the published tensors from which a remaining weight is read."""
        return self.whole.stored(self._name_in_whole(name))

    def quantized(self, name: str) -> Quantized | None:
        """Read the blocks of a remaining weight."""
        return self.whole.quantized(self._name_in_whole(name))

    def _name_in_whole(self, name: str) -> str:
        layer = layer_of(name)
        if layer is None:
            return name
        if layer >= len(self._remaining):
            raise ExportError(f"{self.config.name} has no weight {name}")
        return _renumber(name, self._remaining[layer])


def _renumber(name: str, layer: int) -> str:
    """Return the name that the weight has in another layer."""
    return LAYER.sub(f".layers.{layer}.", name)


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "(none)"
