"""Read the sizes of recurrent layers: convolutions, linear attention, state spaces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pilotfish.export.architectures.architecture import ACTIVATIONS
from pilotfish.export.model_config import Layer
from pilotfish.export.parts import Factors, Recurrence, StateSpace
from pilotfish.export.sources.class_keys import ClassKeys
from pilotfish.export.sources.fields import MAX_FLOAT, format_value

MOST_TAPS = 16
SPACES = {"space", "both"}
LIMITS = "time_step_limit"
# Fields of `Recurrence` → the keys (Llama's or Granite's names) that determine them, for errors.
LINEAR = {
    "taps": "linear_conv_kernel_dim",
    "heads": "linear_num_value_heads",
    "value_dim": "linear_value_head_dim",
    "key_heads": "linear_num_key_heads",
    "key_dim": "linear_key_head_dim",
}
SPACE = {
    "taps": "mamba_d_conv",
    "heads": "mamba_n_heads",
    "value_dim": "mamba_d_head",
    "key_heads": "mamba_n_groups",
    "key_dim": "mamba_d_state",
}
SELECTIVE = {
    "taps": "conv_kernel",
    "key_dim": "state_size",
    "heads": "intermediate_size, by default hidden_size · expand,",
    "space.rank": "time_step_rank",
}
# Maximum number of channels of a recurrent layer; its constants then take at most 4 MB.
MOST_CHANNELS = 2**20


def read_recurrence(keys: ClassKeys, pattern: tuple[Layer, ...]) -> Recurrence | None:
    """Read the sizes of recurrent layers; None if there are none.

    Raises:
        ExportError: if the sizes contradict each other or are not supported.
    """
    recurrence = _read_kind(keys, pattern)
    if recurrence is not None and recurrence.projected > MOST_CHANNELS:
        raise keys.fields.error(
            f"the recurrent layers have {recurrence.projected} channels, but at most "
            f"{MOST_CHANNELS} are supported"
        )
    return recurrence


def _read_kind(keys: ClassKeys, pattern: tuple[Layer, ...]) -> Recurrence | None:
    if keys.has("mamba_n_heads"):
        if any(layer.kind in SPACES for layer in pattern):
            return _state_space(keys)
        for key in keys.architecture.keys:
            if key.startswith(("mamba_", "time_step_", "ssm_")):
                keys.raw(key)
        return None
    if keys.has("time_step_rank"):
        return _selective(keys)
    if keys.has("conv_L_cache"):
        return Recurrence(_taps(keys, "conv_L_cache"))
    if not keys.has("linear_conv_kernel_dim"):
        return None
    return _sizes(keys, LINEAR)


def read_factors(keys: ClassKeys) -> Factors:
    """Read the factors of inputs and outputs of a layer's parts (Falcon-H1)."""
    if not keys.has("mlp_multipliers"):
        return Factors()
    gate, fed = _numbers(keys, "mlp_multipliers", 2)
    return Factors(
        attention_in=keys.number("attention_in_multiplier"),
        attention_out=keys.number("attention_out_multiplier"),
        space_in=keys.number("ssm_in_multiplier"),
        space_out=keys.number("ssm_out_multiplier"),
        gate=gate,
        mlp_out=fed,
    )


def recurrence_file_keys(keys: ClassKeys) -> Mapping[str, str]:
    """Map fields of `Recurrence` to the keys in the file that determine them."""
    if keys.has("conv_L_cache"):
        return {"taps": "conv_L_cache"}
    if not keys.has("mamba_n_heads"):
        return SELECTIVE if keys.has("time_step_rank") else LINEAR
    return {field: keys.class_key(key) for field, key in SPACE.items()}


def _state_space(keys: ClassKeys) -> Recurrence:
    width = _value_dim(keys, keys.count("mamba_n_heads"))
    recurrence = _sizes(keys, SPACE, value_dim=width, space=_space(keys))
    key = "mamba_hidden_act" if keys.has("mamba_hidden_act") else "hidden_act"
    name = keys.fields.get(key, str, keys.default(key))
    if ACTIVATIONS.get(name) != "silu":
        raise keys.fields.error(
            f"state spaces are supported only with {key} 'silu', not {format_value(name)}"
        )
    return recurrence


