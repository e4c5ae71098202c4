"""Read the sizes that differ between layers, and the layers that share keys and values.

Gemma 4 states the heads of full layers in separate keys (`global_head_dim`), or per layer, as
transformers saves them (`per_layer_config`). Gemma 3n lists the widths of feed-forward parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pilotfish.export.model_config import Layer
from pilotfish.export.sources.class_keys import ClassKeys
from pilotfish.export.sources.fields import MAX_COUNT, format_value

FULL = "full_attention"
OVERRIDES = "per_layer_config"


def widths_of_heads(keys: ClassKeys, kinds: Sequence[str], head_dim: int) -> dict[str, int]:
    """Return the head width of each type of layers.

    Raises:
        ExportError: if layers of the same type differ.
    """
    widths = {}
    for kind, (width, _) in _global_heads(keys, kinds).items():
        widths[kind] = width or head_dim
        if widths[kind] % 2:
            raise keys.fields.error(
                f"heads of width {widths[kind]} cannot be rotated: it must be even"
            )
    return {kind: widths.get(kind, head_dim) for kind in kinds}


def with_sizes(keys: ClassKeys, kinds: Sequence[str], pattern: list[Layer]) -> list[Layer]:
    """Return the layers with their sizes and the sources of their keys and values.

    Raises:
        ExportError: if a number of key heads does not divide the query heads, a list has the wrong
            length, or a layer should read keys and values that no layer has.
    """
    heads = _global_heads(keys, kinds)
    reads = _kv_sources(keys, kinds)
    widths, sparsities = _inner_widths(keys, reads), _sparsities(keys, len(kinds))
    tied = keys.flag("attention_k_eq_v")
    layers = []
    for i, (kind, layer) in enumerate(zip(kinds, pattern, strict=True)):
        head_dim, kv_heads = heads.get(kind, (None, None))
        sized = msgspec.structs.replace(
            layer,
            head_dim=head_dim,
            kv_heads=kv_heads,
            intermediate=widths[i],
            kv_source=reads[i],
            tied_values=tied and kind == FULL and reads[i] is None,
            sparsity=sparsities[i],
        )
        layers.append(sized)
    return layers


HeadSizes = tuple[int | None, int | None]
"""Width of heads and number of key heads; None = the model's."""


def _global_heads(keys: ClassKeys, kinds: Sequence[str]) -> dict[str, HeadSizes]:
    """Return the head sizes of types of layers that differ from the model's."""
    if not keys.architecture.global_heads:
        return {}
    width: int | None = keys.count("global_head_dim")
    count = None
    keys.fields.mark_read("num_global_key_value_heads")
    if keys.flag("attention_k_eq_v") and keys.raw("num_global_key_value_heads") is not None:
        count = keys.count("num_global_key_value_heads")
    sizes = {FULL: (width, count)} if FULL in kinds else {}
    if OVERRIDES in keys.fields.values:  # this key overrides the other keys, even if it is null
        sizes = _overrides(keys, kinds)
    plain, heads = keys.count("head_dim"), keys.count("num_attention_heads")
    usual = keys.count("num_key_value_heads")
    for _, kv_heads in sizes.values():
        if kv_heads is not None and heads % kv_heads:
            raise keys.fields.error(
                f"num_attention_heads {heads} is not a multiple of the number of key heads, "
                f"{kv_heads}"
            )
    return {
        kind: (None if width == plain else width, None if kv_heads == usual else kv_heads)
        for kind, (width, kv_heads) in sizes.items()
    }


def _overrides(keys: ClassKeys, kinds: Sequence[str]) -> dict[str, HeadSizes]:
    """Read `per_layer_config`; layers of one type must agree."""
    table = keys.fields.table(OVERRIDES)
    plain = keys.count("head_dim"), keys.count("num_key_value_heads")
    each: list[tuple[int, int]] = [plain] * len(kinds)
    for name in table.values:
        if not name.isdecimal() or int(name) >= len(kinds):
            raise keys.fields.error(
                f"{OVERRIDES} names layer {format_value(name)}, but the model has "
                f"{len(kinds)} layers"
            )
        layer = table.table(name)
        sizes = layer.count("head_dim", plain[0]), layer.count("num_key_value_heads", plain[1])
        each[int(name)] = sizes
    by_kind: dict[str, HeadSizes] = {}
    for kind, sizes in zip(kinds, each, strict=True):
        if by_kind.setdefault(kind, sizes) != sizes:
            raise keys.fields.error(f"{OVERRIDES} differs between layers of type {kind}")
    return by_kind


def _kv_sources(keys: ClassKeys, kinds: Sequence[str]) -> list[int | None]:
    """Return for each layer the index of the layer whose keys and values it reads; None = its own.

    Each of the last `num_kv_shared_layers` layers reads the keys and values of the last earlier
    layer of the same type.
    """
    name = "num_kv_shared_layers"
    shared = keys.whole(name)
    caching = kinds[: max(len(kinds) - shared, 0)]
    if shared < 0 or set(kinds) - set(caching):
        raise keys.fields.error(
            f"{name} is {shared}, but the other ones of the {len(kinds)} layers do not include "
            "every type of layer"
        )
    last = {kind: i for i, kind in enumerate(caching)}
    return [*[None] * len(caching), *(last[kind] for kind in kinds[len(caching) :])]


def _inner_widths(keys: ClassKeys, reads: Sequence[int | None]) -> list[int | None]:
    """Return the width of each layer's feed-forward part; None = the model's."""
    listed = keys.fields.values.get(keys.class_key("intermediate_size"))
    if "activation_sparsity_pattern" in keys.architecture.keys and isinstance(listed, list):
        counts = (type(each) is int and 0 < each <= MAX_COUNT for each in listed)
        if len(listed) != len(reads) or not all(counts):
            raise keys.fields.error(
                f"intermediate_size must be a number, or a list of {len(reads)} numbers, one "
                "per layer"
            )
        return [None if each == listed[0] else each for each in listed]
    if keys.flag("use_double_wide_mlp"):
        width = keys.count("intermediate_size")
        return [None if each is None else 2 * width for each in reads]
    return [None] * len(reads)


def _sparsities(keys: ClassKeys, layers: int) -> list[float]:
    """Return the fraction of gate channels that each layer sets to 0 (Gemma 3n)."""
    name = "activation_sparsity_pattern"
    if not keys.has(name):
        return [0.0] * layers
    stated = keys.fields.items(name)
    if stated is None:
        sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
        return [SPARSITY] * sparse + [0.0] * (layers - sparse)
    if len(stated) != layers or not all(
        type(each) in (int, float) and 0 <= each < 1 for each in stated
    ):
        raise keys.fields.error(f"{name} must be a list of {layers} numbers from 0 to below 1")
    return [float(each) for each in stated]


SPARSE_LAYERS, SPARSITY = 10, 0.95  # Gemma 3n's defaults
