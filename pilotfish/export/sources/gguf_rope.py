"""Translate the rotary embedding of a GGUF file to Hugging Face's parameters.

In: the file's keys, and its tensors with divisors of frequencies. Out: a table for
`export.sources.rotary`.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from pilotfish.export.export_errors import ExportError
from pilotfish.export.model_config import Layer, ModelConfig
from pilotfish.export.sources.fields import Fields, format_value
from pilotfish.export.sources.gguf_file import GgufFile
from pilotfish.export.sources.gguf_names import DIVISORS, LONG, SHORT

# Keys of `rope_table`'s result → GGUF's keys, for errors.
ROPE_KEYS = {
    "rope_scaling.rope_type": "rope.scaling.type",
    "rope_scaling.factor": "rope.scaling.factor",
    "rope_scaling.original_max_position_embeddings": "rope.scaling.original_context_length",
    "rope_scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope_scaling.beta_slow": "rope.scaling.yarn_beta_slow",
    "rope_scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "rope_scaling.llama_4_scaling_beta": "attention.temperature_scale",
    "partial_rotary_factor": "rope.dimension_count",
}
UNROTATED = 1e29  # the converter writes 1e30 for pairs of channels that are not rotated
YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def rope_table(file: GgufFile, fields: Fields, truncate: bool | None) -> dict[str, Any]:
    """Translate the scaling; `truncate` is the class's YaRN parameter, None if the class has none.

    Raises:
        ExportError: if the scaling is unknown, or a number is missing.
    """
    kind = fields.get("rope.scaling.type", str, "linear")  # the default of llama.cpp
    if {SHORT, LONG} & file.tensors.keys():
        return _longrope(file, fields)
    if kind == "none":
        for key in ("rope.scaling.factor", "rope.scale_linear"):
            fields.mark_read(key)
        return {"rope_type": "default"}
    # Older files use the key rope.scale_linear; 0 means 1.
    older = fields.get("rope.scale_linear", float, 0.0)
    factor = fields.get("rope.scaling.factor", float, older) or 1.0
    if kind == "linear" and factor == 1.0:
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(fields, factor, truncate)
    raise fields.error(
        f"rotary scaling {format_value(kind)} ({fields.prefix}rope.scaling.type) is not supported"
    )


def _yarn(fields: Fields, factor: float, truncate: bool | None) -> dict[str, Any]:
    key = "rope.scaling.original_context_length"
    if "rope.scaling.factor" not in fields.values:
        raise fields.error(f"rotary scaling 'yarn' needs {fields.prefix}rope.scaling.factor")
    table: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.count(key, fields.count("context_length")),
    }
    for stated, ours in YARN.items():
        if f"rope.scaling.{stated}" in fields.values:
            table[ours] = fields.positive(f"rope.scaling.{stated}")
    if log := fields.get("rope.scaling.yarn_log_multiplier", float, 0.0):
        table |= {"mscale": 1.0, "mscale_all_dim": log}
    if beta := fields.get("attention.temperature_scale", float, 0.0):
        table["llama_4_scaling_beta"] = beta
    if truncate is not None:
        table["truncate"] = truncate
    return table


def _longrope(file: GgufFile, fields: Fields) -> dict[str, Any]:
    """Translate Phi 3's scaling: two tensors of divisors, and a factor for cos and sin."""
    key = "rope.scaling.original_context_length"
    for name in (SHORT, LONG):
        if name not in file.tensors:
            raise ExportError(f"{file.path} has no {name}")
    table: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": file.tensor(SHORT).ravel().tolist(),
        "long_factor": file.tensor(LONG).ravel().tolist(),
        "original_max_position_embeddings": fields.count(key, fields.count("context_length")),
    }
    table["attention_factor"] = fields.positive("rope.scaling.attn_factor", 1.0)
    return table


def rotary_fraction(fields: Fields, width: int, *, partial: bool) -> float | None:
    """Return the rotated fraction of a head; None in a class that rotates whole heads.

    Raises:
        ExportError: if more channels are rotated than the head has; or, unless `partial` is true,
            if fewer channels are rotated.
    """
    turning, key = fields.count("rope.dimension_count", width), "rope.dimension_count"
    if turning > width or turning % 2:
        raise fields.error(
            f"{fields.prefix}{key} is {turning}, but must be even and at most {width}"
        )
    if turning != width and not partial:
        raise fields.error(
            f"{fields.prefix}{key} is {turning}, but this class rotates all {width} channels "
            "of a head"
        )
    if not partial:
        return None
    part = turning / width  # increased below if part · width is less than `turning`
    return part if int(part * width) == turning else math.nextafter(part, 2.0)


def divide_frequencies(config: ModelConfig, file: GgufFile, *, only_full: bool) -> ModelConfig:
    """Divide frequencies by the file's tensor, in which the converter stores Llama 3's scaling.

    With `only_full`, this concerns the layers without a window; large divisors stand for pairs of
    channels that are not rotated (Gemma 4).

    Raises:
        ExportError: if the tensor does not fit the model.
    """
    if DIVISORS not in file.tensors:
        return config
    divisors = file.tensor(DIVISORS).ravel().astype(np.float64)

    def divide(layer: Layer) -> Layer:
        rope = layer.rope
        if rope is None or (only_full and layer.window is not None):
            return layer
        if (
            len(divisors) != len(rope.frequencies)
            or not ((divisors > 0) & (divisors < np.inf)).all()
        ):
            raise ExportError(
                f"{file.path}: {DIVISORS} has {len(divisors)} entries, not "
                f"{len(rope.frequencies)} above 0"
            )
        divided = np.where(divisors < UNROTATED, np.array(rope.frequencies) / divisors, 0.0)
        frequencies = tuple(divided.tolist())
        return msgspec.structs.replace(
            layer, rope=msgspec.structs.replace(rope, frequencies=frequencies)
        )

    if all(layer.rope is None for layer in config.pattern):
        raise ExportError(
            f"{file.path} has the tensor {DIVISORS}, but no layer has a rotary embedding"
        )
    return msgspec.structs.replace(config, pattern=tuple(map(divide, config.pattern)))
