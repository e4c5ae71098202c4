"""The schema of a tool's arguments, as a program writes it and as calls are held to it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pilotfish.engines.chat_formats.tools import Tool
from pilotfish.engines.relaxation import ANYTHING, relax
from pilotfish.engines.schemas import assertions


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        # a function has no arguments that it does not name, but it has those that it requires
        ({"required": ["a"]}, {"properties": {"a": True}, "additionalProperties": False}),
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, "additionalProperties": False}),
        ({"properties": None}, {"properties": {}, "additionalProperties": False}),
        ({"type": None}, {"properties": {}, "additionalProperties": False}),
        ({"type": ["object", "null"]}, {"properties": {}, "additionalProperties": False}),
        (True, {"additionalProperties": True}),
        ({"additionalProperties": True}, {"additionalProperties": True}),
        (None, {"properties": {}, "additionalProperties": False}),
    ],
    ids=str,
)
def test_the_top_of_a_tools_schema(parameters: Any, arguments: dict[str, Any]) -> None:
    tool = Tool.read({"function": {"name": "f", "parameters": parameters}})
    info = parameters if isinstance(parameters, dict) else {}
    assert tool.arguments == {**info, "type": "object", **arguments}
    assert relax(assertions(json.dumps(tool.arguments))).text != ANYTHING


@pytest.mark.parametrize(
    "parameters",
    [{"dependencies": {"a": {"properties": {"b": {}}}}}, {"const": {"a": 1}}, {"enum": [{"a": 1}]}],
)
def test_a_schema_that_names_properties_elsewhere_is_not_closed(parameters: Any) -> None:
    tool = Tool.read({"function": {"name": "f", "parameters": parameters}})
    assert tool.arguments == {"type": "object", **parameters}


def test_a_tool_is_strict_where_it_says_so() -> None:
    for strict in (True, False, None):
        assert Tool.read({"function": {"name": "f", "strict": strict}}).strict is bool(strict)
    with pytest.raises(ValueError, match="strict must be true or false"):
        Tool.read({"function": {"name": "f", "strict": "yes"}})


def nested(levels: int) -> dict[str, Any]:
    """Write a schema of so many levels."""
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def test_a_schema_that_python_could_read_only_here_is_refused() -> None:
    """A lane reads it again, from deeper in its stack."""

    def read_below(frames: int, levels: int) -> object:
        if frames:
            return read_below(frames - 1, levels)
        tool = Tool.read({"function": {"name": "f", "parameters": nested(levels)}})
        return relax(assertions(json.dumps(tool.arguments)))

    read_below(200, 512)
    for levels in (513, 930, 5000):
        with pytest.raises(ValueError, match="more than 512 levels"):
            read_below(0, levels)
    endless: dict[str, Any] = {}
    endless["items"] = endless
    with pytest.raises(ValueError, match="more than 512 levels"):
        Tool.read({"function": {"name": "f", "parameters": endless}})
