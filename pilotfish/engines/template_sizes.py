"""Estimate the size of a chat template's intermediate results before they are computed.

In:  the name of an operator, a method or a filter, and its operands. Out: an upper bound of the
result's size in characters, near the real size; a list item counts as eight characters. Operations
that are not listed return at most a few times the size of their input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sized, ValuesView
from typing import Any

from jinja2.utils import Namespace

ITEM = 8  # size of a list item (characters): the bytes of a reference
# Methods of texts and numbers that templates do not need and that are hard to bound.
BARRED = frozenset(
    {"encode", "decode", "translate", "maketrans", "expandtabs", "to_bytes", "from_bytes"}
)
SLOW = ("striptags", "urlize", "wordwrap", "pprint", "title", "xmlattr")  # filters
# maximum characters of a slow filter's input; some of these filters take quadratic time
_SLOW_CHARACTERS = 1 << 16
# maximum digits of a text that is converted to a number: Python's bound for decimals
_MOST_DIGITS = 4300
_TOO_MUCH = 1 << 62
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\d+|\*)?(?:\.(\d+|\*))?")
_FIELD = re.compile(r"\{([^{}]*)")
_NESTED_WIDTH = re.compile(r"\{[^{}]*:[^{}]*\{")  # a field inside the width of a field
_NESTED_LOOKUP = re.compile(r"\{[^{}]*:[^{}]*\{[^{}]*[\[.]")  # a width that is an item or attribute
_NUMBER = re.compile(r"\d+")
_Extents = dict[int, tuple[int, int]]


def printed_size(value: object) -> int:
    """Bound the characters of ``str(value)``.

    A list that occurs several times is counted each time.
    """
    return len(value) if isinstance(value, str) else _extent(value, {})[0]


def operator_size(operator: str, left: Any, right: Any) -> int:
    """Estimate the size of ``left operator right``, for `+`, `*`, `**` and `%`.

    An integer counts as the square of its bytes, which is proportional to the time of the next
    operation with it.
    """
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * max(right, 0)
        return (bits // 8) ** 2
    if operator == "%":
        return _formatted_size(left, right) if isinstance(left, str) else 0
    sizes = [_size(operand) for operand in (left, right) if isinstance(operand, Sized)]
    if operator == "*" and len(sizes) == 1:
        factor = right if isinstance(left, Sized) else left
        return sizes[0] * factor if isinstance(factor, int) else 0
    return sum(sizes)


def method_size(text: str, name: str, arguments: tuple[Any, ...]) -> int:
    """Estimate the size of a string method's result; `join` is handled by `joined_size`."""
    if name in ("center", "ljust", "rjust", "zfill"):
        return max([len(text), *_integers(arguments)])
    if name == "replace" and len(arguments) > 1:
        return _replaced_size(text, arguments[0], arguments[1])
    if name in ("format", "format_map"):
        return _format_size(text, arguments)
    if name in ("split", "rsplit", "splitlines"):
        return len(text) + ITEM * _piece_count(text, arguments)
    return len(text)


def filter_size(name: str, value: Any, arguments: tuple[Any, ...]) -> int:
    """Estimate the size of a filter's result; `joined_size` and `sum_size` handle two filters."""
    if name in SLOW:
        small = sum(map(printed_size, (value, *arguments))) <= _SLOW_CHARACTERS
        return _SLOW_CHARACTERS if small else _TOO_MUCH
    if isinstance(value, str) and name in _TEXT_FILTERS:
        return _TEXT_FILTERS[name](value, arguments)
    return _ANY_FILTERS[name](value, arguments) if name in _ANY_FILTERS else 0


def sum_size(arguments: tuple[Any, ...]) -> int:
    """Return a forbidden size for a sum of lists: each addition copies all earlier items."""
    return _TOO_MUCH if any(isinstance(value, list | tuple) for value in arguments) else 0


def joined_size(parts: list[Any], separator: object) -> int:
    """Bound the size of the text that joins these parts."""
    return printed_size(parts) + len(parts) * printed_size(separator)


def _size(value: Sized) -> int:
    return len(value) * (1 if isinstance(value, str | bytes) else ITEM)


def _integers(arguments: Iterable[Any]) -> list[int]:
    return [value for value in arguments if isinstance(value, int)]


