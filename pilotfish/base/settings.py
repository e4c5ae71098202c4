"""Settings: the fields of a frozen keyword-only `msgspec.Struct`, each with its bounds and help.

A field is declared once; flags, TOML keys, help and reloads follow from its declaration::

    drain_s: Annotated[float, setting("seconds in which …", ge=0, flag="drain", live=True)] = 5.0

`setting` returns a `msgspec.Meta`, so msgspec checks the bounds when it decodes. A field without a
description has no flag. A field with a struct as its type is a group of settings, unless it has
``live``; if the field has a title, the help shows the group, too.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Meta, Struct, structs

from pilotfish.base.struct_types import gathered

REQUIRED = NODEFAULT
_Settings = TypeVar("_Settings", bound=Struct)
_META_FIELDS = ("ge", "gt", "le", "title", "description", "extra")


def setting(
    description: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    title: str | None = None,
    **extra: Any,
) -> Meta:
    """Return the metadata of a setting. ``extra`` may have these keys:

    flag: name of the flag and the TOML key, with dashes for underscores; default: the field's
        name, without a final ``_s`` for seconds.
    metavar: placeholder of the value in the help; default: N for an int, S for seconds.
    live: True if a running daemon can change the setting; others need a restart.
    repeat: True if the flag of a tuple or mapping is repeated for each item; default: one flag,
        items separated by commas.
    choices: the allowed values, if the type is not a ``Literal``.
    positional: True for a positional argument.
    exclusive: a name shared by settings of which a caller may give only one.
    form: parser of the value, if the type does not determine it: a name in `pilotfish.cli.flags`
        (FORMS), or a function of the text that raises ValueError.

    The flag of a bool that defaults to True turns it off: flag="no-link".
    """
    bounds: dict[str, Any] = {"ge": ge, "gt": gt, "le": le}
    return Meta(**bounds, title=title, description=description, extra=extra)


_UNKNOWN_CHOICE = re.compile(r"Invalid enum value (.*) - at `\$\.(\w+)`")


class Setting(NamedTuple):
    """A field of a settings struct.

    type: the field's type without bounds and None. default: `REQUIRED` if the field has none.
    """

    name: str
    type: Any
    default: Any
    meta: Meta

    @property
    def extra(self) -> dict[str, Any]:
        """The other metadata; see `setting`."""
        return self.meta.extra or {}

    @property
    def flag(self) -> str:
        """The flag without leading dashes, which is also the TOML key."""
        flag: str = self.extra.get("flag", self.name.removesuffix("_s"))
        return flag.replace("_", "-")

    @property
    def metavar(self) -> str | None:
        """The placeholder of the value in the help; None: the flag's name."""
        usual = "S" if self.name.endswith("_s") else "N" if self.type is int else None
        metavar: str | None = self.extra.get("metavar", usual)
        return metavar

    @property
    def group(self) -> bool:
        """Whether the field is a group of settings, and not one setting with ``live``."""
        is_struct = isinstance(self.type, type) and issubclass(self.type, Struct)
        return is_struct and "live" not in self.extra


@cache  # type hints take a while to evaluate, and each answer's options are checked
def settings(struct: type[Struct]) -> tuple[Setting, ...]:
    """Return the settings of a struct: its own fields in order, then the inherited fields."""
    return tuple(_declared(struct))


def _declared(struct: type[Struct]) -> Iterator[Setting]:
    hints = get_type_hints(struct, include_extras=True)
    defaults = {field.name: _default(field) for field in structs.fields(struct)}
    for owner in struct.__mro__:
        for name in owner.__annotations__ if issubclass(owner, Struct) else ():
            if name in defaults:
                kind, meta = plain_type(hints[name])
                yield Setting(name, kind, defaults.pop(name), meta)


def fixed_changes(old: Struct, new: Struct) -> list[str]:
    """Return the names of settings that differ and need a restart."""
    names = []
    for setting in settings(type(old)):
        before, after = getattr(old, setting.name), getattr(new, setting.name)
        if setting.group:
            names += fixed_changes(before, after)
        elif before != after and not setting.extra.get("live"):
            names.append(setting.name)
    return names


def with_live_changes(old: _Settings, new: _Settings) -> _Settings:
    """Return ``old`` with the values of ``new`` for settings that a running daemon can change."""
    live = [setting.name for setting in settings(type(old)) if setting.extra.get("live")]
    return structs.replace(old, **{name: getattr(new, name) for name in live})


def converted(values: Mapping[str, Any], struct: type[_Settings]) -> _Settings:
    """Return a struct with these values; `ValueError` names the field with a faulty value."""
    try:
        return msgspec.convert(values, gathered(struct))
    except msgspec.ValidationError as error:
        raise ValueError(_explained(str(error), struct)) from error
    except UnicodeEncodeError as error:  # msgspec raises it for such a text in place of a number
        text = ascii(error.object)
        name = next(name for name, value in values.items() if text[1:-1] in ascii(value))
        raise ValueError(f"{name} cannot be the text {text}") from error


def _explained(message: str, struct: type[Struct]) -> str:
    """Return msgspec's message with the field's name, and with the values that a choice has."""
    unknown = _UNKNOWN_CHOICE.fullmatch(message)
    if unknown is None:
        return message.replace("`$.", "`")
    value, name = unknown.groups()
    kind, _ = plain_type(get_type_hints(struct, include_extras=True)[name])
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    choices = [repr(choice) for each in members for choice in get_args(each)]
    choices += ["a number" for each in members if each in (int, float)]
    return f"{name} must be {' or '.join(choices)}, not {value}"


def _default(field: structs.FieldInfo) -> Any:
    return field.default if field.default_factory is NODEFAULT else field.default_factory()


def plain_type(hint: Any) -> tuple[Any, Meta]:
    """Return a type without None and ``Annotated``, and the merged metadata."""
    merged: dict[str, Any] = {}
    while (origin := get_origin(hint)) is Annotated or NoneType in get_args(hint):
        hint, *rest = get_args(hint)
        if origin is Annotated:
            for meta in rest:
                merged |= {
                    name: getattr(meta, name) for name in _META_FIELDS if _has_field(meta, name)
                }
        else:
            hint = Union[tuple(kind for kind in (hint, *rest) if kind is not NoneType)]  # noqa: UP007  # made at run time
    return hint, Meta(**merged)


def _has_field(meta: Meta, name: str) -> bool:
    return getattr(meta, name) is not None
