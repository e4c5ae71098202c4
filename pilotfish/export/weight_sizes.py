"""The shapes of weights, and the fields of `ModelConfig` that determine them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from pilotfish.export.model_config import ModelConfig

LAYER = re.compile(r"\.layers\.(\d+)\.")
NUMBER = re.compile(r"\.\d+\.")


class WeightSize(NamedTuple):
    """One dimension of a weight, and the fields of `ModelConfig` that determine it."""

    value: int
    fields: tuple[str, ...]


Weights = Iterator[tuple[str, tuple[WeightSize, ...]]]
"""An iterator of each weight's name and shape.

Not a list, since a damaged layer count may be huge.
"""


def linear_weights(
    config: ModelConfig, name: str, rows: WeightSize, columns: WeightSize
) -> Weights:
    """Yield a projection's weight, and its bias if it has one."""
    yield f"{name}.weight", (rows, columns)
    if wildcard_name(name) in config.form.biases:
        yield f"{name}.bias", (rows,)


def wildcard_name(name: str) -> str:
    """Replace an expert's number in a name by *."""
    return NUMBER.sub(".*.", name)


def norm_weights(config: ModelConfig, name: str, width: WeightSize) -> Weights:
    """Yield the weight and bias of a norm, if the model has them."""
    if config.form.learned_norms:
        yield f"{name}.weight", (width,)
        if config.form.norm_bias:
            yield f"{name}.bias", (width,)


def layer_size(config: ModelConfig, field: str, stated: int | None) -> WeightSize:
    """Return the layer's size `stated`, or the model's size `field` if `stated` is None."""
    return size_of(config, field) if stated is None else WeightSize(stated, ("model_type",))


def multiply_sizes(*sizes: WeightSize) -> WeightSize:
    """Multiply sizes.

    The product has all factors' fields, or only model_type if a factor has it.
    """
    fields = tuple(field for size in sizes for field in size.fields)
    causes = ("model_type",) if "model_type" in fields else fields
    return WeightSize(math.prod(size.value for size in sizes), causes)


def size_of(config: ModelConfig, *fields: str) -> WeightSize:
    """Return the product of these fields of the configuration."""
    return WeightSize(math.prod(attrgetter(name)(config) for name in fields), fields)