def _extent(value: object, extents_by_id: _Extents) -> tuple[int, int]:
    """Return the number of characters that a value prints, and the depth of its nested lists."""
    if isinstance(value, str):
        return len(value) + 4, 0
    if isinstance(value, int):
        return value.bit_length() // 3 + 4, 0
    if isinstance(value, Namespace):
        value = value._Namespace__attrs
    if not isinstance(value, list | tuple | set | Mapping | ItemsView | KeysView | ValuesView):
        return 64, 0
    known = extents_by_id.get(id(value))
    if known is None:
        extents_by_id[id(value)] = 0, 0  # a list may contain itself
        parts: Iterable[object] = value
        if isinstance(value, Mapping):
            parts = [part for pair in value.items() for part in pair]
        extents = [_extent(part, extents_by_id) for part in parts]
        size = 4 + sum(size + 2 for size, _ in extents)
        known = extents_by_id[id(value)] = size, 1 + max((depth for _, depth in extents), default=0)
    return known


def _json_size(value: object, indent: int) -> int:
    size, depth = _extent(value, {})
    return size * (1 + indent * depth)


def _replaced_size(text: object, old: object, new: object) -> int:
    if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str)):
        return 0
    more = len(new) - len(old)
    return len(text) + (text.count(old) * more if more > 0 else 0)


def _piece_count(text: str, arguments: tuple[Any, ...]) -> int:
    separator = arguments[0] if arguments and isinstance(arguments[0], str) else None
    return text.count(separator) + 1 if separator else (len(text) + 1) // 2


def _formatted_size(form: str, arguments: object) -> int:
    """Bound the size of ``form % arguments``."""
    values = list(arguments) if isinstance(arguments, tuple) else [arguments]
    fields = _CONVERSION.findall(form)
    stated = [width for field in fields for width in field if width]
    widest = max(_integers(values), default=0)
    widths = [widest if width == "*" else int(width[:9]) for width in stated]
    return len(form) + len(fields) * max(map(printed_size, values), default=0) + sum(widths)


def _format_size(form: str, arguments: tuple[Any, ...]) -> int:
    """Bound the size of ``form.format(*arguments)``."""
    if _NESTED_LOOKUP.search(form):
        return _TOO_MUCH
    fields = _FIELD.findall(form)
    specs = [field.partition(":")[2] for field in fields]
    widths = [int(run[:9]) for spec in specs for run in _NUMBER.findall(spec)]
    widest = max([0, *_integers(arguments)]) if _NESTED_WIDTH.search(form) else 0
    each = widest + max(map(printed_size, arguments), default=0)
    return len(form) + len(fields) * each + sum(widths)


def _indented_size(text: str, arguments: tuple[Any, ...]) -> int:
    widths = [*_integers(arguments), *map(printed_size, arguments)]
    return len(text) + (text.count("\n") + 1) * max([4, *widths])


_Sizes = dict[str, Callable[[Any, tuple[Any, ...]], int]]
_TEXT_FILTERS: _Sizes = {
    "center": lambda text, arguments: max([len(text), *_integers(arguments)]),
    "replace": lambda text, arguments: (
        _replaced_size(text, *arguments[:2]) if len(arguments) > 1 else 0
    ),
    "format": _formatted_size,
    "indent": _indented_size,
    "list": lambda text, _: ITEM * len(text),
    "int": lambda text, _: len(text) if len(text) <= _MOST_DIGITS else _TOO_MUCH,
}
_ANY_FILTERS: _Sizes = {
    "slice": lambda _, arguments: ITEM * max([0, *_integers(arguments)]) + printed_size(arguments),
    "batch": lambda _, arguments: ITEM * max([0, *_integers(arguments)]) + printed_size(arguments),
    "tojson": lambda value, arguments: _json_size(
        value, max([0, *_integers(arguments), *_lengths(arguments)])
    ),
    "round": lambda _, arguments: (
        _TOO_MUCH if max([0, *map(abs, _integers(arguments))]) > _MOST_DIGITS else 0
    ),
    **dict.fromkeys(
        ("sort", "groupby", "unique", "min", "max", "selectattr", "rejectattr", "map"),
        lambda _, arguments: _TOO_MUCH if max([0, *_lengths(arguments)]) > _MOST_DIGITS else 0,
    ),
    **dict.fromkeys(
        ("string", "escape", "forceescape", "e", "safe"), lambda value, _: printed_size(value)
    ),
}


def _lengths(arguments: Iterable[Any]) -> list[int]:
    """List the printed sizes of texts and tuples, such as separators."""
    return [printed_size(value) for value in arguments if isinstance(value, str | tuple)]
