"""Read the prompt of a request.

In: messages, a raw text, or token ids, in JSON. Out: a `Prompt` for the device, or a `RefusalError`
that names the field at fault.

JSON is decoded straight to the expected types, and decoding ends at the first value of another
type. Otherwise megabytes of empty lists would become millions of objects, and all clients would
wait.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, get_args, get_type_hints

import msgspec

from pilotfish.base.errors import PromptTooLongError, TokenOutOfRangeError, UnsupportedError
from pilotfish.base.struct_types import gathered
from pilotfish.bridge import Prompt, PromptInput
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.service.field_check import RequestFields, Values, unknown_field
from pilotfish.device_runtime.service.refusal import RefusalError, bad_request
from pilotfish.device_runtime.service.tools import CALL_TYPES, calls_of
from pilotfish.engines.engine_errors import TemplateError

PROMPTS = 256  # limit of the prompts of a request
_Prompt = str | list[int]
# A list of prompts. Decoding ends at the first prompt beyond the limit, as it does not in a `list`.
# The absent ones are UNSET, since a null is refused.
_Prompts = msgspec.defstruct(
    "Prompts",
    [
        ("p0", _Prompt),
        *((f"p{at}", _Prompt | msgspec.UnsetType, msgspec.UNSET) for at in range(1, PROMPTS)),
    ],
    array_like=True,
    forbid_unknown_fields=True,
)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`( - at `[^`]*`)?", re.DOTALL)
# Errors that depend on the edge's vocabulary.
_VOCABULARY_ERRORS = (PromptTooLongError, TemplateError, TokenOutOfRangeError, UnsupportedError)
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # OpenAI's older name of the role
}
# An assistant's message with calls may have no content, nor may a function's result.
_ROLES_WITHOUT_CONTENT = frozenset(("assistant", "tool", "function"))


def prompt_for(device: Device, prompt_input: PromptInput, *, chat: bool) -> Prompt:
    """Return the prompt of a request. chat: the input consists of messages.

    While the edge's vocabulary is unknown, a prompt may fail in the drafter's vocabulary. Such a
    prompt is returned untokenised: the lane tokenises it after greeting the edge.
    """
    try:
        prompt = device.prompt(prompt_input, chat=chat)
    except _VOCABULARY_ERRORS as error:
        if not device.knows_target:
            return Prompt.unencoded(prompt_input, chat)
        if not isinstance(error, UnsupportedError):
            raise
        raise RefusalError(
            400,
            "This model has no chat template: use /v1/completions.",
            code="no_chat_template",
            param="messages",
            reason="unsupported",
        ) from None
    if not len(prompt):
        param = "messages" if chat else "prompt"
        raise bad_request(param, "The prompt is empty.")
    return prompt


def prompts_for(
    device: Device, prompt_inputs: Sequence[PromptInput], *, chat: bool
) -> list[Prompt]:
    """Return the prompts of a request; refuse them all if one of them cannot be answered."""
    prompts = [prompt_for(device, prompt_input, chat=chat) for prompt_input in prompt_inputs]
    if len(prompts) > 1 and (longest := max(map(len, prompts))) >= device.context:
        raise PromptTooLongError(
            f"A prompt has {longest} tokens; drafter and target together accept at most "
            f"{device.context - 1}."
        )
    return prompts


class TextPart(RequestFields):
    """A part of a message's content."""

    inert: ClassVar[frozenset[str]] = frozenset(
        ("annotations", "cache_control", "id", "prompt_cache_breakpoint")
    )

    type: Literal["text"]
    text: str


class MessageFields(RequestFields):
    """A message; most values stay undecoded. ``role`` is required, so "{}" is refused at once.

    Inert and neutral are the fields of earlier answers that clients send back, and their own notes.
    """

    inert: ClassVar[frozenset[str]] = frozenset(
        (
            "cache_control",
            "created_at",
            "finish_reason",
            "id",
            "index",
            "metadata",
            "model",
            "opts",
            "provider_specific_fields",
            "reasoning_details",
            "status",
            "stop_reason",
            "timestamp",
        )
    )
    neutral: ClassVar[Values] = {
        "annotations": (None, []),
        "audio": (None,),
        "images": (None, []),
        "partial": (None, False),
        "prefix": (None, False),
        "refusal": (None, ""),
        "token_ids": (None, []),
        "type": (None, "message"),
        "weight": (None, 1),
    }
    object_types: ClassVar[Mapping[str, Any]] = {"content": list[TextPart], **CALL_TYPES}

    role: str
    content: msgspec.Raw = msgspec.Raw()
    name: str | None = None
    function_call: msgspec.Raw = msgspec.Raw()
    reasoning: str | None = None  # another name of ``reasoning_content``
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


