"""Read the configuration of a model from a config.json's object."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pilotfish.export.model_config import ModelConfig
from pilotfish.export.sources.huggingface_config import Description


def read_config(
    values: Mapping[str, Any], name: str, where: str, ignored: Collection[str] = ()
) -> ModelConfig:
    """Read the model that a config.json describes; arguments and errors as in `Description`."""
    return Description(values, name, where, ignored).config
