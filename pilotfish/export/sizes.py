"""The sizes of a model before it is exported, from its configuration: no weight is read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path

import msgspec

from pilotfish.boards.shape import ModelShape, Parameters
from pilotfish.engines.manifest import CachedLayer
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.sources import WeightSource
from pilotfish.export.sources.hub import describe_hub
from pilotfish.export.sources.huggingface import describe_directory
from pilotfish.export.weight_recorder import weights
from pilotfish.export.weights import EMBEDDING, HEAD, TOKEN_TABLE


def shape_of_source(source: WeightSource) -> ModelShape:
    """Return the sizes of a source's model; blocks that cannot be kept are not listed."""
    blocks = list[str]()
    with suppress(ExportError):
        blocks = sorted(source.blocks())
    return shape_of_config(source.config, blocks)


def shape_by_config(
    source: str, ignored: Collection[str], first_layers: int | None, skipped: Collection[int]
) -> ModelShape:
    """Return the sizes of a model, or of its part, by its config.json alone.

    source: a directory, or a hub id, of which config.json is fetched.

    Raises the errors of `open_source`.
    """
    path = Path(source)
    if path.is_dir():
        described = describe_directory(path, path.resolve().name, ignored)
    else:
        described = describe_hub(source, ignored)
    config = described.config
    layers = min(first_layers or config.layers, config.layers) - len(set(skipped))
    config = msgspec.structs.replace(config, layers=max(layers, 1))
    packing = described.packing
    return shape_of_config(config, [] if packing is None else [packing.method])


def shape_of_config(config: ModelConfig, blocks: Sequence[str]) -> ModelShape:
    """Return the sizes of a model; `blocks`: types of its quantised blocks."""
    heads = [(layer, config.heads_of(layer)) for layer in config.cached]
    return ModelShape(
        name=config.name,
        context=config.short_context or config.context,
        longest=config.context,
        cached=tuple(
            CachedLayer(layer=layer, kv_heads=each.keys, head_dim=each.dim) for layer, each in heads
        ),
        parameters=count_parameters(config),
        tied=config.tied,
        blocks=tuple(blocks),
        states=bool(config.recurrent),
    )


def count_parameters(config: ModelConfig) -> Parameters:
    """Count a model's parameters."""
    counts = dict.fromkeys(("matrices", "experts", "tables", "head", "others"), 0)
    for name, shape in weights(config):
        counts[_kind(name, shape)] += prod(shape)
    experts = config.experts
    share = 0.0 if experts is None else experts.chosen / experts.count
    return Parameters(active_experts=round(counts["experts"] * share), **counts)


def _kind(name: str, shape: tuple[int, ...]) -> str:
    """Return the field of `Parameters` that counts a weight."""
    if name in {EMBEDDING, TOKEN_TABLE} or name.endswith("embed_positions.weight"):
        return "tables"
    if name == HEAD:
        return "head"
    if ".experts." in name:
        return "experts"
    return "matrices" if len(shape) == 2 else "others"
