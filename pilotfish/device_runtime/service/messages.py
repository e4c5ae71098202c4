"""Read and check the bodies of Anthropic's ``POST /v1/messages`` and its ``count_tokens``.

In:  the bytes of a request. Out: a `MessageRequest` or a `Talk`, or a `RefusalError` that names the
field at fault. Fields beyond Anthropic's: see `openai`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec

from pilotfish.bridge import Talk
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.service.body import STRICT, BodyFields, FlatFormat, read_body
from pilotfish.device_runtime.service.field_check import IgnoredFields, RequestFields, Values
from pilotfish.device_runtime.service.messages_input import (
    MessageItem,
    TextBlock,
    conversation_of,
)
from pilotfish.device_runtime.service.openai import MESSAGES, CompletionRequest, checked_request
from pilotfish.device_runtime.service.refusal import Body, RefusalError, bad_request
from pilotfish.device_runtime.service.tokens import prompt_ids
from pilotfish.device_runtime.service.tools import (
    TOOL_NOTES,
    FunctionFields,
    ToolChoice,
    ToolFields,
    functions_of,
    read_tools,
)
from pilotfish.engines.chat_formats.tools import MOST_TOOLS, NONE, REQUIRED
from pilotfish.wire.request import MaxTokens, Request, StopTexts

_ABSENT = msgspec.Raw()
_CHOICES = {"any": REQUIRED, "none": NONE}


class _Tool(RequestFields, kw_only=True):
    """A function; or, of another type, a tool of Anthropic's own."""

    inert: ClassVar[frozenset[str]] = TOOL_NOTES | {"input_examples"}

    name: str
    input_schema: msgspec.Raw = _ABSENT
    type: str | None = None
    description: str | None = None
    strict: bool | None = None


class _ToolChoice(RequestFields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        """Refuse a choice of a tool without its name."""
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("A tool_choice has a name if, and only if, its type is tool")


class _Thinking(RequestFields):
    """Whether the model thinks first; adaptive: as it does by default.

    Thoughts have no budget of their own: they count as part of the answer. display: omitted:
    thoughts are sent empty. Thoughts that come back are not verified.
    """

    inert: ClassVar[frozenset[str]] = frozenset(("block_binding", "budget_tokens"))

    type: Literal["enabled", "adaptive", "disabled"]
    display: Literal["summarized", "omitted"] | None = None

    @property
    def wanted(self) -> bool | None:
        """Whether the model is to think first; None: its default."""
        return {"enabled": True, "adaptive": None, "disabled": False}[self.type]


class _OutputConfig(RequestFields):
    """The answer's format. Models here have no setting of effort."""

    inert: ClassVar[frozenset[str]] = frozenset(("effort",))

    format: FlatFormat | None = None


class _PromptBody(BodyFields, kw_only=True):
    """The fields of a prompt, and others that clients repeat when they count its tokens."""

    inert: ClassVar[frozenset[str]] = BodyFields.inert | {
        "diagnostics",
        "fallbacks",  # names of other models
        "inference_geo",
        "speed",
    }
    neutral: ClassVar[Values] = {
        **BodyFields.neutral,
        "container": (None,),
        "mcp_servers": (None, []),
    }

    messages: Annotated[list[MessageItem], msgspec.Meta(min_length=1, max_length=MESSAGES)]
    system: str | list[TextBlock] | None = None
    thinking: _Thinking | None = None
    tool_choice: _ToolChoice | None = None
    tools: Annotated[list[_Tool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    output_config: _OutputConfig | None = None
    output_format: FlatFormat | None = None  # an older name of output_config.format
    thread: msgspec.Raw = _ABSENT


class _MessagesBody(_PromptBody, kw_only=True):
    max_tokens: MaxTokens
    stop_sequences: StopTexts | None = None


@dataclass(frozen=True, kw_only=True)
class MessageRequest:
    """A checked request. hides_thoughts: thoughts are sent empty."""

    completion: CompletionRequest
    hides_thoughts: bool


def message_request(
    body: bytes, defaults: Request, ignored: IgnoredFields = STRICT
) -> MessageRequest:
    """Read a ``POST /v1/messages``. defaults: the service's own options."""
    fields = read_body(body, _MessagesBody, ignored)
    if fields.stop_sequences is not None:
        fields.stop = fields.stop_sequences
    format = fields.output_format
    if fields.output_config is not None and fields.output_config.format is not None:
        format = fields.output_config.format
    functions = _functions_of(fields.tools or (), ignored)
    completion = checked_request(
        fields,
        chat=True,
        prompts=[_talk_of(fields, functions.values())],
        most=fields.max_tokens,
        defaults=defaults,
        format=format,
        params={
            "": "output_config.format.schema",
            **{function.name: f"tools[{at}].input_schema" for at, function in functions.items()},
        },
    )
    thinking = fields.thinking
    return MessageRequest(
        completion=completion,
        hides_thoughts=thinking is not None and thinking.display == "omitted",
    )


def count_request(body: bytes, ignored: IgnoredFields = STRICT) -> tuple[str | None, Talk]:
    """Read a ``POST /v1/messages/count_tokens``: (the model's name, the talk)."""
    fields = read_body(body, _PromptBody, ignored)
    functions = _functions_of(fields.tools or (), ignored)
    return fields.model, _talk_of(fields, functions.values())


def count_response(device: Device, talk: Talk) -> Body:
    """Count the tokens of a talk, in the vocabulary of the last known edge."""
    return {"input_tokens": len(prompt_ids(device, talk, chat=True))}


def _talk_of(fields: _PromptBody, functions: Collection[FunctionFields]) -> Talk:
    if bytes(memoryview(fields.thread)[:4]) not in (b"", b"null"):
        raise RefusalError(
            400,
            "This service keeps no threads: send the whole conversation without thread.",
            code="thread_unsupported_request",  # a name that clients know
            param="thread",
            reason="unsupported",
        )
    thinking = None if fields.thinking is None else fields.thinking.wanted
    messages = conversation_of(fields.system, fields.messages)
    choice = fields.tool_choice
    if choice is None:
        return Talk(messages, read_tools(functions), thinking)
    named = ToolChoice(choice.name or _CHOICES.get(choice.type))
    tools = read_tools(functions, named, choice.disable_parallel_tool_use is not True)
    return Talk(messages, tools, thinking)


def _functions_of(tools: Sequence[_Tool], ignored: IgnoredFields) -> dict[int, FunctionFields]:
    """Return the functions among the tools by index; Anthropic calls their type custom."""
    functions = functions_of(
        [
            ToolFields(
                "function" if tool.type in (None, "custom") else "",
                FunctionFields(tool.name, tool.description, tool.input_schema, tool.strict),
            )
            for tool in tools
        ],
        ignored,
    )
    for at, function in functions.items():
        if not memoryview(function.parameters).nbytes:
            where = f"tools[{at}].input_schema"
            raise bad_request(where, f"{where} is missing.")
    return functions
