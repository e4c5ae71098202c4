"""Types that programs in Python have as arguments of tools, each as the argument `e` of one."""

from __future__ import annotations

import datetime as dt
import enum
import uuid
from collections import OrderedDict, deque
from collections.abc import Sequence
from decimal import Decimal
from ipaddress import IPv4Address
from pathlib import Path
from re import Pattern
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import BaseModel, Field, Json, TypeAdapter
from typing_extensions import TypedDict  # pydantic wants this one on Python 3.11


class Robot(BaseModel):
    """As `OBJECT` in `tests.support.writing`: finite texts, so that no answer is cut off."""

    class Arm(BaseModel):
        ab: Literal["ab", "ba"]
        bad: bool

    x: Arm
    dd: list[Arm] = Field(max_length=2)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(NamedTuple):
    x: int
    y: int = 0


class Film(TypedDict, total=False):
    name: str
    year: int


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, Field(max_length=4)]


class Node(BaseModel):
    value: int
    next: Node | None = None


class Closed(BaseModel, extra="forbid"):
    a: bool


class Open(BaseModel, extra="allow"):
    a: bool


TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "None": None,
    "bytes": bytes,
    "Any": Any,
    "Decimal": Decimal,
    "datetime": dt.datetime,
    "date": dt.date,
    "time": dt.time,
    "timedelta": dt.timedelta,
    "UUID": uuid.UUID,
    "UUID4": pydantic.UUID4,
    "Path": Path,
    "Pattern": Pattern[str],
    "SecretStr": pydantic.SecretStr,
    "AnyUrl": pydantic.AnyUrl,
    "HttpUrl": pydantic.HttpUrl,
    "IPv4Address": IPv4Address,
    "Base64Bytes": pydantic.Base64Bytes,
    "PositiveInt": pydantic.PositiveInt,
    "conint": Annotated[int, Field(ge=0, lt=100, multiple_of=5)],
    "confloat": Annotated[float, Field(gt=0, le=1)],
    "constr": Annotated[str, Field(min_length=1, max_length=3, pattern="^[a-z]+$")],
    "Optional": int | None,
    "Union": int | str,
    "Literal": Literal["a", 1, None],
    "Enum": Colour,
    "IntEnum": Level,
    "list": list[int],
    "conlist": Annotated[list[int], Field(min_length=1, max_length=2)],
    "tuple": tuple[int, str],
    "tuple of any length": tuple[int, ...],
    "set": set[str],
    "frozenset": frozenset[int],
    "deque": deque[int],
    "Sequence": Sequence[str],
    "dict": dict[str, int],
    "dict of literals": dict[Literal["a", "b"], int],
    "dict of numbers": dict[int, str],
    "OrderedDict": OrderedDict[str, int],
    "NamedTuple": Point,
    "TypedDict": Film,
    "tagged union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "list of models": list[Dog],
    "recursive model": Node,
    "closed model": Closed,
    "open model": Open,
    "Json": Json[Any],
    "default": Annotated[str, Field(default="x", max_length=3, description="A text.")],
}


def arguments(name: str) -> type[BaseModel]:
    """The model of a tool's arguments, as tools' frameworks make it of a function's signature."""
    return pydantic.create_model(name.replace(" ", "_"), e=(TYPES[name], ...))


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of each, as they are told to a model."""
    return {name: TypeAdapter(arguments(name)).json_schema() for name in TYPES}
