"""Read a rotary embedding from a configuration, in its newer or older form.

`rope_parameters` (transformers 5) is a table, or a table per type of layer; older files have
`rope_theta` and `rope_scaling`. The rules are those of transformers' modeling_rope_utils; the tests
compare with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.parts import Rope
from pilotfish.export.sources.fields import Fields, format_value

Frequencies = NDArray[np.float64]
MOST_CHANNELS = 2**14  # rotated channels of a head, since frequencies precede the weights' check
INERT = ("type", "rope_type", "mrope_section", "mrope_interleaved", "max_position_embeddings")


class RopeBase(NamedTuple):
    """The input of a scaling rule: θ, number of rotated channels, and the model's contexts."""

    theta: float
    dim: int
    context: int
    original: int | None  # value of the configuration's top-level key

    @property
    def frequencies(self) -> Frequencies:
        """The angle per position of each pair of channels, rad."""
        powers: Frequencies = self.theta ** -(np.arange(0, self.dim, 2) / self.dim)
        return powers

    def original_context(self, table: Fields) -> int:
        """Return the context before scaling; a top-level key overrides the table's."""
        key = "original_max_position_embeddings"
        stated = table.count(key, self.original or self.context)
        return self.original or stated


def _default(table: Fields, base: RopeBase) -> Rope:
    if (factor := table.get("factor", float, 1.0, null=1.0)) != 1.0:
        raise table.error(
            f"{table.prefix}factor is {factor}, but the table names no kind of scaling: remove the "
            "factor, or state the rope_type"
        )
    return Rope(_tuple(base.frequencies))


def _linear(table: Fields, base: RopeBase) -> Rope:
    return Rope(_tuple(base.frequencies / table.positive("factor")))


def _dynamic(table: Fields, base: RopeBase) -> Rope:
    """Read dynamic NTK, which has no effect within the context, except for Hunyuan's α."""
    table.get("factor", float)
    if table.values.get("alpha"):
        alpha = table.positive("alpha")
        table.get("beta_fast", float, 32.0), table.get("beta_slow", float, 1.0)
        for key in ("mscale", "mscale_all_dim"):
            table.get(key, float, 1.0)
        theta = base.theta * alpha ** (base.dim / (base.dim - 2))
        base = base._replace(theta=theta)
    return Rope(_tuple(base.frequencies))


def _llama3(table: Fields, base: RopeBase) -> Rope:
    """Read Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones are not."""
    low, high = table.positive("low_freq_factor"), table.positive("high_freq_factor")
    factor, original = table.positive("factor"), base.original_context(table)
    if low >= high:
        prefix = table.prefix
        raise table.error(f"{prefix}low_freq_factor must be below {prefix}high_freq_factor")
    turns = original * base.frequencies / (2 * math.pi)  # rotations within the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return Rope(_tuple(base.frequencies * (smooth + (1 - smooth) / factor)))


def _yarn(table: Fields, base: RopeBase) -> Rope:
    """Read YaRN (arXiv 2309.00071): it interpolates slowly rotating pairs, scales cos and sin."""
    original = base.original_context(table)
    if "factor" not in table.values:
        raise table.error(f"{table.prefix}factor is missing")
    factor = table.get("factor", float, null=base.context / original)
    stated = _stated_scale(table)
    mscale = [table.get(key, float, 0.0, null=0.0) for key in ("mscale", "mscale_all_dim")]
    fast = table.get("beta_fast", float, 32.0, null=32.0) or 32.0
    slow = table.get("beta_slow", float, 1.0, null=1.0) or 1.0
    truncate = table.get("truncate", bool, True)

    def magnitude(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def pair(turns: float) -> float:
        """Return the (fractional) pair that rotates `turns` times in the original context."""
        ratio = math.log(original / (turns * 2 * math.pi)) / math.log(base.theta)
        return base.dim * ratio / 2

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, base.dim - 1)
    width = high - low or 0.001
    unscaled = 1 - np.clip((np.arange(base.dim // 2) - low) / width, 0, 1)
    scale = magnitude(mscale[0]) / magnitude(mscale[1]) if all(mscale) else magnitude()
    frequencies = base.frequencies / factor * (1 - unscaled) + base.frequencies * unscaled
    return Rope(_tuple(frequencies), scale if stated is None else stated)


def _stated_scale(table: Fields) -> float | None:
    """Return the factor of cos and sin that the table states; None if it has none."""
    key = "attention_factor"
    table.mark_read(key)
    return None if table.values.get(key) is None else table.positive(key)


def _longrope(table: Fields, base: RopeBase) -> Rope:
    """Read LongRoPE (arXiv 2402.13753): divisors for the original and for longer contexts."""
    original = base.original_context(table)
    ratio = base.context / original
    factor = table.get("factor", float, ratio, null=ratio)
    stated = _stated_scale(table)
    sets = []
    for key in ("short_factor", "long_factor"):
        divisors = table.items(key)
        pairs = base.dim // 2
        numbers = divisors is not None and {type(each) for each in divisors} <= {int, float}
        if divisors is None or not numbers or len(divisors) != pairs:
            raise table.error(f"{table.prefix}{key} must be a list of {pairs} numbers")
        sets.append(_tuple(base.frequencies / np.array(divisors, np.float64)))
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Rope(sets[0], scale if stated is None else stated, long=sets[1], short_context=original)


def _proportional(table: Fields, base: RopeBase) -> Rope:
    """Read Gemma 4's rule: the first pairs rotate as in a fully rotated head; others are fixed."""
    turning = int(_part(table) * base.dim // 2)
    frequencies = base.frequencies / table.positive("factor", 1.0)
    frequencies[turning:] = 0
    return Rope(_tuple(frequencies))


def _part(table: Fields) -> float:
    part = table.get("partial_rotary_factor", float, 1.0)
    if not 0 <= part <= 1:
        raise table.error(
            f"{table.prefix}partial_rotary_factor is {part}, but must be between 0 and 1"
        )
    return part


SCALINGS: dict[str, Callable[[Fields, RopeBase], Rope]] = {
    "default": _default,
    "mrope": _default,  # for text, this kind equals the default kind
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # name in older files of Phi-3
    "proportional": _proportional,
}


def read_table(table: Fields, base: RopeBase) -> Rope:
    """Read a table of rotary parameters; `base` has the θ for a table without rope_theta.

    Raises:
        ExportError: if the table's kind is unknown, or a number is missing or invalid.
    """
    # older files use the key `type`
    kind = table.get("rope_type", str, table.get("type", str, "default"))
    if kind not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise table.error(
            f"rotary scaling {format_value(kind)} is not supported; supported are {known}"
        )
    for key in INERT:
        table.mark_read(key)
    if base.dim > MOST_CHANNELS:
        raise table.error(
            f"heads with {base.dim} rotated channels are not supported, only up to {MOST_CHANNELS}"
        )
    base = base._replace(theta=table.positive("rope_theta", base.theta))
    try:
        with np.errstate(all="ignore"):
            rope = SCALINGS[kind](table, base)
    except (ArithmeticError, ValueError):  # an undefined logarithm, or a division by log 1
        rope = None
    if rope is None or not np.isfinite([*rope.frequencies, *(rope.long or ()), rope.scale]).all():
        name = table.prefix.rstrip(".") or "its rotary parameters"
        raise table.error(f"{name} gives angles that are not finite: {format_value(table.values)}")
    return rope


def _tuple(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(values.tolist())
