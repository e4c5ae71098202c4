"""How large what an expression of a chat template makes would be, before it is made.

In:  an operator, a method or a filter by its name, and what it is applied to. Out: an upper bound
of about the right size, in characters; an item of a list counts as eight of them. What is not
listed makes at most a few times what it takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sized, ValuesView
from typing import Any

from jinja2.utils import Namespace

ITEM = 8  # characters that an item of a list counts as: the bytes of a reference
# Methods of texts and numbers that no template needs and whose cost is hard to bound.
BARRED = frozenset(
    {"encode", "decode", "translate", "maketrans", "expandtabs", "to_bytes", "from_bytes"}
)
SLOW = ("striptags", "urlize", "wordwrap", "pprint", "title", "xmlattr")  # filters
_SLOW_CHARACTERS = 1 << 16  # of what a slow filter takes; some of them take time by its square
_DIGITS = 4300  # of a text that becomes a number, as Python's own bound for decimal ones
_TOO_MUCH = 1 << 62
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\d+|\*)?(?:\.(\d+|\*))?")
_FIELD = re.compile(r"\{([^{}]*)")
_GIVEN_WIDTH = re.compile(r"\{[^{}]*:[^{}]*\{")  # is itself a field
_FOUND_WIDTH = re.compile(r"\{[^{}]*:[^{}]*\{[^{}]*[\[.]")  # and lies within what is given
_NUMBER = re.compile(r"\d+")
_Seen = dict[int, tuple[int, int]]


def printed_size(value: object) -> int:
    """Bound the characters of ``str(value)``; what several lists share counts each time."""
    return len(value) if isinstance(value, str) else _extent(value, {})[0]


def operator_size(operator: str, left: Any, right: Any) -> int:
    """Size the result of ``left operator right``, for `+`, `*`, `**` and `%`.

    A large number counts as the square of its bytes: so long takes the next step with it.
    """
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * max(right, 0)
        return (bits // 8) ** 2
    if operator == "%":
        return _formatted(left, right) if isinstance(left, str) else 0
    sizes = [_size(operand) for operand in (left, right) if isinstance(operand, Sized)]
    if operator == "*" and len(sizes) == 1:
        factor = right if isinstance(left, Sized) else left
        return sizes[0] * factor if isinstance(factor, int) else 0
    return sum(sizes)


def method_size(text: str, name: str, arguments: tuple[Any, ...]) -> int:
    """Size the result of a text's method, but for `join`."""
    if name in ("center", "ljust", "rjust", "zfill"):
        return max([len(text), *_integers(arguments)])
    if name == "replace" and len(arguments) > 1:
        return _replaced(text, arguments[0], arguments[1])
    if name in ("format", "format_map"):
        return _fields(text, arguments)
    if name in ("split", "rsplit", "splitlines"):
        return len(text) + ITEM * _pieces(text, arguments)
    return len(text)


def filter_size(name: str, value: Any, arguments: tuple[Any, ...]) -> int:
    """Size the result of a filter, but for `join` and `sum`."""
    if name in SLOW:
        small = sum(map(printed_size, (value, *arguments))) <= _SLOW_CHARACTERS
        return _SLOW_CHARACTERS if small else _TOO_MUCH
    if isinstance(value, str) and name in _OF_TEXTS:
        return _OF_TEXTS[name](value, arguments)
    return _OF_ANY[name](value, arguments) if name in _OF_ANY else 0


def sum_size(arguments: tuple[Any, ...]) -> int:
    """Too much where lists would be added up: each step copies the ones before."""
    return _TOO_MUCH if any(isinstance(value, list | tuple) for value in arguments) else 0


def joined_size(parts: list[Any], separator: object) -> int:
    """Size the text that joins the parts."""
    return printed_size(parts) + len(parts) * printed_size(separator)


def _size(value: Sized) -> int:
    return len(value) * (1 if isinstance(value, str | bytes) else ITEM)


def _integers(given: Iterable[Any]) -> list[int]:
    return [value for value in given if isinstance(value, int)]


