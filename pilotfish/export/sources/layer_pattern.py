"""Read the properties of each layer: window, recurrent state, rotation, rotary embedding."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from pilotfish.engines.manifest import MOST_LAYERS
from pilotfish.export.model_config import CACHED, Layer
from pilotfish.export.parts import Rope
from pilotfish.export.sources.class_keys import ClassKeys
from pilotfish.export.sources.expert_keys import layers_of_experts
from pilotfish.export.sources.fields import Fields, format_value
from pilotfish.export.sources.layer_sizes import FULL, widths_of_heads, with_sizes
from pilotfish.export.sources.rotary import RopeBase, read_table

SLIDING, MOE = "sliding_attention", "moe"
ALSO_FULL = {FULL, "attention"}
# Letters in Nemotron-H's layer pattern → types of layers.
BLOCKS = {"M": "linear_attention", "*": FULL, "-": "mlp", "E": MOE}
# The key that determines the layers with windows if layer_types is absent.
PATTERN = "sliding_window_pattern"


def read_pattern(keys: ClassKeys, layers: int, head_dim: int) -> tuple[Layer, ...]:
    """Return the properties of each layer; a single entry if all layers are equal.

    Raises:
        ExportError: if a type of layer is not supported, or a list has the wrong length.
    """
    layers, architecture = min(layers, MOST_LAYERS), keys.architecture
    states, window = architecture.states, _window(keys)
    types = _types_with_states(keys, layers) if states else _layer_types(keys, layers, window)
    rotated = _rotated_layers(keys, layers, types, window)
    ropes, dims = {}, widths_of_heads(keys, types, head_dim)
    if any(rotated):
        every = dict.fromkeys([*types, FULL] if architecture.rope_by_type else types)
        ropes = {each: _rope(keys, each, dims.get(each, head_dim)) for each in every}
    for key in ("rope_parameters", "rope_scaling", "rope_theta") if states and not ropes else ():
        keys.fields.mark_read(key)
    mixed = layers_of_experts(keys, layers)
    if MOE in states:
        mixed = [each == MOE for each in types]
    pattern = []
    for each, turns, experts in zip(types, rotated, mixed, strict=True):
        kind = states.get(each, "attention")
        layer = Layer(
            ropes[each] if turns and kind in CACHED else None,
            window if each == SLIDING else None,
            experts,
            kind=kind,
            has_mlp=kind == "none" or not architecture.one_part,
        )
        pattern.append(layer)
    pattern = with_sizes(keys, types, pattern)
    return tuple(pattern[:1] if len(set(pattern)) == 1 and not states else pattern)


def count_layers(keys: ClassKeys) -> int:
    """Return the number of layers; for Nemotron-H the number of listed types."""
    if not keys.has("layers_block_type"):
        return keys.count("num_hidden_layers")
    types = _stated_types(keys)
    if not types:
        raise keys.fields.error("the key layers_block_type, which lists the layers, is missing")
    return len(types)


def _stated_types(keys: ClassKeys) -> list[Any] | None:
    """Return the types of layers that the file lists; None without a list."""
    fields = keys.fields
    if keys.has("layer_types"):
        return fields.items("layer_types")
    if not keys.has("layers_block_type"):
        return None
    listed = fields.items("layers_block_type")
    letters = fields.get("hybrid_override_pattern", str, "", null="")
    spelt = [BLOCKS.get(letter, letter) for letter in letters]
    if listed is not None and spelt and spelt != listed:
        raise fields.error("layers_block_type and hybrid_override_pattern differ: remove one")
    return spelt if listed is None else listed


def _types_with_states(keys: ClassKeys, layers: int) -> list[str]:
    """Return the type of each layer, for a class with recurrent layers."""
    states = keys.architecture.states
    types, default = _stated_types(keys), _full_by_default(keys, layers)
    if types is None:
        return [FULL if full else next(iter(states)) for full in default]
    _check_types(keys, types, layers, {*ALSO_FULL, *states})
    return types


def _full_by_default(keys: ClassKeys, layers: int) -> list[bool]:
    """Return for each layer whether it has attention, for a file without layer_types."""
    if keys.has("full_attention_interval"):
        every = keys.count("full_attention_interval")
        return [not (i + 1) % every for i in range(layers)]
    for key, unlisted in (("full_attn_idxs", True), ("attn_layer_indices", False)):
        if keys.has(key):
            listed = keys.fields.items(key)
            return [unlisted if listed is None else i in listed for i in range(layers)]
    return [False] * layers


# --- windows -------------------------------------------------------------------------------------


def _window(keys: ClassKeys) -> int | None:
    """Return the sliding window, positions; None if no layer uses it."""
    rule = keys.architecture.windows
    if rule == "none" or keys.raw("sliding_window") is None:
        return None
    if keys.has("use_sliding_window") and not keys.flag("use_sliding_window"):
        return None
    return keys.count("sliding_window")


def _layer_types(keys: ClassKeys, layers: int, window: int | None) -> list[str]:
    """Return FULL or SLIDING for each layer."""
    fields, rule = keys.fields, keys.architecture.windows
    stated = fields.items("layer_types")
    if stated is None:
        return _default_types(keys, layers, window)
    _check_types(keys, stated, layers, {*ALSO_FULL, SLIDING})
    kinds = [SLIDING if kind == SLIDING else FULL for kind in stated]
    if keys.architecture.full_last and kinds[-1] != FULL:
        raise fields.error(
            f"layer_types must end with {FULL}, the type of the last layer of this class"
        )
    if rule in {"listed", "switched"}:
        if SLIDING in kinds and window is None:
            raise fields.error(
                "layer_types names layers with windows, but no sliding_window is in effect"
            )
        for key in (PATTERN, "max_window_layers"):  # layer_types overrides them
            if keys.has(key):
                fields.mark_read(key)
        return kinds
    if kinds != _default_types(keys, layers, window):
        raise fields.error(
            "layer_types differs from the layer types of this class, which "
            "ignores the key: remove it"
        )
    return kinds


def _check_types(
    keys: ClassKeys, types: Sequence[Any], layers: int, supported: Collection[str]
) -> None:
    """Refuse a list of types of layers that has another length, or other types."""
    _check_length(keys, "layer_types", types, layers)
    for each in types:
        if not isinstance(each, str) or each not in supported:
            raise keys.fields.error(
                f"layers of type {format_value(each)} are not supported (layer_types)"
            )


def _check_length(keys: ClassKeys, key: str, listed: Sequence[Any], layers: int) -> None:
    if len(listed) != layers:
        raise keys.fields.error(
            f"{key} names {len(listed)} layers, but num_hidden_layers is {layers}"
        )


def _default_types(keys: ClassKeys, layers: int, window: int | None) -> list[str]:
    """Return the types of layers by the class's rule, for a file that lists none."""
    architecture = keys.architecture
    every = architecture.full_every
    if keys.has(PATTERN):
        keys.fields.mark_read(PATTERN)
        if window is not None:
            every = keys.fields.count(PATTERN, every, null=every)
    if architecture.windows == "switched":
        if architecture.unrotated == "listed":  # SmolLM3: layers without rotation have the window
            windowed = [not turns for turns in _listed_rotation(keys, layers)]
        elif every is not None:  # Qwen2-MoE: every other layer, among the first ones
            last = keys.count("max_window_layers")
            windowed = [bool((i + 1) % every) and i < last for i in range(layers)]
        else:
            windowed = [i >= keys.count("max_window_layers") for i in range(layers)]
    else:
        last = 0 if architecture.full_first else 1
        windowed = [every is None or bool((i + last) % every) for i in range(layers)]
        windowed[-1] = windowed[-1] and not architecture.full_last
    return [SLIDING if each and window is not None else FULL for each in windowed]


