"""Flags of the options that `field measure` varies: one for each axis, with a list of values."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, get_origin

from pilotfish.base.errors import ConfigError
from pilotfish.base.settings import Setting
from pilotfish.cli.flags import help_text, value_keywords
from pilotfish.lab.field.axes import all_axes

_TITLES = {
    "target": "options of the request, each with one value or several (A,B,…)",
    "protocol": "options of the protocols, each with one value or several",
    "link": "an emulated link in front of the edge, each with one value or several",
}
_SWITCH = {"yes": True, "no": False}


def add_axes(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each axis; raise `ConfigError` if the command has the flag already."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for axis in all_axes().values():
        kind = axis.kind if axis.kind in _TITLES else "target"
        if kind not in groups:
            groups[kind] = parser.add_argument_group(_TITLES[kind])
        try:
            _add_axis(groups[kind], axis.setting)
        except argparse.ArgumentError as error:
            raise ConfigError(
                f"{error}: the command has this flag already; in the protocol's declaration of the "
                f"option, set another flag by flag=."
            ) from error


def values_of(args: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    """Return the values of each axis whose flag is given, by the option's name."""
    values_by_name = {
        name: getattr(args, axis.setting.flag.replace("-", "_"))
        for name, axis in all_axes().items()
    }
    return {name: tuple(dict.fromkeys(values)) for name, values in values_by_name.items() if values}


def _add_axis(group: argparse._ArgumentGroup, setting: Setting) -> None:
    listed = setting.extra.get("form") == "expansion" or get_origin(setting.type) in (
        tuple,
        Sequence,
    )
    keywords = value_keywords(setting)
    choices = keywords.pop("choices", None)
    read: Callable[[str], Any] = keywords.get("type", str)
    if setting.type is bool:
        choices, read = tuple(_SWITCH), lambda text: _SWITCH.get(text, text)
    if setting.extra.get("form") == "duration":
        read = _time(read)
    items = _items(read, choices)
    text = help_text(setting).replace("%", "%%")
    group.add_argument(
        f"--{setting.flag}",
        action="append" if listed else "extend",
        type=_named_after(read, lambda text: tuple(read(text)) if listed else items(text)),
        metavar=setting.metavar or (",".join(choices) if choices else None),
        help=f"{text}; repeat the flag for several" if listed else text,
    )


def _items(read: Callable[[str], Any], choices: Sequence[str] | None) -> Callable[[str], list[Any]]:
    """Return the parser of ``A,B,…``."""

    def items(text: str) -> list[Any]:
        parts = text.split(",")
        for part in parts:
            if choices is not None and part not in choices:
                raise argparse.ArgumentTypeError(
                    f"invalid choice: {part!r} (choose from {', '.join(map(repr, choices))})"
                )
        return [read(part) for part in parts]

    return items


def _named_after(read: Callable[[str], Any], parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Give a parser the name of another one, which argparse tells after a wrong value."""
    parse.__name__ = getattr(read, "__name__", "value")
    return parse


def _time(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser of times in which a bare number counts milliseconds."""
    return lambda text: read(f"{text}ms" if text.replace(".", "", 1).isdecimal() else text)
