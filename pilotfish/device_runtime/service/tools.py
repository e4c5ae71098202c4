"""Read a request's fields about tools: ``tools``, ``tool_choice``, ``parallel_tool_calls``, and
the calls in its messages.

In: these fields. Out: `Tools`, and messages for a chat template; or a `RefusalError`.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from pilotfish.base.struct_types import gathered
from pilotfish.device_runtime.service.field_check import IgnoredFields, RequestFields, Values
from pilotfish.device_runtime.service.refusal import bad_request
from pilotfish.engines.chat_formats import Tools
from pilotfish.engines.chat_formats.tools import MOST_TOOLS

MOST_PARAMETERS = 1024 * 1024  # limit of all tools' schemas together, bytes
_Name = Annotated[str, msgspec.Meta(max_length=64)]
# What clients write beside a tool for other servers: caches, and when to show or run the tool.
TOOL_NOTES: Final = frozenset(
    ("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "id", "metadata")
)


class FunctionFields(RequestFields):
    """A function. strict: refuse parameters that cannot be enforced completely."""

    inert: ClassVar[frozenset[str]] = TOOL_NOTES

    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    strict: bool | None = None


class ToolFields(RequestFields):
    """OpenAI's tool. A type other than "function" is a tool that this service does not offer."""

    inert: ClassVar[frozenset[str]] = TOOL_NOTES | {"custom"}
    neutral: ClassVar[Values] = {"strict": (None, False, True)}

    type: str
    function: FunctionFields | None = None


class _FunctionName(RequestFields):
    name: _Name


class NamedChoice(RequestFields, tag_field="type", tag="function"):
    """A ``tool_choice`` of one function, which must be called."""

    function: _FunctionName


class AllowedTool(RequestFields):
    """A function that may be called."""

    type: Literal["function"]
    function: _FunctionName


class _AllowedTools(RequestFields):
    tools: Annotated[list[AllowedTool], msgspec.Meta(min_length=1, max_length=MOST_TOOLS)]
    mode: Literal["auto", "required"] = "auto"


class AllowedChoice(RequestFields, tag_field="type", tag="allowed_tools"):
    """A ``tool_choice`` of some of the tools: the others may not be called."""

    allowed_tools: _AllowedTools


ToolList: TypeAlias = Annotated[list[ToolFields], msgspec.Meta(max_length=MOST_TOOLS)]
Choice: TypeAlias = Literal["auto", "none", "required"] | NamedChoice | AllowedChoice


class ToolChoice(NamedTuple):
    """Which tools a turn may call, as `Tools` has it.

    choice: "auto", "none", "required", a function's name, or None. allowed: names of the functions
    that may be called; None: all.
    """

    choice: str | None = None
    allowed: Collection[str] | None = None


NO_CHOICE: Final = ToolChoice()


def functions_of(tools: Sequence[ToolFields], ignored: IgnoredFields) -> dict[int, FunctionFields]:
    """Return the functions among the tools by index; tools of other types count as unknown."""
    functions = {}
    for at, tool in enumerate(tools):
        if tool.type != "function":
            ignored.add(f"tools[{at}]")
        elif tool.function is None:
            raise bad_request(f"tools[{at}].function", f"tools[{at}].function is missing.")
        else:
            functions[at] = tool.function
    return functions


def read_tools(
    functions: Collection[FunctionFields],
    choice: ToolChoice = NO_CHOICE,
    parallel: bool | None = None,
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
        for function, parameters in zip(functions, _parameters(functions), strict=True)
    ]
    try:
        return Tools.read(tools, choice.choice, parallel, choice.allowed)
    except ValueError as error:
        raise bad_request("tools", f"{error}.") from None


def _parameters(functions: Collection[FunctionFields]) -> list[Any]:
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


def read_choice(choice: Choice | None) -> ToolChoice:
    """Convert a ``tool_choice``."""
    match choice:
        case NamedChoice():
            return ToolChoice(choice.function.name)
        case AllowedChoice(allowed_tools=allowed):
            return ToolChoice(allowed.mode, {tool.function.name for tool in allowed.tools})
    return ToolChoice(choice)


class _Function(RequestFields):
    """A call. arguments: a string that contains JSON, or JSON itself as in Ollama."""

    name: _Name
    arguments: msgspec.Raw = msgspec.Raw(b"null")


class _Call(RequestFields):
    """A call in an assistant's message."""

    inert: ClassVar[frozenset[str]] = frozenset(
        ("cache_control", "extra_content", "index", "provider_specific_fields")
    )

    function: _Function
    id: str | None = None
    type: Literal["function"] = "function"


_Calls = Annotated[list[_Call], msgspec.Meta(max_length=MOST_TOOLS)]
# The types of the calls in a message, for `field_check`.
CALL_TYPES: Final[Mapping[str, Any]] = {"function_call": _Function, "tool_calls": list[_Call]}
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
        fields: _Read | None = msgspec.json.decode(value or b"null", type=gathered(kind) | None)
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
