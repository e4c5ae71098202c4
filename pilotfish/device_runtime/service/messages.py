"""Read and check the bodies of Anthropic's ``POST /v1/messages`` and its ``count_tokens``.

In:  the bytes of a request. Out: a `MessageRequest` or a `Talk`, or a `RefusalError` that names the
field at fault. Fields beyond Anthropic's: see `openai`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from pilotfish.bridge import Talk
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.service.body import BodyFields, FlatFormat, Values, read_body
from pilotfish.device_runtime.service.messages_input import (
    MessageItem,
    TextBlock,
    conversation_of,
)
from pilotfish.device_runtime.service.openai import MESSAGES, CompletionRequest, checked_request
from pilotfish.device_runtime.service.refusal import RefusalError
from pilotfish.device_runtime.service.tokens import prompt_ids
from pilotfish.device_runtime.service.tools import FunctionFields, read_tools
from pilotfish.engines.chat_formats import Tools
from pilotfish.engines.chat_formats.tools import MOST_TOOLS, NONE, REQUIRED
from pilotfish.wire.request import MaxTokens, Request, StopTexts

Body = dict[str, Any]

_ABSENT = msgspec.Raw()
_CHOICES = {"any": REQUIRED, "none": NONE}


class _Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A function. The undecoded fields are ignored: they say who calls it, and when."""

    name: str
    input_schema: msgspec.Raw
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    allowed_callers: msgspec.Raw = _ABSENT
    cache_control: msgspec.Raw = _ABSENT
    defer_loading: msgspec.Raw = _ABSENT
    eager_input_streaming: msgspec.Raw = _ABSENT
    input_examples: msgspec.Raw = _ABSENT


class _ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        """Refuse a choice of a tool without its name."""
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("A tool_choice has a name if, and only if, its type is tool")


class _Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the model thinks first; adaptive: as it does by default.

    budget_tokens is ignored: thoughts count as part of the answer. display: omitted: thoughts are
    sent empty. block_binding is ignored, since thoughts that come back are not verified.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None
    block_binding: msgspec.Raw = _ABSENT

    @property
    def wanted(self) -> bool | None:
        """Whether the model is to think first; None: its default."""
        return {"enabled": True, "adaptive": None, "disabled": False}[self.type]


class _OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The answer's format. The undecoded fields are ignored: models here have no such settings."""

    effort: msgspec.Raw = _ABSENT
    task_budget: msgspec.Raw = _ABSENT
    format: FlatFormat | None = None


class _PromptBody(BodyFields, kw_only=True):
    """The fields of a prompt, and others that clients repeat when they count its tokens."""

    inert: ClassVar[frozenset[str]] = frozenset(
        (
            "cache_control",
            "context_management",  # would shorten conversations that are too long
            "diagnostics",
            "fallbacks",  # names of other models
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
        )
    )
    neutral: ClassVar[Values] = {"container": (None,), "mcp_servers": (None, [])}

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


def message_request(body: bytes, defaults: Request) -> MessageRequest:
    """Read a ``POST /v1/messages``. defaults: the service's own options."""
    fields = read_body(body, _MessagesBody)
    if fields.stop_sequences is not None:
        fields.stop = fields.stop_sequences
    format = fields.output_format
    if fields.output_config is not None and fields.output_config.format is not None:
        format = fields.output_config.format
    completion = checked_request(
        fields,
        chat=True,
        prompt=_talk_of(fields),
        most=fields.max_tokens,
        defaults=defaults,
        format=format,
        params={
            "": "output_config.format.schema",
            **{
                tool.name: f"tools[{at}].input_schema" for at, tool in enumerate(fields.tools or ())
            },
        },
    )
    thinking = fields.thinking
    return MessageRequest(
        completion=completion,
        hides_thoughts=thinking is not None and thinking.display == "omitted",
    )


def count_request(body: bytes) -> tuple[str | None, Talk]:
    """Read a ``POST /v1/messages/count_tokens``: (the model's name, the talk)."""
    fields = read_body(body, _PromptBody)
    return fields.model, _talk_of(fields)


def count_response(device: Device, talk: Talk) -> Body:
    """Count the tokens of a talk, in the vocabulary of the last known edge."""
    return {"input_tokens": len(prompt_ids(device, talk, chat=True))}


def _talk_of(fields: _PromptBody) -> Talk:
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
    return Talk(messages, _tools_of(fields.tools, fields.tool_choice), thinking)


def _tools_of(tools: "Sequence[_Tool] | None", choice: _ToolChoice | None) -> Tools | None:
    functions = [
        FunctionFields(tool.name, tool.description, tool.input_schema, tool.strict)
        for tool in tools or ()
    ]
    if choice is None:
        return read_tools(functions, None, None)
    named = choice.name or _CHOICES.get(choice.type)
    return read_tools(functions, named, choice.disable_parallel_tool_use is not True)