# --- rotation ------------------------------------------------------------------------------------


def _rotated_layers(
    keys: ClassKeys, layers: int, kinds: list[str], window: int | None
) -> list[bool]:
    """Return for each layer whether it has a rotary embedding."""
    rule = keys.architecture.unrotated
    if rule == "listed":
        return _listed_rotation(keys, layers)
    if rule == "full" and window is not None:
        return [kind == SLIDING for kind in kinds]
    return [rule != "all"] * layers


def _listed_rotation(keys: ClassKeys, layers: int) -> list[bool]:
    fields = keys.fields
    if keys.has("position_embedding_type"):  # Granite 4
        kind = fields.get("position_embedding_type", str, "nope", null="nope")
        if kind not in {"rope", "nope"}:
            raise fields.error(f"position_embedding_type {format_value(kind)} is not supported")
        return [kind == "rope"] * layers
    every = keys.count("no_rope_layer_interval")
    stated = fields.items("no_rope_layers")
    if stated is None:
        return [bool((i + 1) % every) for i in range(layers)]
    _check_length(keys, "no_rope_layers", stated, layers)
    return [bool(each) for each in stated]


def _rope(keys: ClassKeys, kind: str, head_dim: int) -> Rope:
    """Read the rotary embedding of a type of layers, from rope_parameters or rope_scaling.

    A model with different tables in the two keys is refused, because programs differ in which key
    they use.
    """
    fields = keys.fields
    new, old = fields.table("rope_parameters"), fields.table("rope_scaling")
    if keys.architecture.rope_by_type:
        return _rope_by_type(keys, kind, head_dim, new, old)
    ropes = [_read(keys, table, head_dim) for table in (new, old) if table.values]
    if not ropes:
        default = keys.architecture.rope_default
        if default is not None and fields.values.get("rope_parameters") is not None:
            raise fields.error("rope_parameters is empty")
        table = new if default is None else Fields(default, new.where, new.prefix)
        return _read(keys, table, head_dim)
    if ropes[0] != ropes[-1]:
        raise fields.error(
            "rope_parameters and rope_scaling are both present and contradict each other: remove "
            "the wrong one"
        )
    return ropes[0]


