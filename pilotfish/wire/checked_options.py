"""Options that check themselves: the types and bounds of their declarations (`base.settings`).

In:  a struct whose values a caller in Python set, or a flag, or the body of a request. Out: values
     of Python's own types within their bounds, or an `UnsupportedError` that names the option.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import Struct, structs

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.settings import converted, settings

_PLAIN_TYPES = frozenset((bool, float, int, str, type(None)))
_Checked = TypeVar("_Checked", bound="CheckedOptions")


class CheckedOptions(Struct, frozen=True, kw_only=True):
    """Options that can check themselves by their declarations. Groups are checked, too."""

    def with_plain_types(self: _Checked) -> _Checked:
        """Return the options as values of Python's own types; see `plain_values`."""
        groups = {name: group.with_plain_types() for name, group in self._groups()}
        return structs.replace(self, **groups, **self.plain_values())

    def plain_values(self) -> dict[str, Any]:
        """Return the options' values, in which Python's own types replace numpy's.

        Raises `UnsupportedError` for a value of another type than its option's. Bounds are checked
        by `check_bounds`.
        """
        groups = {name for name, _ in self._groups()}
        values = {
            name: _plain(getattr(self, name))
            for name in self.__struct_fields__
            if name not in groups
        }
        checked = _checked(values, _plain_form(type(self)))
        # a number stays as it is: an int is shorter in a message than the same float
        return {
            name: getattr(checked, name) if isinstance(value, list) else value
            for name, value in values.items()
        }

    def check_bounds(self) -> None:
        """Raise `UnsupportedError` for a value outside the bounds of its option."""
        for _, group in self._groups():
            group.check_bounds()
        for option in settings(type(self)):
            value, meta = getattr(self, option.name), option.meta
            if not isinstance(value, int | float):
                continue
            low, above = (meta.ge, "at least") if meta.gt is None else (meta.gt, "above")
            high_enough = low is None or (value >= low if meta.gt is None else value > low)
            if high_enough and (meta.le is None or value <= meta.le):
                continue
            bounds = f"{above} {low}" + ("" if meta.le is None else f" and at most {meta.le}")
            if meta.gt is None and meta.le is not None:
                bounds = f"between {low} and {meta.le}"
            raise UnsupportedError(f"{option.name} must be {bounds}, not {value}.")
        lengths = _bounded_lengths(type(self))
        _checked({name: getattr(self, name) for name in lengths.__struct_fields__}, lengths)

    def _groups(self) -> "Iterator[tuple[str, CheckedOptions]]":
        for name in self.__struct_fields__:
            if isinstance(group := getattr(self, name), CheckedOptions):
                yield name, group


@cache
def _plain_form(kind: type[CheckedOptions]) -> type[Struct]:
    """Return a struct with the fields of ``kind`` without bounds, and without groups."""
    hints = get_type_hints(kind)
    return msgspec.defstruct(
        kind.__name__, [(each.name, hints[each.name]) for each in settings(kind) if not each.group]
    )


@cache
def _bounded_lengths(kind: type[CheckedOptions]) -> type[Struct]:
    """Return a struct with the fields of ``kind`` that are sequences, with their bounds."""
    hints = get_type_hints(kind, include_extras=True)
    return msgspec.defstruct(
        kind.__name__,
        [(each.name, hints[each.name]) for each in settings(kind) if _is_sequence(each.type)],
    )


def _is_sequence(kind: Any) -> bool:
    return get_origin(kind) is Sequence


def _checked(values: Mapping[str, Any], kind: type[Struct]) -> Any:
    """Return a struct with these values; `UnsupportedError` names the faulty option."""
    try:
        return converted(values, kind)
    except ValueError as error:
        raise UnsupportedError(f"{error}.") from error


def _plain(value: Any) -> Any:
    """Return a value in which Python's own types replace numpy's, and lists all sequences."""
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {
            key.item() if isinstance(key, np.generic) else key: _plain(item)
            for key, item in value.items()
        }
    return value
