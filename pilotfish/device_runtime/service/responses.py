"""Read and check the bodies of OpenAI's ``POST /v1/responses``.

In:  the bytes of a request, and the conversations that may be continued. Out: a `ResponseRequest`,
or a `RefusalError` that names the field at fault. Fields beyond OpenAI's: see `openai`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec

from pilotfish.bridge import Talk
from pilotfish.device_runtime.service.body import (
    STRICT,
    BodyFields,
    FormatOfText,
    TextFormat,
    read_body,
)
from pilotfish.device_runtime.service.chat_messages import Message
from pilotfish.device_runtime.service.field_check import IgnoredFields, RequestFields, Values
from pilotfish.device_runtime.service.openai import (
    MESSAGES,
    CompletionRequest,
    Limit,
    checked_request,
    limit_of,
)
from pilotfish.device_runtime.service.prompts import Effort, thinking_of
from pilotfish.device_runtime.service.refusal import Body
from pilotfish.device_runtime.service.responses_input import InputItem, conversation_of
from pilotfish.device_runtime.service.tools import (
    TOOL_NOTES,
    FunctionFields,
    ToolChoice,
    ToolFields,
    functions_of,
    read_tools,
)
from pilotfish.engines.chat_formats.tools import MOST_TOOLS
from pilotfish.wire.request import Request

_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Note = Annotated[str, msgspec.Meta(max_length=512)]
# Parts of the answers of tools that this service does not run, so that there are none to include.
_PARTS = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",  # thoughts are not encrypted
    "web_search_call.action.sources",
    "web_search_call.results",
]


class _Tool(RequestFields, kw_only=True):
    """A function; or, of another type, a tool that some server runs itself."""

    inert: ClassVar[frozenset[str]] = TOOL_NOTES

    type: str
    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    strict: bool | None = None


class _NamedChoice(RequestFields, tag_field="type", tag="function"):
    name: _Key


class _Function(RequestFields):
    type: Literal["function"]
    name: _Key


class _AllowedTools(RequestFields, tag_field="type", tag="allowed_tools"):
    tools: Annotated[list[_Function], msgspec.Meta(min_length=1, max_length=MOST_TOOLS)]
    mode: Literal["auto", "required"] = "auto"


class _Text(RequestFields):
    neutral: ClassVar[Values] = {"verbosity": (None, "medium")}

    format: FormatOfText | None = None


class _Reasoning(RequestFields):
    """OpenAI's ``reasoning``. Thoughts are sent in full, and never with a summary."""

    inert: ClassVar[frozenset[str]] = frozenset(("context", "generate_summary", "summary"))

    effort: Effort | None = None


class _ResponsesBody(BodyFields, kw_only=True):
    inert: ClassVar[frozenset[str]] = BodyFields.inert | {
        "max_tool_calls"  # limits calls of built-in tools, and there are no such tools
    }
    neutral: ClassVar[Values] = {
        **BodyFields.neutral,
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "moderation": (None,),
        "prompt": (None,),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    }

    input: str | Annotated[list[InputItem], msgspec.Meta(min_length=1, max_length=MESSAGES)]
    include: list[_PARTS] | None = None  # ignored
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    metadata: Annotated[dict[_Key, _Note], msgspec.Meta(max_length=16)] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: _Reasoning | None = None
    store: bool | None = None
    text: _Text | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedChoice | _AllowedTools | None = None
    tools: Annotated[list[_Tool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None


@dataclass(frozen=True, kw_only=True)
class ResponseRequest:
    """A checked request.

    completion: the answer to generate. messages: the conversation without ``instructions``. echo:
    the request's fields that the response repeats.
    """

    completion: CompletionRequest
    messages: Sequence[Message]
    echo: Body
    store: bool


def response_request(
    body: bytes,
    defaults: Request,
    before: Callable[[str], Sequence[Message]],
    ignored: IgnoredFields = STRICT,
) -> ResponseRequest:
    """Read a ``POST /v1/responses``.

    defaults: the service's own options. before: returns the conversation of a response's id; that
    response is its last answer. ignored: as in `read_body`.
    """
    fields = read_body(body, _ResponsesBody, ignored)
    functions = _functions_of(fields.tools or (), ignored)
    tools = read_tools(
        functions.values(), _read_choice(fields.tool_choice), fields.parallel_tool_calls
    )
    previous = fields.previous_response_id
    messages = conversation_of(fields.input, [] if previous is None else before(previous))
    prompt_messages = messages
    if fields.instructions is not None:
        prompt_messages = [{"role": "system", "content": fields.instructions}, *messages]
    effort = None if fields.reasoning is None else fields.reasoning.effort
    wanted = checked_request(
        fields,
        chat=True,
        prompts=[Talk(prompt_messages, tools, thinking_of(effort))],
        most=limit_of("max_output_tokens", fields.max_output_tokens),
        defaults=defaults,
        format=None if fields.text is None else fields.text.format,
        params={
            "": "text.format.schema",
            **{function.name: f"tools[{at}].parameters" for at, function in functions.items()},
        },
    )
    return ResponseRequest(
        completion=wanted,
        messages=messages,
        echo=_echo(fields, [(fields.tools or [])[at] for at in functions], wanted.request),
        store=fields.store is not False,
    )


def _functions_of(tools: Sequence[_Tool], ignored: IgnoredFields) -> dict[int, FunctionFields]:
    """Return the functions among the tools by index."""
    return functions_of(
        [
            ToolFields(
                tool.type,
                FunctionFields(tool.name, tool.description, tool.parameters, tool.strict),
            )
            for tool in tools
        ],
        ignored,
    )


def _read_choice(choice: "str | _NamedChoice | _AllowedTools | None") -> ToolChoice:
    match choice:
        case _NamedChoice(name=name):
            return ToolChoice(name)
        case _AllowedTools(mode=mode, tools=tools):
            return ToolChoice(mode, {tool.name for tool in tools})
    return ToolChoice(choice)


def _echo(fields: _ResponsesBody, functions: Sequence[_Tool], request: Request) -> Body:
    text_format = fields.text and fields.text.format
    return {
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": limit_of("max_output_tokens", fields.max_output_tokens),
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": fields.reasoning and fields.reasoning.effort, "summary": None},
        "store": fields.store is not False,
        "temperature": request.temperature,
        "text": {"format": text_format or TextFormat()},
        "tool_choice": fields.tool_choice or "auto",
        "tools": functions,
        "top_logprobs": 0,
        "top_p": request.top_p,
        "truncation": "disabled",
    }
