"""Read a request's fields about tools: ``tools``, ``tool_choice``, ``parallel_tool_calls``, and
the calls in its messages.

In: these fields. Out: `Tools`, and messages for a chat template; or a `RefusalError`.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec

from pilotfish.device_runtime.service.refusal import bad_request
from pilotfish.engines.chat_formats import Tools
from pilotfish.engines.chat_formats.tools import MOST_TOOLS

MOST_PARAMETERS = 1024 * 1024  # limit of all tools' schemas together, bytes
_Name = Annotated[str, msgspec.Meta(max_length=64)]


class FunctionFields(msgspec.Struct, forbid_unknown_fields=True):
    """A function. strict: refuse parameters that cannot be enforced completely."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    strict: bool | None = None


class ToolFields(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's tool."""

    type: Literal["function"]
    function: FunctionFields


class _FunctionName(msgspec.Struct):
    name: _Name


class NamedChoice(msgspec.Struct, forbid_unknown_fields=True):
    """A ``tool_choice`` of one function, which must be called."""

    type: Literal["function"]
    function: _FunctionName


ToolList: TypeAlias = Annotated[list[ToolFields], msgspec.Meta(max_length=MOST_TOOLS)]
Choice: TypeAlias = Literal["auto", "none", "required"] | NamedChoice


def read_tools(
    functions: Sequence[FunctionFields] | None, choice: str | None, parallel: bool | None
) -> Tools | None:
    """Return the tools that may be called; None if there are none."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description,
                "parameters": parameters,
                "strict": function.strict,
            },
        }
        for function, parameters in zip(functions or (), _parameters(functions or ()), strict=True)
    ]
    try:
        return Tools.read(tools, choice, parallel)
    except ValueError as error:
        raise bad_request("tools", f"{error}.") from None


def _parameters(functions: Sequence[FunctionFields]) -> list[Any]:
    if sum(len(memoryview(function.parameters)) for function in functions) > MOST_PARAMETERS:
        raise bad_request(
            "tools", f"The parameters of all tools have more than {MOST_PARAMETERS:,} bytes."
        )
    try:
        return [msgspec.json.decode(function.parameters) for function in functions]
    except (ValueError, RecursionError) as error:  # ValueError: also msgspec's, and UTF-8's
        raise bad_request(
            "tools", f"The parameters of a tool are not valid JSON: {error}."
        ) from None


def read_choice(choice: Choice | None) -> str | None:
    """Convert a ``tool_choice`` to the choice of `Tools`."""
    return choice.function.name if isinstance(choice, NamedChoice) else choice


class _Function(msgspec.Struct):
    """A call. arguments: a string that contains JSON, or JSON itself as in Ollama."""

    name: _Name
    arguments: msgspec.Raw = msgspec.Raw(b"null")


class _Call(msgspec.Struct):
    """A call in an assistant's message."""

    function: _Function
    id: str | None = None
    type: Literal["function"] = "function"


_Calls = Annotated[list[_Call], msgspec.Meta(max_length=MOST_TOOLS)]
_Read = TypeVar("_Read")


def calls_of(calls: msgspec.Raw, old_call: msgspec.Raw, where: str) -> list[dict[str, Any]]:
    """Read a message's calls for a chat template. old_call: a call in OpenAI's older form.

    The id of a call may be missing; `with_call_ids` adds it.
    """
    listed = _read(calls, _Calls, f"{where}tool_calls") or []
    if (call := _read(old_call, _Function, f"{where}function_call")) is not None:
        listed = [*listed, _Call(call)]
    return [
        {
            "id": entry.id,
            "type": "function",
            "function": {
                "name": entry.function.name, "arguments": arguments_text(entry.function.arguments)
            },
        }
        for entry in listed
    ]  # fmt: skip


def _read(value: msgspec.Raw, kind: "type[_Read]", where: str) -> "_Read | None":
    try:
        fields: _Read | None = msgspec.json.decode(value or b"null", type=kind | None)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(where, f"{where}: {error}.") from None
    return fields


def arguments_text(arguments: msgspec.Raw) -> str:
    """Return a call's arguments as a text, which may be invalid JSON."""
    data = bytes(arguments)
    if data in (b"", b"null"):
        return "{}"
    if data.startswith(b'"'):
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(data, type=str)
    return data.decode("utf-8", "replace")


def with_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add missing ids to calls and results; OpenAI's older forms have no ids.

    A result without an id belongs to the first call that has no result yet; if the result has a
    name, to the first such call of that name.
    """
    waiting: dict[str, str] = {}  # id → name of each call without a result
    for at, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            for number, call in enumerate(calls):
                call["id"] = call["id"] or f"c{at:04}{number:04}"  # nine letters, for Mistral
            waiting = {call["id"]: call["function"]["name"] for call in calls}
        elif message["role"] == "tool":
            if not message.get("tool_call_id"):  # "" counts as missing, as in a call
                name = message.get("name")
                call_id = next(
                    (id for id, function in waiting.items() if name in (None, function)), None
                )
                if call_id is None:
                    where = f"messages[{at}].tool_call_id"
                    raise bad_request(
                        where,
                        f"{where} is missing: it must name the call of which "
                        "this message is the result.",
                    )
                message["tool_call_id"] = call_id
            waiting.pop(message["tool_call_id"], None)
    return messages
