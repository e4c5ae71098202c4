"""Settings: the fields of a frozen keyword-only `msgspec.Struct`, each with its bounds and help.

A field says all that there is to say of it, and flags, TOML keys, help and reloads follow from it::

    drain_s: Annotated[float, setting("seconds in which …", ge=0, flag="drain", live=True)] = 5.0

`setting` is short for `msgspec.Meta`, so that msgspec holds the bounds where it decodes. A field
without a description is no flag. One that is such a struct itself is a group of settings; with a
title it is one in the help, too.
"""

from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Meta, Struct, structs

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
    """What there is to say of a setting. extra may hold:

    flag: its flag and TOML key, with dashes for underscores; else the field's name, and for one in
        seconds without its ``_s``.
    metavar: what stands for its value in the help; else N for an int and S for seconds.
    live: True for what a running daemon can change; all else needs a restart.
    repeat: True for a tuple whose flag is given once for each item; else commas separate them.
    choices: the values to choose from, where the type is no ``Literal``.
    positional: True for what is named by its place, not by a flag.
    exclusive: a name that settings share of which a caller may give one only.
    form: how a value is written, where the type does not tell: a name in `pilotfish.cli.flags`
        (FORMS), or a function of the text; ValueError says what is wrong with it.

    A bool that is True otherwise has the flag that turns it off: flag="no-link".
    """
    bounds: dict[str, Any] = {"ge": ge, "gt": gt, "le": le}
    return Meta(**bounds, title=title, description=description, extra=extra)


class Setting(NamedTuple):
    """A field. type: without bounds and None; default: `REQUIRED` where there is none."""

    name: str
    type: Any
    default: Any
    meta: Meta

    @property
    def extra(self) -> dict[str, Any]:
        """What else is said of it; see `setting`."""
        return self.meta.extra or {}

    @property
    def flag(self) -> str:
        """Its flag without the dashes in front, and its key in a TOML file."""
        flag: str = self.extra.get("flag", self.name.removesuffix("_s"))
        return flag.replace("_", "-")

    @property
    def metavar(self) -> str | None:
        """What stands for its value in the help; None: the flag itself."""
        usual = "S" if self.name.endswith("_s") else "N" if self.type is int else None
        metavar: str | None = self.extra.get("metavar", usual)
        return metavar

    @property
    def group(self) -> bool:
        """Whether it holds settings of its own."""
        return isinstance(self.type, type) and issubclass(self.type, Struct)


def settings(struct: type[Struct]) -> Iterator[Setting]:
    """The fields of a struct in their order; its own come before those that it inherits."""
    hints = get_type_hints(struct, include_extras=True)
    defaults = {field.name: _default(field) for field in structs.fields(struct)}
    for owner in struct.__mro__:
        for name in owner.__annotations__ if issubclass(owner, Struct) else ():
            if name in defaults:
                kind, meta = plain_type(hints[name])
                yield Setting(name, kind, defaults.pop(name), meta)


def fixed_changes(old: Struct, new: Struct) -> list[str]:
    """The names of the settings that differ and that only a restart can change."""
    names = []
    for setting in settings(type(old)):
        before, after = getattr(old, setting.name), getattr(new, setting.name)
        if setting.group:
            names += fixed_changes(before, after)
        elif before != after and not setting.extra.get("live"):
            names.append(setting.name)
    return names


def with_live_changes(old: _Settings, new: _Settings) -> _Settings:
    """The old settings with those of the new ones that a running daemon can change."""
    live = [one.name for one in settings(type(old)) if one.extra.get("live")]
    return structs.replace(old, **{name: getattr(new, name) for name in live})


def _default(field: structs.FieldInfo) -> Any:
    return field.default if field.default_factory is NODEFAULT else field.default_factory()


def plain_type(hint: Any) -> tuple[Any, Meta]:
    """A type without None and ``Annotated``, and all that these said of it."""
    merged: dict[str, Any] = {}
    while (origin := get_origin(hint)) is Annotated or NoneType in get_args(hint):
        hint, *rest = get_args(hint)
        if origin is Annotated:
            for meta in rest:
                merged |= {
                    name: getattr(meta, name) for name in _META_FIELDS if _has_field(meta, name)
                }
        else:
            hint = Union[tuple(one for one in (hint, *rest) if one is not NoneType)]  # noqa: UP007  # made at run time
    return hint, Meta(**merged)


def _has_field(meta: Meta, name: str) -> bool:
    return getattr(meta, name) is not None