def _rope_by_type(keys: ClassKeys, kind: str, head_dim: int, new: Fields, old: Fields) -> Rope:
    """Read Gemma 3's and OLMo 3's form: a table per type, or the older scaling of full layers."""
    local = kind == SLIDING and keys.has("rope_local_base_freq")
    theta_key = "rope_local_base_freq" if local else "rope_theta"
    default = keys.architecture.rope_default
    if not new.values and default is not None:
        if keys.fields.values.get("rope_parameters") is not None or old.values:
            raise keys.fields.error(f"rope_parameters must have tables for {FULL} and {SLIDING}")
        return _read(keys, Fields(default[kind], new.where, new.prefix), head_dim)
    if not new.values:
        _check_old_form(keys, old)
        scaling = old if kind == FULL else Fields({}, old.where, old.prefix)
        return _read(keys, scaling, head_dim, theta_key)
    if old.values:
        raise keys.fields.error("rope_parameters and rope_scaling are both present: remove one")
    if set(new.values) - {FULL, SLIDING}:
        raise keys.fields.error(f"rope_parameters must have a table for {FULL} and for {SLIDING}")
    if default is not None and not new.table(kind).values:
        raise keys.fields.error(f"rope_parameters has no table for {kind}")
    return _read(keys, new.table(kind), head_dim, theta_key)


def _check_old_form(keys: ClassKeys, old: Fields) -> None:
    """Refuse settings of the older form that transformers 4 and 5 read differently."""
    if "type" in old.values and "rope_type" not in old.values:
        raise old.error(
            f"the key {old.prefix}type is not read in this class: rename it to rope_type"
        )
    theta, usual = keys.number("rope_theta", otherwise=10000.0), keys.default("rope_theta")
    if not keys.has("rope_local_base_freq") and theta != usual:
        raise keys.fields.error(
            f"rope_theta is {theta}, but programs differ in its effect on layers with windows: "
            f"give rope_parameters with a table for {FULL} and one for {SLIDING}"
        )


def _read(keys: ClassKeys, table: Fields, head_dim: int, theta_key: str = "rope_theta") -> Rope:
    """Read one table of rotary parameters."""
    if any(isinstance(value, dict) for value in table.values.values()):
        raise keys.fields.error("rotary parameters that differ between layers are not supported")
    theta = keys.number(theta_key, otherwise=10000.0)
    proportional = table.values.get("rope_type") == "proportional"
    width = head_dim if proportional else _rotated_channels(keys, table, head_dim)
    _check_table(keys, table)
    context = keys.count("max_position_embeddings")
    rope = read_table(table, RopeBase(theta, width, context, _original_context(keys, table)))
    if keys.architecture.interleaved:
        rope = msgspec.structs.replace(rope, interleaved=True)
    return rope


def _original_context(keys: ClassKeys, table: Fields) -> int | None:
    """Return the context before scaling that the file states outside the table.

    All classes read the key for these kinds of scaling, unless their tables are per type of layer.
    """
    key = "original_max_position_embeddings"
    if keys.has(key):
        return keys.count(key)
    kind = table.values.get("rope_type", table.values.get("type"))
    stated = key in keys.fields.values and kind in ("llama3", "yarn", "longrope")
    return keys.fields.count(key) if stated and not keys.architecture.rope_by_type else None


def _rotated_channels(keys: ClassKeys, table: Fields, head_dim: int) -> int:
    """Return the number of rotated channels per head."""
    key, default = "partial_rotary_factor", 1.0
    if keys.has(key):
        default = keys.default(key)
    if keys.has("rotary_dim") and keys.raw("rotary_dim") is not None and not keys.states(key):
        default = keys.count("rotary_dim") / head_dim  # MiniMax M2
    stated = default
    if keys.class_key(key) not in keys.architecture.known.without:  # Bamba's is in the table
        stated = keys.fields.get(keys.class_key(key), float, default, null=default)
    part = table.get(key, float, stated, null=None if keys.has(key) else stated)
    if part != 1.0 and not keys.has(key):
        raise keys.fields.error("this class does not support a partial_rotary_factor below 1")
    width = int(head_dim * part) if 0 < part <= 1 else 0
    if not 0 < width <= head_dim or width % 2:
        raise keys.fields.error(
            f"{keys.class_key(key)} {part} would rotate {width} of {head_dim} channels"
        )
    return width


def _check_table(keys: ClassKeys, table: Fields) -> None:
    """Refuse a rotary table that the class does not support."""
    architecture = keys.architecture
    kind = table.values.get("rope_type", table.values.get("type", "default"))
    known = architecture.rotations is not None or kind != "proportional"
    if table.values and not (known and kind in (architecture.rotations or (kind,))):
        raise table.error(f"this class does not support rotary scaling {format_value(kind)}")
    unread = {"alpha": kind == "dynamic" and not architecture.reads_alpha}
    unread["truncate"] = architecture.rope_by_type
    for key, ignored in unread.items():
        if ignored and table.values.get(key) not in (None, True):
            raise table.error(
                f"transformers does not read {table.prefix}{key} in this class, and other programs "
                "may: remove the key"
            )
    for key in architecture.rope_states if table.values else ():
        if table.values.get(key) is None:
            raise table.error(f"{table.prefix}{key} is missing")
