"""Check that a file has exactly the weights that its configuration implies.

In: a `ModelConfig` and the shapes in a file. Out: nothing, or an ExportError that names a tensor
and the setting that the tensor contradicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

from pilotfish.export.export_errors import ExportError
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.weight_sizes import LAYER, WeightSize
from pilotfish.export.weights import weights


class FileSettings(NamedTuple):
    """The names of settings in a file, for errors.

    Attributes:
        keys: field of `ModelConfig`, or "experts." and a field of `Experts` → the file's key.
        switches: part of a weight's name → the setting that decides whether it exists.
    """

    keys: Mapping[str, str]
    switches: Mapping[str, str]

    def describe(self, config: ModelConfig, *fields: str) -> str:
        """Format keys and their values, as in "num_attention_heads 4 × head_dim 8"."""
        return " × ".join(f"{self.keys[name]} {attrgetter(name)(config)}" for name in fields)

    def find_switch(self, config: ModelConfig, name: str) -> str:
        """Return the setting that decides whether the weight exists."""
        for part, setting in self.switches.items():
            if part in name:
                return setting
        return self.describe(config, "model_type")

    def find_causes(
        self, config: ModelConfig, sizes: tuple[WeightSize, ...], shape: tuple[int, ...]
    ) -> str:
        """Return the settings of the dimensions that differ."""
        if len(sizes) != len(shape):
            return self.describe(config, "model_type")
        pairs = zip(sizes, shape, strict=True)
        wrong = [size.fields for size, actual in pairs if size.value != actual]
        return ", ".join(self.describe(config, *fields) for fields in dict.fromkeys(wrong))


def check_weights(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    settings: FileSettings,
    where: str,
    stored_name: Callable[[str], str] = str,
) -> None:
    """Check that a file has exactly the weights that its configuration implies.

    Args:
        config: the model's configuration.
        shapes: name → shape of each weight in the file.
        settings: the file's names of its settings.
        where: path of the file, for errors.
        stored_name: function from our name of a weight to the file's, for errors.

    Raises:
        ExportError: if a weight is missing, superfluous or has another shape; the message names the
            first such weight and the setting that it contradicts.
    """
    wanted = set()
    for name, sizes in weights(config):
        wanted.add(name)
        if name not in shapes:
            absent = not any(_layer(other) == _layer(name) for other in shapes)
            reason = settings.find_switch(config, name)
            if absent and _layer(name) is not None:
                reason = settings.describe(config, "layers")
            raise ExportError(f"{where} lacks {stored_name(name)}, which {reason} requires")
        shape = tuple(size.value for size in sizes)
        if shapes[name] != shape:
            raise ExportError(
                f"{where}: {stored_name(name)} has shape {list(shapes[name])}, but "
                f"{settings.find_causes(config, sizes, shapes[name])} requires {list(shape)}"
            )
    for name in shapes:
        if name not in wanted:
            beyond = (_layer(name) or 0) >= config.layers
            reason = (
                settings.describe(config, "layers")
                if beyond
                else settings.find_switch(config, name)
            )
            raise ExportError(
                f"{where} has {stored_name(name)}, which contradicts {reason}: the exported "
                "model might compute something else"
            )


def _layer(name: str) -> int | None:
    match = LAYER.search(name)
    return None if match is None else int(match[1])
