"""Read what a request says of tools: ``tools``, ``tool_choice``, ``parallel_tool_calls``, and the
calls in its messages.

In: these fields. Out: `Tools`, and messages for a chat template; or a `RefusalError`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from pilotfish.device_runtime.service.refusal import RefusalError
from pilotfish.engines.families import Tools
from pilotfish.engines.families.tools import MOST_TOOLS
from pilotfish.wire.messages import MAX_GRAMMAR

_Name = Annotated[str, msgspec.Meta(max_length=64)]


class FunctionFields(msgspec.Struct, forbid_unknown_fields=True):
    """A function. ``strict`` changes nothing: arguments always are of their schema."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    strict: bool | None = None


class ToolFields(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's tool."""

    type: Literal["function"]
    function: FunctionFields


class _Named(msgspec.Struct):
    name: _Name


class NamedChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The one function to call."""

    type: Literal["function"]
    function: _Named


ToolList: TypeAlias = Annotated[list[ToolFields], msgspec.Meta(max_length=MOST_TOOLS)]
Choice: TypeAlias = Literal["auto", "none", "required"] | NamedChoice


def tools_asked(
    functions: Sequence[FunctionFields] | None, choice: str | None, parallel: bool | None
) -> Tools | None:
    """Return what may be called; None where nothing may."""
    told = [
        {
            "type": "function",
            "function": {
                "name": one.name,
                "description": one.description,
                "parameters": parameters,
            },
        }
        for one, parameters in zip(functions or (), _parameters(functions or ()), strict=True)
    ]
    try:
        return Tools.read(told, choice, parallel)
    except ValueError as error:
        raise RefusalError(400, f"{error}.", code="invalid_value", param="tools") from None


def _parameters(functions: Sequence[FunctionFields]) -> list[Any]:
    if sum(len(memoryview(one.parameters)) for one in functions) > MAX_GRAMMAR:
        raise RefusalError(
            400,
            f"The parameters of all tools have more than {MAX_GRAMMAR:,} bytes.",
            code="invalid_value",
            param="tools",
        )
    try:
        return [msgspec.json.decode(one.parameters) for one in functions]
    except (ValueError, RecursionError) as error:  # msgspec's, too; and of UTF-8
        raise RefusalError(
            400, f"The parameters of a tool are no JSON: {error}.", code="invalid_value",
            param="tools",
        ) from None  # fmt: skip


def chosen(choice: Choice | None) -> str | None:
    """Return a choice as `Tools` has it."""
    return choice.function.name if isinstance(choice, NamedChoice) else choice


class _Function(msgspec.Struct):
    name: _Name
    arguments: str


class _Call(msgspec.Struct):
    """A call in an assistant's message, as it was answered."""

    id: str
    function: _Function
    type: Literal["function"] = "function"


_Calls = Annotated[list[_Call], msgspec.Meta(max_length=MOST_TOOLS)]


def calls_of(value: msgspec.Raw, where: str) -> list[dict[str, Any]]:
    """Read the calls of a message; a template takes them so."""
    try:
        found = msgspec.json.decode(value or b"null", type=_Calls | None)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusalError(
            400,
            f"{where}tool_calls: {error}.",
            code="invalid_value",
            param=f"{where}tool_calls",
        ) from None
    return [
        {
            "id": one.id,
            "type": "function",
            "function": {"name": one.function.name, "arguments": one.function.arguments},
        }
        for one in found or ()
    ]