def message_of(message: MessageFields, at: int) -> dict[str, Any]:
    """Convert a message for the chat template; ``at`` is its index."""
    where = f"messages[{at}]."
    role = message.role
    if role not in _ROLES:
        raise bad_request(f"{where}role", f"{where}role must be one of {', '.join(_ROLES)}.")
    fields: dict[str, Any] = {
        "role": _ROLES[role], "content": content_of(message.content, role, f"{where}content")
    }  # fmt: skip
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    values = {
        "name": message.name, "reasoning_content": thought, "tool_call_id": message.tool_call_id
    }  # fmt: skip
    fields |= {name: value for name, value in values.items() if value is not None}
    if calls := calls_of(message.tool_calls, message.function_call, where):
        _expect_role("assistant", role, f"{where}tool_calls")
        fields["tool_calls"] = calls
    if message.tool_call_id is not None:
        _expect_role("tool", fields["role"], f"{where}tool_call_id")
    return fields


def _expect_role(wanted: str, role: str, field: str) -> None:
    if role != wanted:
        raise bad_request(field, f"Only a message of role {wanted} may have {field}.")


class TemplateFields(RequestFields):
    """VLLM's ``chat_template_kwargs``: whether a reasoning model thinks first."""

    neutral: ClassVar[Values] = {
        "add_generation_prompt": (None, True),
        "continue_final_message": (None, False),
        "documents": (None, []),
        "tools": (None, []),
    }

    enable_thinking: bool | None = None
    thinking: bool | None = None


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def thinking_of(effort: Effort | None, *switches: bool | None) -> bool | None:
    """Return whether the model is to think first; None: its default.

    switches: values of the fields that say so directly; the first one that is set decides.
    """
    default = None if effort is None else effort != "none"
    return next((switch for switch in switches if switch is not None), default)


def content_of(value: msgspec.Raw, role: str, where: str, part: type[Any] = TextPart) -> str:
    """Read a message's content: a text, or parts of type ``part``. where: the field's path."""
    try:
        kind: Any = str | list[part] | None  # type: ignore[valid-type]  # `part` is a variable
        content = msgspec.json.decode(value or b"null", type=gathered(kind))
    except (msgspec.DecodeError, UnicodeDecodeError):
        if bytes(memoryview(value)[:1]) == b"[":
            names = " or ".join(get_args(get_type_hints(part)["type"]))
            raise RefusalError(
                400,
                f"The parts of {where} must be of type {names}.",
                code="unsupported_parameter",
                param=where,
                reason="unsupported",
            ) from None
    else:
        if isinstance(content, str):
            return content
        if isinstance(content, list):
            return "".join(text_part.text for text_part in content)
        if role in _ROLES_WITHOUT_CONTENT:
            return ""
    raise bad_request(where, f"{where} must be a text or a list of text parts.")


def prompts_of(prompts: msgspec.Raw) -> Sequence[str | list[int]]:
    """Read raw prompts: one text or list of token ids, or a list of up to `PROMPTS` of them."""
    message = "prompt must be a text, a list of token ids, or a list of such prompts."
    for kind in (_Prompt, _Prompts):
        try:
            decoded: Any = msgspec.json.decode(prompts, type=gathered(kind))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if "at most length" in str(error):
                message = f"prompt may have at most {PROMPTS} prompts."
            continue
        if kind is _Prompt:
            return [decoded]
        prompts_and_unset = msgspec.structs.astuple(decoded)
        return [prompt for prompt in prompts_and_unset if prompt is not msgspec.UNSET]
    raise bad_request("prompt", message)


def bad_value(error: Exception, message: str) -> RefusalError:
    """Return the refusal of a bad value or an unknown field. message: msgspec's."""
    at = re.search(r"at `\$\.([\w.\[\]]+)", message)
    if (name := unknown_name(error)) is not None:
        return unknown_field(name if at is None else f"{at[1]}.{name}")
    field = at or re.search(r"field `(\w+)`", message)
    return bad_request(None if field is None else field[1], f"{message}.")


def unknown_name(error: Exception) -> str | None:
    """Return the unknown field that an error names; None for any other error."""
    match = _UNKNOWN.fullmatch(str(error))
    return match and match[1]
