"""Check that a file has exactly the weights that its configuration implies.

In: a `ModelConfig` and the shapes in a file. Out: nothing, or an ExportError that names a tensor
and the setting that the tensor contradicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from pilotfish.export.export_errors import ExportError
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.weight_recorder import weights
from pilotfish.export.weights import layer_of

LAYER_SIZES = ("head_dim", "kv_heads", "intermediate")  # fields of `Layer`


class FileSettings(NamedTuple):
    """The names of settings in a file, for errors.

    Attributes:
        keys: field of `ModelConfig`, or "experts." and a field of `Experts` → the file's key.
        switches: part of a weight's name → the setting that decides whether it exists.
    """

    keys: Mapping[str, str]
    switches: Mapping[str, str]

    def describe(self, config: ModelConfig, *fields: str, joint: str = " × ") -> str:
        """Format keys and their values, as in "num_attention_heads 4 × head_dim 8"."""
        return joint.join(f"{self.keys[name]} {attrgetter(name)(config)}" for name in fields)

    def find_switch(self, config: ModelConfig, name: str) -> str:
        """Return the setting that decides whether the weight exists."""
        for part, setting in self.switches.items():
            if part in name:
                return setting
        return self.describe(config, "model_type")

    def find_causes(
        self, config: ModelConfig, name: str, shape: tuple[int, ...], actual: tuple[int, ...]
    ) -> str:
        """Return the settings of the dimensions that differ.

        A dimension depends on the settings that change it if they grow by 1.
        """
        if len(shape) != len(actual):
            return self.describe(config, "model_type")
        causes = []
        for axis in (axis for axis, size in enumerate(actual) if size != shape[axis]):
            fields = [
                field
                for field, other in grown(config, self.keys)
                if _shape_of(other, name)[axis] != shape[axis]
            ]
            if not fields or "model_type" in fields:
                fields = ["model_type"]
            sizes = [attrgetter(field)(config) for field in fields]
            is_product = len(fields) == 1 or math.prod(sizes) == shape[axis]
            causes.append(self.describe(config, *fields, joint=" × " if is_product else ", "))
        return ", ".join(dict.fromkeys(causes))


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
    for name, shape in weights(config):
        wanted.add(name)
        if name not in shapes:
            absent = not any(layer_of(other) == layer_of(name) for other in shapes)
            reason = settings.find_switch(config, name)
            if absent and layer_of(name) is not None:
                reason = settings.describe(config, "layers")
            raise ExportError(f"{where} lacks {stored_name(name)}, which {reason} requires")
        if shapes[name] != shape:
            causes = settings.find_causes(config, name, shape, shapes[name])
            raise ExportError(
                f"{where}: {stored_name(name)} has shape {list(shapes[name])}, but "
                f"{causes} requires {list(shape)}"
            )
    for name in shapes:
        if name not in wanted:
            beyond = (layer_of(name) or 0) >= config.layers
            reason = (
                settings.describe(config, "layers")
                if beyond
                else settings.find_switch(config, name)
            )
            raise ExportError(
                f"{where} has {stored_name(name)}, which contradicts {reason}: the exported "
                "model might compute something else"
            )


def _shape_of(config: ModelConfig, name: str) -> tuple[int, ...]:
    return next(shape for other, shape in weights(config) if other == name)


def grown(config: ModelConfig, fields: Collection[str]) -> Iterator[tuple[str, ModelConfig]]:
    """Yield each field with a size, and the configuration in which this size is larger by 1.

    Sizes that the class sets for some layers count as the field model_type.
    """
    for field in fields:
        larger = _grow(config, field)
        if larger is not None:
            yield field, larger
    pattern = config.pattern
    for size in LAYER_SIZES:
        pattern = tuple(_grow(layer, size) or layer for layer in pattern)
    yield "model_type", msgspec.structs.replace(config, pattern=pattern)


def _grow(value: Any, field: str) -> Any:
    """Return the struct with the size `field` larger by 1; None if the struct has no such size."""
    name, _, inner = field.partition(".")
    size = getattr(value, name, None)
    larger = _grow(size, inner) if inner else size + 1 if type(size) is int else None
    return None if larger is None else msgspec.structs.replace(value, **{name: larger})
