"""Check the fields of a request that its type does not read: unknown ones, and unsupported values.

In:  the JSON of a request, and what msgspec has decoded of it. msgspec passes over the fields that
a type lacks. Out: the names of the unknown fields, or a `RefusalError` for an unsupported value.

Each type says what it knows of the fields that it does not read (`RequestFields`). They are found
by a second pass that makes no objects of values: it reads an object's keys, and enters the objects
that msgspec has decoded. So its cost is bounded by the request's own objects and `_MOST_KEYS`.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Final, TypeAlias

import msgspec
from msgspec import structs

from pilotfish.base.struct_types import gathered
from pilotfish.device_runtime.service.refusal import RefusalError

Values: TypeAlias = Mapping[str, tuple[object, ...]]  # field → values without effect

IGNORED_HEADER = "x-pilotfish-ignored"  # header of an answer: the request's unknown fields
_MOST_KEYS = 100_000  # limit of a request's keys, without those within values that are not read
_MOST_NAMES = 24  # limit of the unknown fields that are named
_NAME_CHARACTERS = 80
_NEUTRAL_BYTES = 64  # a longer value is never neutral
_UNPRINTABLE = re.compile(r"[^!-+\--~]")  # what a list in a header cannot have: also a comma


class RequestFields(msgspec.Struct):
    """A type of an object in a request.

    inert: fields that have no effect, whatever their values. neutral: unsupported fields that would
    change the answer, with their values without effect; any other value is refused.
    unsupported_hints: unsupported fields whose other values are ignored as unknown fields are.
    object_types: fields that stay undecoded at first → the type of their objects.
    """

    inert: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Values] = {}
    unsupported_hints: ClassVar[Values] = {}
    object_types: ClassVar[Mapping[str, Any]] = {}


class _Key(str):
    """A key, as `_FieldCheck` reads it."""

    __slots__ = ()


_UNKNOWN: Final = _Key()  # stands for all unknown keys of an object, so that they take no memory


class IgnoredFields:
    """The unknown fields of a request: the first of each name and place, up to `_MOST_NAMES`.

    strict: refuse a request with an unknown field.
    """

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict
        self._paths: dict[str, str] = {}  # path without indices → first path

    def add(self, path: str) -> None:
        """Add a field; if the request must have none, raise a `RefusalError`."""
        if self.strict:
            raise unknown_field(path)
        place = re.sub(r"\[\d+\]", "[]", path)
        if len(self._paths) < _MOST_NAMES:
            self._paths.setdefault(place, path)

    @property
    def places(self) -> list[str]:
        """The fields' paths without indices."""
        return [_printable(place) for place in self._paths]

    def __str__(self) -> str:
        return ", ".join(_printable(path) for path in self._paths.values())


def _printable(path: str) -> str:
    return _UNPRINTABLE.sub("?", path[:_NAME_CHARACTERS])


def check_fields(data: bytes, fields: RequestFields, ignored: IgnoredFields) -> None:
    """Check an object and the objects within it. data: its JSON. fields: what was decoded of it."""
    _FieldCheck(ignored).check(data, fields, "")


def check_names(data: bytes, kind: type[RequestFields], ignored: IgnoredFields) -> None:
    """Check an object, but not the objects within it. data: JSON that is no ``kind``."""
    _FieldCheck(ignored).level(data, kind, "")


class _FieldCheck:
    def __init__(self, ignored: IgnoredFields) -> None:
        self._ignored = ignored
        self._keys = 0

    def check(self, data: "bytes | msgspec.Raw", fields: RequestFields, where: str) -> None:
        kind = type(fields)
        values = self.level(data, kind, where)
        for name in _entered(kind):
            if name in values:
                self._enter(
                    values[name], getattr(fields, name), kind.object_types.get(name), where + name
                )

    def level(
        self, data: "bytes | msgspec.Raw", kind: type[RequestFields], where: str
    ) -> dict[str, msgspec.Raw]:
        """Check the keys of one object; return its known fields."""
        known = _known(kind)

        def read_key(_: type, name: str) -> _Key:
            self._keys += 1
            if self._keys > _MOST_KEYS:
                raise _too_many()
            if name in known:
                return _Key(name)
            self._ignored.add(where + name)
            return _UNKNOWN

        values = msgspec.json.decode(data, type=dict[_Key, msgspec.Raw], dec_hook=read_key)
        for name, value in values.items():  # the first field at fault is named
            if name in kind.neutral and not _is_one_of(value, kind.neutral[name]):
                raise unsupported_field(where + name)
            if name in kind.unsupported_hints and not _is_one_of(
                value, kind.unsupported_hints[name]
            ):
                self._ignored.add(where + name)
        return {str(name): value for name, value in values.items()}

    def _enter(self, data: msgspec.Raw, value: object, object_type: Any, where: str) -> None:
        if object_type is not None:
            try:
                value = msgspec.json.decode(data, type=gathered(object_type))
            except (msgspec.DecodeError, UnicodeDecodeError):
                return  # a value of another form: the field's reader says more
        if isinstance(value, RequestFields):
            self.check(data, value, f"{where}.")
        elif isinstance(value, list) and value and isinstance(value[0], RequestFields):
            items = msgspec.json.decode(data, type=list[msgspec.Raw])
            for at, (item, fields) in enumerate(zip(items, value, strict=True)):
                self.check(item, fields, f"{where}[{at}].")


@cache
def _known(kind: type[RequestFields]) -> frozenset[str]:
    """Return the names of all fields that a type knows."""
    config = kind.__struct_config__
    tag = () if config.tag_field is None else (config.tag_field,)
    return frozenset((*_entered(kind), *kind.inert, *kind.neutral, *kind.unsupported_hints, *tag))


@cache
def _entered(kind: type[RequestFields]) -> tuple[str, ...]:
    """Return the names of the fields that a type reads."""
    return tuple(field.encode_name for field in structs.fields(kind))


def _is_one_of(value: msgspec.Raw, values: tuple[object, ...]) -> bool:
    """Return whether a value is one of ``values``; a long value is not decoded."""
    try:
        return len(memoryview(value)) <= _NEUTRAL_BYTES and msgspec.json.decode(value) in values
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def unknown_field(name: str) -> RefusalError:
    """Return the refusal of an unknown field."""
    name = name[:_NAME_CHARACTERS]
    return RefusalError(
        400,
        f"Unrecognized request argument supplied: {name}",
        code="unknown_parameter",
        param=name,
        reason="unsupported",
    )


def unsupported_field(name: str) -> RefusalError:
    """Return the refusal of a field whose value would change the answer."""
    return RefusalError(
        400,
        f"This service does not offer {name}; leave it out.",
        code="unsupported_parameter",
        param=name,
        reason="unsupported",
    )


def _too_many() -> RefusalError:
    return RefusalError(
        400, f"The body has more than {_MOST_KEYS:,} fields.", code="malformed", reason="malformed"
    )
