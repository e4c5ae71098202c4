"""Make flags from settings: `add_flags` declares the flags, `from_args` returns the settings.

`pilotfish.base.settings` defines settings. The help shows a setting's default after its
description, unless the description contains the word "default".
"""

import argparse
import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from msgspec import Meta, Struct

from pilotfish.base.settings import REQUIRED, Setting, plain_type, settings
from pilotfish.cli.quantities import duration, rate, share, size, span
from pilotfish.wire.keys import default_directory

_Settings = TypeVar("_Settings", bound=Struct)
_Number = TypeVar("_Number", int, float)
_Read = Callable[[str], Any]

_GREATEST_INT = 2**31 - 1


def add_flags(
    parser: "argparse._ActionsContainer",
    struct: type[Struct],
    *,
    without: Collection[str] = (),
    **defaults: object,
) -> None:
    """Add a flag for each setting, required flags first.

    without: fields that get no flag. Defaults: field → default to use instead.
    """
    exclusive: dict[str, argparse._ActionsContainer] = {}
    for setting in sorted(settings(struct), key=lambda setting: setting.default is not REQUIRED):
        if setting.name in without:
            continue
        if setting.group:
            title = setting.meta.title
            below = parser.add_argument_group(title, setting.meta.description) if title else parser
            add_flags(below, setting.type)
        elif setting.meta.description:
            below = parser
            if (name := setting.extra.get("exclusive")) is not None:
                below = exclusive.get(name) or parser.add_mutually_exclusive_group()
                exclusive[name] = below
            add_flag(below, setting._replace(default=defaults.get(setting.name, setting.default)))


def add_flag(parser: "argparse._ActionsContainer", setting: Setting) -> None:
    """Add the flag of one setting."""
    keywords = value_keywords(setting)
    if "type" in keywords:
        keywords["metavar"] = setting.metavar
    default = setting.default
    if not setting.extra.get("positional"):
        name, keywords["required"] = f"--{setting.flag}", default is REQUIRED
    else:
        name = setting.flag.replace("-", "_")
        if default is not REQUIRED:
            keywords["nargs"] = "*" if isinstance(default, tuple) else "?"
    parser.add_argument(
        name,
        default=None if default is REQUIRED or isinstance(default, tuple) else default,
        help=help_text(setting, keywords.get("const")).replace("%", "%%"),
        **keywords,
    )


def from_args(
    args: argparse.Namespace,
    struct: type[_Settings],
    *,
    without: Collection[str] = (),
    **others: object,
) -> _Settings:
    """Build the settings from the flags.

    without: fields that have no flag (`add_flags`) and keep their defaults. others: field → value
    to use instead of the flag's.
    """
    table = dict(others)
    for setting in settings(struct):
        if setting.name in table or setting.name in without:
            continue
        if setting.group:
            table[setting.name] = from_args(args, setting.type)
        elif setting.meta.description:
            value = flag_value(args, setting)
            if value is not None:
                table[setting.name] = value
    return struct(**table)


def flag_value(args: argparse.Namespace, setting: Setting) -> Any:
    """Return the value that the setting's flag has; None without a value and without a default."""
    value = getattr(args, setting.flag.replace("-", "_"))
    if isinstance(value, list):
        return dict(value) if get_origin(setting.type) is Mapping else tuple(value)
    return value


def bounded(kind: Callable[[str], _Number], meta: Meta) -> Callable[[str], _Number]:
    """Return an argparse type: an int or a float within its annotated bounds."""
    low, high = (meta.ge if meta.gt is None else meta.gt), meta.le
    if kind is int and low is not None and high is None:
        high = _GREATEST_INT
    if low is None and high is None:
        return kind
    above = "" if low is None else f"at least {low}" if meta.gt is None else f"above {low}"
    below = "" if high is None else f"at most {high}"
    within = " and ".join(filter(None, (above, below)))
    if meta.gt is None and above and below:
        within = f"between {low} and {high}"

    def number(text: str) -> _Number:
        value = kind(text)
        high_enough = low is None or (value >= low if meta.gt is None else value > low)
        if not high_enough or not (value < math.inf if high is None else value <= high):
            raise argparse.ArgumentTypeError(f"{text} is not {within}")
        return value

    return update_wrapper(number, kind, (), ())  # `reads_quantity` looks at `kind`


