"""The shape of one weight, and which settings of a model it follows from."""

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
    """One dimension of a weight, and the fields of the configuration that it follows from."""

    value: int
    fields: tuple[str, ...]


Weights = Iterator[tuple[str, tuple[WeightSize, ...]]]
"""Name and shape of one weight after the other: a damaged number of layers costs nothing."""


def linear_weights(
    config: ModelConfig, name: str, rows: WeightSize, columns: WeightSize
) -> Weights:
    """Yield a projection's weight, and its bias if it has one."""
    yield f"{name}.weight", (rows, columns)
    if wildcard_name(name) in config.form.biases:
        yield f"{name}.bias", (rows,)


def wildcard_name(name: str) -> str:
    """Replace the number in a name within a layer, an expert's, by *."""
    return NUMBER.sub(".*.", name)


def norm_weights(config: ModelConfig, name: str, width: WeightSize) -> Weights:
    """Yield weight and bias of a norm, as far as there are any."""
    if config.form.learned_norms:
        yield f"{name}.weight", (width,)
        if config.form.norm_bias:
            yield f"{name}.bias", (width,)


def layer_size(config: ModelConfig, field: str, stated: int | None) -> WeightSize:
    """Return a layer's own size, or the model's."""
    return size_of(config, field) if stated is None else WeightSize(stated, ("model_type",))


def multiply_sizes(*sizes: WeightSize) -> WeightSize:
    """Multiply sizes; what one of them follows from alone is not said of the product."""
    fields = tuple(field for size in sizes for field in size.fields)
    causes = ("model_type",) if "model_type" in fields else fields
    return WeightSize(math.prod(size.value for size in sizes), causes)


def size_of(config: ModelConfig, *fields: str) -> WeightSize:
    """Multiply these fields."""
    return WeightSize(math.prod(attrgetter(name)(config) for name in fields), fields)