def _extent(value: object, seen: _Seen) -> tuple[int, int]:
    """Return how many characters a value is printed with, and how deep lists lie in it."""
    if isinstance(value, str):
        return len(value) + 4, 0
    if isinstance(value, int):
        return value.bit_length() // 3 + 4, 0
    if isinstance(value, Namespace):
        value = value._Namespace__attrs
    if not isinstance(value, list | tuple | set | Mapping | ItemsView | KeysView | ValuesView):
        return 64, 0
    known = seen.get(id(value))
    if known is None:
        seen[id(value)] = 0, 0  # should it hold itself
        parts: Iterable[object] = value
        if isinstance(value, Mapping):
            parts = [part for pair in value.items() for part in pair]
        found = [_extent(part, seen) for part in parts]
        size = 4 + sum(size + 2 for size, _ in found)
        known = seen[id(value)] = size, 1 + max((depth for _, depth in found), default=0)
    return known


def _as_json(value: object, indent: int) -> int:
    size, depth = _extent(value, {})
    return size * (1 + indent * depth)


def _replaced(text: object, old: object, new: object) -> int:
    if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str)):
        return 0
    more = len(new) - len(old)
    return len(text) + (text.count(old) * more if more > 0 else 0)


def _pieces(text: str, given: tuple[Any, ...]) -> int:
    separator = given[0] if given and isinstance(given[0], str) else None
    return text.count(separator) + 1 if separator else (len(text) + 1) // 2


def _formatted(form: str, given: object) -> int:
    """Size ``form % given``."""
    values = list(given) if isinstance(given, tuple) else [given]
    fields = _CONVERSION.findall(form)
    stated = [width for field in fields for width in field if width]
    widest = max(_integers(values), default=0)
    widths = [widest if width == "*" else int(width[:9]) for width in stated]
    return len(form) + len(fields) * max(map(printed_size, values), default=0) + sum(widths)


def _fields(form: str, given: tuple[Any, ...]) -> int:
    """Size ``form.format(*given)``."""
    if _FOUND_WIDTH.search(form):
        return _TOO_MUCH
    fields = _FIELD.findall(form)
    specs = [field.partition(":")[2] for field in fields]
    widths = [int(run[:9]) for spec in specs for run in _NUMBER.findall(spec)]
    widest = max([0, *_integers(given)]) if _GIVEN_WIDTH.search(form) else 0
    each = widest + max(map(printed_size, given), default=0)
    return len(form) + len(fields) * each + sum(widths)


def _indented(text: str, given: tuple[Any, ...]) -> int:
    widths = [*_integers(given), *map(printed_size, given)]
    return len(text) + (text.count("\n") + 1) * max([4, *widths])


_Sizes = dict[str, Callable[[Any, tuple[Any, ...]], int]]
_OF_TEXTS: _Sizes = {
    "center": lambda text, given: max([len(text), *_integers(given)]),
    "replace": lambda text, given: _replaced(text, *given[:2]) if len(given) > 1 else 0,
    "format": _formatted,
    "indent": _indented,
    "list": lambda text, _: ITEM * len(text),
    "int": lambda text, _: len(text) if len(text) <= _DIGITS else _TOO_MUCH,
}
_OF_ANY: _Sizes = {
    "slice": lambda _, given: ITEM * max([0, *_integers(given)]) + printed_size(given),
    "batch": lambda _, given: ITEM * max([0, *_integers(given)]) + printed_size(given),
    "tojson": lambda value, given: _as_json(value, max([0, *_integers(given), *_lengths(given)])),
    "round": lambda _, given: _TOO_MUCH if max([0, *map(abs, _integers(given))]) > _DIGITS else 0,
    **dict.fromkeys(
        ("sort", "groupby", "unique", "min", "max", "selectattr", "rejectattr", "map"),
        lambda _, given: _TOO_MUCH if max([0, *_lengths(given)]) > _DIGITS else 0,
    ),
    **dict.fromkeys(
        ("string", "escape", "forceescape", "e", "safe"), lambda value, _: printed_size(value)
    ),
}


def _lengths(given: Iterable[Any]) -> list[int]:
    """Of texts, and of what is printed of tuples of them, such as separators."""
    return [printed_size(value) for value in given if isinstance(value, str | tuple)]
