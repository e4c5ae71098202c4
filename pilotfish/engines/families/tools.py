"""Tools: what a program offers a model to call.

In:  OpenAI's objects ``{"type": "function", "function": {"name", "description", "parameters"}}``.
Out: `Tools`, or a `ValueError` that says what is wrong.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AUTO, NONE, REQUIRED = "auto", "none", "required"
MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# With these a schema names properties elsewhere.
_OPENING = frozenset(
    (
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
        *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas"),
    )
)
_KEYS = frozenset(("name", "description", "parameters", "strict"))


@dataclass(frozen=True)
class Tool:
    """A function. schema: of its arguments, a JSON object."""

    name: str
    description: str
    schema: Mapping[str, Any]

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> "Tool":
        """Read OpenAI's object."""
        function = told.get("function")
        if told.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise ValueError('A tool is {"type": "function", "function": {"name": …}}')
        if unknown := set(function) - _KEYS:
            raise ValueError(f"A function has no {min(unknown)!r}")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} names no function: letters, digits, '_', '-' and '.', 64 at most"
            )
        described = function.get("description") or ""
        schema = function.get("parameters") or {"properties": {}}
        if not isinstance(described, str) or not isinstance(schema, Mapping):
            raise ValueError(f"{name}: description is a text, and parameters a JSON schema")
        if schema.get("type", "object") != "object":
            raise ValueError(f"{name}: parameters are of type object")
        return cls(name, described, {"type": "object", **schema})

    @property
    def arguments(self) -> dict[str, Any]:
        """The schema that calls are held to: what it does not name is not there, unless it says so.

        A function is not called with arguments that it does not have.
        """
        closed = {} if _OPENING.intersection(self.schema) else {"additionalProperties": False}
        return {**self.schema, **closed}

    @property
    def told(self) -> dict[str, Any]:
        """OpenAI's object, as chat templates take it."""
        function = {
            "name": self.name, "description": self.description, "parameters": dict(self.schema)
        }  # fmt: skip
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Tools:
    """What may be called in a turn. choice: "auto", "required", or the only tool's name.

    parallel: several calls may come at once.
    """

    tools: tuple[Tool, ...]
    choice: str = AUTO
    parallel: bool = True

    @classmethod
    def read(
        cls,
        tools: Sequence[Mapping[str, Any]] | None,
        choice: str | None = None,
        parallel: bool | None = None,
    ) -> "Tools | None":
        """Read a request's; None where nothing may be called."""
        if not tools:
            if choice not in (None, AUTO, NONE):
                raise ValueError(f"tool_choice {choice!r} needs tools")
            return None
        if len(tools) > MOST_TOOLS:
            raise ValueError(f"There are {len(tools)} tools; {MOST_TOOLS} is the most")
        read = tuple(Tool.read(told) for told in tools)
        names = [tool.name for tool in read]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"Two tools are named {twice[0]!r}")
        choice = choice or AUTO
        if choice == NONE:
            return None
        if choice not in (AUTO, REQUIRED, *names):
            raise ValueError(f"tool_choice {choice!r} is no tool: {', '.join(names)}")
        return cls(read, choice, parallel is not False)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if self.choice in (AUTO, REQUIRED, tool.name))

    @property
    def told(self) -> list[dict[str, Any]]:
        """All of them, as chat templates take them."""
        return [tool.told for tool in self.tools]


def arguments_of(told: object) -> Any:
    """Return a call's arguments as a JSON value; a program tells them as a text."""
    if not isinstance(told, str):
        return told
    try:
        return json.loads(told or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a call's arguments are no JSON: {error}") from None