def _selective(keys: ClassKeys) -> Recurrence:
    hidden = keys.count("hidden_size")
    if keys.raw("time_step_rank") == "auto":
        rank = -(-hidden // 16)
    else:
        rank = keys.fields.count("time_step_rank")
    # intermediate_size overrides expand, which is wrong in published files of Falcon Mamba
    width = keys.fields.count("intermediate_size", hidden * keys.count("expand"))
    key = "mixer_rms_eps"
    epsilon = keys.number(key, otherwise=1e-6) if keys.has(key) else None
    return Recurrence(
        taps=_taps(keys, "conv_kernel"),
        heads=width,
        key_heads=1,
        key_dim=keys.count("state_size"),
        value_dim=1,
        space=StateSpace(norm=None, rank=rank, epsilon=epsilon),
    )


def _value_dim(keys: ClassKeys, heads: int) -> int:
    """Return the width of a value head, which some classes state twice."""
    inner = None
    if keys.has("mamba_expand"):
        inner = keys.count("mamba_expand") * keys.count("hidden_size")
    if keys.has("mamba_d_ssm"):
        inner = keys.count("mamba_d_ssm", null=inner)
    key = keys.class_key("mamba_d_head")
    if inner is not None and keys.raw("mamba_d_head") == "auto":
        width = inner // heads
    else:
        width = keys.fields.count(key, keys.default("mamba_d_head"))
    if inner is not None and heads * width != inner:
        raise keys.fields.error(
            f"{keys.class_key('mamba_n_heads')} {heads} × {key} {width} differs from the width "
            f"{inner} of the state spaces"
        )
    return width


def _space(keys: ClassKeys) -> StateSpace:
    shortest, longest = 0.0, math.inf
    if keys.has(LIMITS):
        shortest, longest = _limits(keys)
    elif keys.has("time_step_min"):
        shortest = keys.fields.get("time_step_min", float, keys.default("time_step_min"))
    if not (shortest <= longest and longest > 0 and shortest < math.inf):
        raise keys.fields.error(
            f"{LIMITS} states impossible bounds of a step, {shortest} to {longest}"
        )
    scales = _numbers(keys, "ssm_multipliers", 5) if keys.has("ssm_multipliers") else (1.0,) * 5
    norm: Literal["behind", "before"] | None = "behind"
    if keys.has("mamba_rms_norm"):
        norm = "before" if keys.flag("mamba_norm_before_gate") else "behind"
        norm = norm if keys.flag("mamba_rms_norm") else None
    return StateSpace(shortest=shortest, longest=longest, norm=norm, scales=scales)


def _limits(keys: ClassKeys) -> tuple[float, float]:
    """Read the bounds of a step; infinity is Infinity or {"__float__": "Infinity"} in files."""
    keys.fields.mark_read(LIMITS)
    stated = keys.fields.values.get(LIMITS, [0.0, math.inf])
    infinite = {"__float__": "Infinity"}
    numbers = [
        math.inf if each == infinite else each
        for each in (stated if isinstance(stated, list) else [])
    ]
    if len(numbers) != 2 or not all(_is_number(each) for each in numbers):
        raise keys.fields.error(f"{LIMITS} is {format_value(stated)}, but must be two numbers")
    return float(numbers[0]), float(numbers[1])


def _numbers(keys: ClassKeys, key: str, count: int) -> tuple[float, ...]:
    """Read a list of `count` numbers; null means that all are 1."""
    stated = keys.fields.items(key)
    if stated is None:
        return (1.0,) * count
    if len(stated) != count or not all(_is_number(each) for each in stated):
        raise keys.fields.error(f"{key} is {format_value(stated)}, but must be {count} numbers")
    return tuple(float(each) for each in stated)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and (abs(value) == math.inf or abs(value) <= MAX_FLOAT)


def _sizes(keys: ClassKeys, names: Mapping[str, str], **others: Any) -> Recurrence:
    """Read the sizes that are not among `others`; `names`: field → Llama's or Granite's key."""
    taps = _taps(keys, names["taps"])
    counts = {field: keys.count(key) for field, key in names.items() if field not in others}
    recurrence = Recurrence(**{**counts, "taps": taps, **others})
    if recurrence.heads % recurrence.key_heads:
        raise keys.fields.error(
            f"{keys.class_key(names['heads'])} {recurrence.heads} is not a multiple of "
            f"{keys.class_key(names['key_heads'])} {recurrence.key_heads}"
        )
    return recurrence


def _taps(keys: ClassKeys, key: str) -> int:
    """Read the width of a convolution in tokens."""
    taps = keys.count(key)
    if not 2 <= taps <= MOST_TAPS:
        raise keys.fields.error(
            f"{keys.class_key(key)} is {taps}, but only 2 to {MOST_TAPS} are supported"
        )
    return taps
