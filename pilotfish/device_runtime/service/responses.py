"""Read and check the bodies of OpenAI's ``POST /v1/responses``.

In:  the bytes of a request, and the conversations that may be continued. Out: a `ResponseRequest`,
or a `RefusalError` that names the field at fault. Fields beyond OpenAI's: see `openai`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from pilotfish.bridge import Talk
from pilotfish.device_runtime.service.body import (
    BodyFields,
    FormatOfText,
    TextFormat,
    Values,
    read_body,
)
from pilotfish.device_runtime.service.chat_messages import Message
from pilotfish.device_runtime.service.openai import (
    MESSAGES,
    CompletionRequest,
    checked_request,
)
from pilotfish.device_runtime.service.prompts import (
    Effort,
    present_fields,
    refuse_unless_neutral,
    thinking_of,
)
from pilotfish.device_runtime.service.responses_input import InputItem, conversation_of
from pilotfish.device_runtime.service.tools import FunctionFields, read_tools
from pilotfish.engines.chat_formats.tools import MOST_TOOLS
from pilotfish.wire.request import MaxTokens, Request

Body = dict[str, Any]

_NEUTRAL_TEXT: dict[str, tuple[object, ...]] = {"verbosity": (None,)}

_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Note = Annotated[str, msgspec.Meta(max_length=512)]


class _Tool(FunctionFields, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]


class _NamedChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: _Key


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    format: FormatOfText | None = None
    verbosity: msgspec.Raw = msgspec.Raw()


class _Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's ``reasoning``. Thoughts are sent in full, and never with a summary."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class _ResponsesBody(BodyFields, kw_only=True):
    inert: ClassVar[frozenset[str]] = frozenset(
        (
            "max_tool_calls",  # limits calls of built-in tools, and there are no such tools
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "user",
        )
    )
    neutral: ClassVar[Values] = {
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "moderation": (None,),
        "prompt": (None,),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    }

    input: str | Annotated[list[InputItem], msgspec.Meta(min_length=1, max_length=MESSAGES)]
    include: list[Literal["reasoning.encrypted_content"]] | None = (
        None  # ignored: thoughts are not encrypted
    )
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    metadata: Annotated[dict[_Key, _Note], msgspec.Meta(max_length=16)] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: _Reasoning | None = None
    store: bool | None = None
    text: _Text | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedChoice | None = None
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
    body: bytes, defaults: Request, before: Callable[[str], Sequence[Message]]
) -> ResponseRequest:
    """Read a ``POST /v1/responses``.

    defaults: the service's own options. before: returns the conversation of a response's id; that
    response is its last answer.
    """
    fields = read_body(body, _ResponsesBody)
    if fields.text is not None:
        refuse_unless_neutral(present_fields(fields.text, _NEUTRAL_TEXT), _NEUTRAL_TEXT, "text.")
    choice = fields.tool_choice
    named = choice.name if isinstance(choice, _NamedChoice) else choice
    tools = read_tools(fields.tools, named, fields.parallel_tool_calls)
    previous = fields.previous_response_id
    messages = conversation_of(fields.input, [] if previous is None else before(previous))
    prompt_messages = messages
    if fields.instructions is not None:
        prompt_messages = [{"role": "system", "content": fields.instructions}, *messages]
    effort = None if fields.reasoning is None else fields.reasoning.effort
    wanted = checked_request(
        fields,
        chat=True,
        prompt=Talk(prompt_messages, tools, thinking_of(None, effort)),
        most=fields.max_output_tokens,
        defaults=defaults,
        format=None if fields.text is None else fields.text.format,
        params={
            "": "text.format.schema",
            **{tool.name: f"tools[{at}].parameters" for at, tool in enumerate(fields.tools or ())},
        },
    )
    return ResponseRequest(
        completion=wanted,
        messages=messages,
        echo=_echo(fields, wanted.request),
        store=fields.store is not False,
    )


def _echo(fields: _ResponsesBody, request: Request) -> Body:
    text_format = fields.text and fields.text.format
    return {
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": fields.reasoning and fields.reasoning.effort, "summary": None},
        "store": fields.store is not False,
        "temperature": request.temperature,
        "text": {"format": text_format or TextFormat()},
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_logprobs": 0,
        "top_p": request.top_p,
        "truncation": "disabled",
    }