def host_and_port(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, or PORT on loopback (an argparse type)."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def name_list(text: str) -> list[str]:
    """Parse ``A,B`` (an argparse type)."""
    return text.split(",")


def milliseconds(text: str) -> float:
    """Parse a number of milliseconds, 0 or more; return seconds (an argparse type)."""
    return bounded(float, Meta(ge=0))(text) * 1e-3


def window(text: str) -> "int | Literal['auto']":
    """Parse a number of draft tokens, or ``auto`` (an argparse type)."""
    return "auto" if text == "auto" else int(text)


def expansion(text: str) -> list[int]:
    """Parse ``2,2,1`` (an argparse type)."""
    return [int(part) for part in text.split(",")]


def bias(text: str) -> tuple[int, float]:
    """Parse ``ID=B`` (an argparse type)."""
    token, _, value = text.partition("=")
    return int(token), float(value)


# parser of each name that a setting's ``form`` may have; `value_keywords` handles "keys"
FORMS: dict[str, _Read] = {
    "duration": duration,
    "span": span,
    "size": size,
    "rate": rate,
    "share": share,
    "host:port": host_and_port,
    "command": shlex.split,
    "names": name_list,
    "milliseconds": milliseconds,
    "window": window,
    "expansion": expansion,
    "bias": bias,
}


def value_keywords(setting: Setting) -> dict[str, Any]:
    """Return the keywords of `add_argument` that parse a setting's values."""
    kind, form, extra = setting.type, setting.extra.get("form"), setting.extra
    if form == "keys":  # without the flag: None; flag without a value: the default folder
        return {"type": Path, "nargs": "?", "const": default_directory()}
    if kind is bool:
        return {"action": "store_false" if setting.default is True else "store_true"}
    choices = get_args(kind) if get_origin(kind) is Literal else extra.get("choices")
    if choices is not None:
        return {"choices": tuple(choices)}
    append = {"action": "append"} if extra.get("repeat") else {}
    if form is not None or get_origin(kind) not in (tuple, Sequence):
        read = _scalar(kind, setting.meta) if form is None else _written(form)
        if form is not None and kind in (int, float):
            read = bounded(read, setting.meta)
        return {"type": read, **append}
    item = _scalar(*plain_type(get_args(kind)[0]))
    if append or extra.get("positional"):
        return {"type": item, **append}
    return {"type": partial(_items, item, setting.metavar)}


def _scalar(kind: Any, meta: Meta) -> _Read:
    """Return the parser of one value of type ``kind``, for example ``int | Literal["auto"]``."""
    if get_origin(kind) not in (Union, UnionType):
        return bounded(kind, meta) if kind in (int, float) else kind
    number, words = get_args(kind)
    read = _scalar(*plain_type(number))
    return lambda text: text if text in get_args(words) else read(text)


def reads_list(read: object) -> bool:
    """Whether this argparse type parses ``A,B,…``."""
    return read in (name_list, expansion) or (isinstance(read, partial) and read.func is _items)


def reads_quantity(read: object) -> bool:
    """Whether this argparse type parses a number with a unit, and perhaps checks its bounds."""
    return getattr(read, "__wrapped__", read) in (duration, span, size, rate)


def _written(form: str | _Read) -> _Read:
    """Return the parser for a form: a name in `FORMS`, or a function that may raise ValueError."""
    if isinstance(form, str):
        return FORMS[form]

    def read(text: str) -> Any:
        try:
            return form(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _items(item: _Read, like: str | None, text: str) -> tuple[Any, ...]:
    try:
        return tuple(item(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid list {text!r}: write it as {like}") from None


def help_text(setting: Setting, bare: object = None) -> str:
    """Return the help of a setting's flag. bare: the value of the flag without a value, if any."""
    text, default = setting.meta.description or "", setting.default
    if bare is not None:
        text += f"; flag without {setting.extra['metavar']}: $PILOTFISH_KEYS or {bare}"
    silent = default is REQUIRED or default is None or isinstance(default, bool)
    if silent or default in ("", ()) or "default" in text:
        return text
    number = f"{default:g}" if isinstance(default, float) else default
    if isinstance(default, tuple):
        number = ",".join(map(str, default))
    return f"{text} ({number})"
