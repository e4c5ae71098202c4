"""The keys of transformers' configuration classes: which have an effect, and their defaults.

`class_keys.json` has the results of trials with transformers; tests/reference/make_class_keys.py
writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

_FILE = Path(__file__).with_name("class_keys.json")


class KnownKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of one class.

    Attributes:
        classes: names that `architectures` may have in files of this class.
        aliases: other name of a key → the class's name of it.
        defaults: key with an effect → its default; None also stands for infinite numbers.
        others: key with an effect that the class does not declare → its values without effect.
        without: keys without effect.
    """

    classes: list[str] = []
    aliases: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    others: dict[str, list[Any]] = {}
    without: list[str] = []


class _Shared(msgspec.Struct, frozen=True):
    """What is the same in every class; `reserved` are names of transformers' own attributes."""

    classes: list[str]
    others: dict[str, list[Any]]
    reserved: list[str]
    without: list[str]


class _Data(msgspec.Struct, frozen=True):
    transformers: str
    all: _Shared
    each: dict[str, KnownKeys]


def load_known_keys() -> tuple[Mapping[str, KnownKeys], KnownKeys]:
    """Return the keys of each class, by model_type, and the keys of a class without data."""
    data = msgspec.json.decode(_FILE.read_bytes(), type=_Data)
    shared = data.all
    others = {**{key: [None] for key in shared.reserved}, **shared.others}
    each = {
        kind: msgspec.structs.replace(
            known,
            classes=[*known.classes, *shared.classes],
            others={**others, **known.others},
            without=[*known.without, *shared.without],
        )
        for kind, known in data.each.items()
    }
    return each, KnownKeys(others=others, without=shared.without)
