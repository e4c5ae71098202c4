"""The axes of a run: the options that `field measure` can vary, each with its owner's declaration.

An axis is a setting of `Request` or of the emulated link (`Conditions`) that is marked by ``axis``,
or any option of a protocol. So a new option becomes an axis by its declaration alone. The windows
and the protocols are axes, too, with settings of their own (`field.matrix_settings`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import msgspec

from pilotfish.base.settings import Setting, settings
from pilotfish.emulation.emulator import Conditions
from pilotfish.wire.protocols import LOCAL, PROTOCOL_REGISTRY, names, option_types
from pilotfish.wire.request import AUTO, Request

Point: TypeAlias = tuple[tuple[str, Any], ...]
"""A value of each axis: pairs of the option's name and its value."""
_Value: TypeAlias = bool | int | float | str | list[int | float] | None


class Axis(NamedTuple):
    """An option with values to compare. kind: "protocol", or the setting's ``axis``."""

    setting: Setting
    kind: str

    def applies(self, protocol: str) -> bool:
        """Return whether the option has an effect under this protocol."""
        registered = PROTOCOL_REGISTRY.get(protocol)
        if self.kind == "link":
            return protocol != LOCAL
        if self.kind == "tree":
            return registered is not None and registered.allows_trees
        if self.kind == "drafter":
            sampled = registered is not None and not registered.greedy_only
            return protocol == AUTO or sampled
        if self.kind == "protocol":
            own_options = () if registered is None else registered.Options.__struct_fields__
            return protocol == AUTO or self.setting.name in own_options
        return True

    def format(self, value: Any) -> str:
        """Format the option with a value, as on the command line, without dashes."""
        form = self.setting.extra.get("form")
        number = isinstance(value, int | float)
        if form == "duration" and number:
            text = f"{value * 1e3:g}ms"
        elif form == "rate" and number:
            text = f"{value / 1e6:g}mbit"
        elif isinstance(value, list | tuple):
            text = ",".join(map(str, value))
        else:
            text = str(value)
        return f"{self.setting.flag} {text}"


def all_axes() -> dict[str, Axis]:
    """Return every axis, by the option's name."""
    protocols = [Axis(setting, "protocol") for kind in option_types() for setting in settings(kind)]
    every = (*_marked(Request), *protocols, *_marked(Conditions))
    return {axis.setting.name: axis for axis in every if axis.setting.meta.description}


def _marked(owner: type[msgspec.Struct]) -> list[Axis]:
    return [
        Axis(setting, setting.extra["axis"])
        for setting in settings(owner)
        if "axis" in setting.extra
    ]


def points(varied: Mapping[str, Sequence[Any]], protocol: str) -> Iterator[Point]:
    """Yield the product of the varied options that apply to the protocol; at least one point."""
    known = all_axes()
    applied = [name for name in varied if known[name].applies(protocol)]
    for values in product(*(varied[name] for name in applied)):
        yield tuple(zip(applied, map(hashable, values), strict=True))


def applied_to(protocol: str, point: Point) -> Point:
    """Return the part of a point that applies to another protocol."""
    known = all_axes()
    return tuple(pair for pair in point if pair[0] in known and known[pair[0]].applies(protocol))


def of_link(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return those of these options that belong to the emulated link."""
    known = all_axes()
    return {name: value for name, value in values if name in known and known[name].kind == "link"}


def format_point(values: Iterable[tuple[str, Any]]) -> str:
    """Format options with their values, separated by spaces."""
    known = all_axes()
    return " ".join(
        known[name].format(value) if name in known else f"{name} {value}" for name, value in values
    )


def protocols_of_axis(axis: Axis) -> list[str]:
    """List the protocols under which an axis has an effect."""
    return [protocol for protocol in names() if axis.applies(protocol)]


def read_point(stored: str) -> Point:
    """Return the point that a run file stores as a JSON object; raises `msgspec.DecodeError`."""
    return tuple(
        (name, hashable(value))
        for name, value in msgspec.json.decode(stored, type=dict[str, _Value]).items()
    )


def hashable(value: Any) -> Any:
    """Return the value with tuples in place of lists."""
    return tuple(map(hashable, value)) if isinstance(value, list | tuple) else value
