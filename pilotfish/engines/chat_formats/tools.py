"""Tools: what a program offers a model to call.

In:  OpenAI's objects ``{"type": "function", "function": {"name", "description", "parameters"}}``.
Out: `Tools`, or a `ValueError` that says what is wrong.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotfish.engines.notices import NOTICES

AUTO, NONE, REQUIRED = "auto", "none", "required"
MOST_TOOLS = 128
_MOST_DEPTH = 512  # levels of a schema: half of what Python reads, whoever calls it from where
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEYS = frozenset(("name", "description", "parameters", "strict"))
# With these a schema names properties elsewhere.
_OPENING = frozenset(
    (
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
        *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if"),
        *("dependentSchemas", "dependencies", "enum", "const"),
    )
)


@dataclass(frozen=True)
class Tool:
    """A function. schema: of its arguments, a JSON object. strict: all of it must be enforced."""

    name: str
    description: str
    schema: Mapping[str, Any]
    strict: bool = False

    @classmethod
    def read(cls, value: object) -> "Tool":
        """Read OpenAI's object."""
        function = value.get("function") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(function, Mapping):
            raise ValueError('A tool is {"type": "function", "function": {"name": …}}')
        if value.get("type", "function") != "function":
            raise ValueError(f"A tool is of type function, not {value['type']!r}")
        if unknown := {*value, *function} - {"type", "function", *_KEYS}:
            raise ValueError(f"A function has no {sorted(map(str, unknown))[0]!r}")
        name, described = function.get("name"), function.get("description")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} names no function: letters, digits, '_', '-' and '.', 64 at most"
            )
        if name in (AUTO, NONE, REQUIRED):
            raise ValueError(
                f"A function cannot be named {name!r}: tool_choice means another thing"
            )
        if described is not None and not isinstance(described, str):
            raise ValueError(f"{name}: description is a text")
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise ValueError(f"{name}: strict is true or false")
        return cls(name, described or "", _schema(name, function.get("parameters")), bool(strict))

    @property
    def arguments(self) -> dict[str, Any]:
        """The schema that calls are held to: what it does not name is not there, unless it says so.

        A function is not called with arguments that it does not have.
        """
        if _OPENING.intersection(self.schema):
            return dict(self.schema)
        named = self.schema.get("properties") or {}  # null is none, as of Go's programs
        required = self.schema.get("required") or []
        if isinstance(named, Mapping) and isinstance(required, Sequence):
            unlisted = {name: True for name in required if isinstance(name, str)}
            return {
                **self.schema, "properties": {**named, **(unlisted | dict(named))},
                "additionalProperties": False,
            }  # fmt: skip
        return {**self.schema, "additionalProperties": False}

    @property
    def openai_object(self) -> dict[str, Any]:
        """OpenAI's object, as chat templates take it."""
        function = {
            "name": self.name, "description": self.description, "parameters": dict(self.schema)
        }  # fmt: skip
        return {"type": "function", "function": function}


def _schema(name: str, parameters: object) -> dict[str, Any]:
    if parameters is None:
        parameters = {"properties": {}}
    if parameters is True:  # a schema that anything fits
        parameters = {"additionalProperties": True}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{name}: parameters are a JSON schema")
    kind = parameters.get("type")
    if "object" not in (kind if isinstance(kind, list) else [kind or "object"]):
        raise ValueError(f"{name}: parameters are of type object")
    if _is_deeper(parameters, _MOST_DEPTH):
        raise ValueError(f"{name}: parameters have more than {_MOST_DEPTH} levels")
    try:
        json.dumps(parameters, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: parameters are no JSON: {error}") from None
    return {"type": "object", **parameters, **({"type": "object"} if kind != "object" else {})}


def _is_deeper(value: object, levels: int) -> bool:
    """Whether JSON has more levels than that; what holds itself has."""
    layer = [value]
    for _ in range(levels):
        if not layer:
            return False
        layer = [
            below
            for one in layer
            for below in (
                one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
            )
            if isinstance(below, Mapping | list)
        ]
    return bool(layer)


@dataclass(frozen=True)
class Tools:
    """What may be called in a turn. choice: "auto", "none", "required", or the only tool's name.

    parallel: several calls may come at once.
    """

    tools: tuple[Tool, ...]
    choice: str = AUTO
    parallel: bool = True

    @classmethod
    def read(
        cls, tools: Sequence[object] | None, choice: str | None = None, parallel: bool | None = None
    ) -> "Tools | None":
        """Read a request's; None where there are none."""
        if tools is None or len(tools) == 0:
            if choice not in (None, AUTO, NONE):
                raise ValueError(f"tool_choice {choice!r} needs tools")
            return None
        if len(tools) > MOST_TOOLS:
            raise ValueError(f"There are {len(tools)} tools; {MOST_TOOLS} is the most")
        if not isinstance(tools, Sequence) or isinstance(tools, str):
            raise ValueError("tools are a list")
        read = tuple(Tool.read(told) for told in tools)
        names = [tool.name for tool in read]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"Two tools are named {twice[0]!r}")
        choice = choice or AUTO
        if choice not in (AUTO, NONE, REQUIRED, *names):
            raise ValueError(f"tool_choice {choice!r} is no tool: {', '.join(names)}")
        return cls(read, choice, parallel is not False)

    @property
    def is_named(self) -> bool:
        """Whether the choice is a tool's name."""
        return self.choice not in (AUTO, NONE, REQUIRED)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.choice == NONE:
            return ()
        return tuple(tool for tool in self.tools if not self.is_named or tool.name == self.choice)


def arguments_of(name: str, value: object) -> Mapping[str, Any]:
    """Return the arguments of a call to this tool as a JSON object; programs tell them as a text.

    A call that was cut off comes back with half a text, in each request that goes on with its
    conversation. It has no arguments then, as at vLLM: refused, the conversation could never go on.
    """
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value or "{}")
        except (ValueError, RecursionError):
            found = None
    if isinstance(found, Mapping):
        return found
    if value is not None:
        NOTICES.warn(f"a call to {name!r} has arguments that are no JSON object: taken as none")
    return {}
