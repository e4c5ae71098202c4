"""Tools: functions that a program offers to a model.

In:  OpenAI's objects ``{"type": "function", "function": {"name", "description", "parameters"}}``.
Out: `Tools`, or a `ValueError` that names the problem.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotfish.engines.notices import NOTICES

AUTO, NONE, REQUIRED = "auto", "none", "required"
MOST_TOOLS = 128
_MOST_LEVELS = (
    # maximum nesting (levels): half of Python's recursion limit, so that any code can read the
    # schema
    512
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEYS = frozenset(("name", "description", "parameters", "strict"))
# Keywords by which a schema can allow properties that it does not list.
_OPEN_KEYWORDS = frozenset(
    (
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
        *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if"),
        *("dependentSchemas", "dependencies", "enum", "const"),
    )
)


@dataclass(frozen=True)
class Tool:
    """A function.

    schema: JSON schema of the arguments. strict: whether all of it must be enforced.
    """

    name: str
    description: str
    schema: Mapping[str, Any]
    strict: bool = False

    @classmethod
    def read(cls, value: object) -> "Tool":
        """Read a tool from OpenAI's object."""
        function = value.get("function") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(function, Mapping):
            raise ValueError('A tool is {"type": "function", "function": {"name": …}}')
        if value.get("type", "function") != "function":
            raise ValueError(f"A tool must be of type function, not {value['type']!r}")
        if unknown := {*value, *function} - {"type", "function", *_KEYS}:
            raise ValueError(f"A function has the unknown field {sorted(map(str, unknown))[0]!r}")
        name, description = function.get("name"), function.get("description")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot be the name of a function: a name has 1 to 64 letters, "
                "digits, '_', '-' and '.'"
            )
        if name in (AUTO, NONE, REQUIRED):
            raise ValueError(
                f"A function cannot be named {name!r}: this word has a meaning in tool_choice"
            )
        if description is not None and not isinstance(description, str):
            raise ValueError(f"{name}: description must be a text")
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise ValueError(f"{name}: strict must be true or false")
        return cls(
            name, description or "", _parse_schema(name, function.get("parameters")), bool(strict)
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """The schema for calls, in which properties that the tool does not list are forbidden.

        JSON Schema allows such properties by default, and the function would not accept them. If
        the tool's schema states a rule for them, that rule stays.
        """
        if _OPEN_KEYWORDS.intersection(self.schema):
            return dict(self.schema)
        properties = self.schema.get("properties") or {}  # Go programs send null if there are none
        required = self.schema.get("required") or []
        if isinstance(properties, Mapping) and isinstance(required, Sequence):
            unlisted = {name: True for name in required if isinstance(name, str)}
            return {
                **self.schema, "properties": {**properties, **(unlisted | dict(properties))},
                "additionalProperties": False,
            }  # fmt: skip
        return {**self.schema, "additionalProperties": False}

    @property
    def openai_object(self) -> dict[str, Any]:
        """OpenAI's object, for chat templates."""
        function = {
            "name": self.name, "description": self.description, "parameters": dict(self.schema)
        }  # fmt: skip
        return {"type": "function", "function": function}


def _parse_schema(name: str, parameters: object) -> dict[str, Any]:
    if parameters is None:
        parameters = {"properties": {}}
    if parameters is True:  # the schema `true` allows anything
        parameters = {"additionalProperties": True}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{name}: parameters must be a JSON schema")
    kind = parameters.get("type")
    if "object" not in (kind if isinstance(kind, list) else [kind or "object"]):
        raise ValueError(f"{name}: parameters must be of type object")
    if _is_deeper(parameters, _MOST_LEVELS):
        raise ValueError(f"{name}: parameters have more than {_MOST_LEVELS} levels")
    try:
        json.dumps(parameters, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: parameters are not valid JSON: {error}") from None
    return {"type": "object", **parameters, **({"type": "object"} if kind != "object" else {})}


def _is_deeper(value: object, levels: int) -> bool:
    """Whether a JSON value is nested more than `levels` deep, or contains itself."""
    layer = [value]
    for _ in range(levels):
        if not layer:
            return False
        layer = [
            inner
            for item in layer
            for inner in (
                item.values()
                if isinstance(item, Mapping)
                else item
                if isinstance(item, list)
                else ()
            )
            if isinstance(inner, Mapping | list)
        ]
    return bool(layer)


@dataclass(frozen=True)
class Tools:
    """The tools of a turn. choice: "auto", "none", "required", or the name of the tool to call.

    parallel: whether a turn may have several calls. allowed: names of the tools that may be called;
    None: all. The others are in the prompt, too, so that its cached prefix stays valid.
    """

    tools: tuple[Tool, ...]
    choice: str = AUTO
    parallel: bool = True
    allowed: frozenset[str] | None = None

    @classmethod
    def read(
        cls,
        tools: Sequence[object] | None,
        choice: str | None = None,
        parallel: bool | None = None,
        allowed: Collection[str] | None = None,
    ) -> "Tools | None":
        """Read the tools of a request; None if it has none."""
        if tools is not None and (not isinstance(tools, Sequence) or isinstance(tools, str)):
            raise ValueError("tools must be a list")
        if tools is None or len(tools) == 0:
            if choice not in (None, AUTO, NONE) or allowed:
                raise ValueError(f"tool_choice {choice!r} needs tools")
            return None
        if len(tools) > MOST_TOOLS:
            raise ValueError(f"There are {len(tools)} tools, but at most {MOST_TOOLS} are allowed")
        parsed = tuple(Tool.read(item) for item in tools)
        names = [tool.name for tool in parsed]
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"Two tools are named {duplicates[0]!r}")
        choice = choice or AUTO
        named = [name for name in (choice, *(allowed or ())) if name not in (AUTO, NONE, REQUIRED)]
        if missing := [name for name in named if name not in names]:
            raise ValueError(
                f"tool_choice {missing[0]!r} is not the name of a tool; the tools are "
                f"{', '.join(names)}"
            )
        only = None if allowed is None else frozenset(allowed)
        return cls(parsed, choice, parallel is not False, only)

    @property
    def is_named(self) -> bool:
        """Whether `choice` names a tool."""
        return self.choice not in (AUTO, NONE, REQUIRED)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.choice == NONE:
            return ()
        allowed = {self.choice} if self.is_named else self.allowed
        return tuple(tool for tool in self.tools if allowed is None or tool.name in allowed)


def arguments_of(name: str, value: object) -> Mapping[str, Any]:
    """Return the arguments of a call as a JSON object; programs may send them as JSON text.

    If a call was cut off, its arguments are incomplete JSON in every later request of the
    conversation. They are then replaced by {}, as in vLLM: an error would make the conversation
    unusable.
    """
    arguments = value
    if isinstance(value, str):
        try:
            arguments = json.loads(value or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if isinstance(arguments, Mapping):
        return arguments
    if value is not None:
        NOTICES.warn(
            f"a call to {name!r} has arguments that are not a JSON object: they are "
            f"replaced by {{}}"
        )
    return {}
