"""Read the prompt of a request.

In: messages, a raw text, or token ids, in JSON. Out: a `Prompt` for the device, or a `RefusalError`
that names the field at fault.

JSON is decoded straight to the expected types, and decoding ends at the first value of another
type. Otherwise megabytes of empty lists would become millions of objects, and all clients would
wait.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args, get_type_hints

import msgspec

from pilotfish.base.errors import PromptTooLongError, TokenOutOfRangeError, UnsupportedError
from pilotfish.bridge import Prompt, PromptInput
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.service.refusal import RefusalError, bad_request
from pilotfish.device_runtime.service.tools import calls_of
from pilotfish.engines.engine_errors import TemplateError

_Prompt = str | list[int]
_NEUTRAL_BYTES = 64
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`( - at `[^`]*`)?", re.DOTALL)
# Fields of earlier answers that clients send back, with the values that have no effect.
_NEUTRAL_MESSAGE: dict[str, tuple[object, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "refusal": (None,),
}
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


def present_fields(fields: msgspec.Struct, names: Iterable[str]) -> dict[str, msgspec.Raw]:
    """Return the undecoded fields of these names that are present."""
    values = ((name, getattr(fields, name)) for name in names)
    return {name: value for name, value in values if memoryview(value).nbytes}


class MessageFields(msgspec.Struct, forbid_unknown_fields=True):
    """A message; most values stay undecoded. ``role`` is required, so "{}" is refused at once."""

    role: str
    content: msgspec.Raw = msgspec.Raw()
    name: str | None = None
    annotations: msgspec.Raw = msgspec.Raw()
    audio: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()
    reasoning_content: str | None = None
    refusal: msgspec.Raw = msgspec.Raw()
    tool_call_id: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


def message_of(message: MessageFields, at: int) -> dict[str, Any]:
    """Convert a message for the chat template; ``at`` is its index."""
    where = f"messages[{at}]."
    refuse_unless_neutral(present_fields(message, _NEUTRAL_MESSAGE), _NEUTRAL_MESSAGE, where)
    role = message.role
    if role not in _ROLES:
        raise bad_request(f"{where}role", f"{where}role must be one of {', '.join(_ROLES)}.")
    fields: dict[str, Any] = {
        "role": _ROLES[role], "content": content_of(message.content, role, f"{where}content")
    }  # fmt: skip
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    if calls := calls_of(message.tool_calls, message.function_call, where):
        _expect_role("assistant", role, f"{where}tool_calls")
        fields["tool_calls"] = calls
    if message.tool_call_id is not None:
        _expect_role("tool", fields["role"], f"{where}tool_call_id")
    return fields


def _expect_role(wanted: str, role: str, field: str) -> None:
    if role != wanted:
        raise bad_request(field, f"Only a message of role {wanted} may have {field}.")


class TemplateFields(msgspec.Struct, forbid_unknown_fields=True):
    """VLLM's ``chat_template_kwargs``: whether a reasoning model thinks first."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def thinking_of(
    template_fields: TemplateFields | None, effort: Effort | None = None
) -> bool | None:
    """Return whether the model is to think first; None: its default."""
    if template_fields is not None and (
        template_fields.enable_thinking,
        template_fields.thinking,
    ) != (None, None):
        return (
            template_fields.thinking
            if template_fields.enable_thinking is None
            else template_fields.enable_thinking
        )
    return None if effort is None else effort != "none"


class TextPart(msgspec.Struct):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


def content_of(value: msgspec.Raw, role: str, where: str, part: type[Any] = TextPart) -> str:
    """Read a message's content: a text, or parts of type ``part``. where: the field's path."""
    try:
        kind: Any = str | list[part] | None  # type: ignore[valid-type]  # `part` is a variable
        content = msgspec.json.decode(value or b"null", type=kind)
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


def prompt_of(prompt: msgspec.Raw) -> str | list[int]:
    """Read a raw prompt: a text, a list of token ids, or a list that holds one such prompt."""
    for kind in (_Prompt, tuple[_Prompt]):
        try:
            decoded = msgspec.json.decode(prompt, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        return decoded[0] if isinstance(decoded, tuple) else decoded
    raise bad_request("prompt", "prompt must be one text or one list of token ids.")


def refuse_unless_neutral(
    fields: Mapping[str, msgspec.Raw], neutral: Mapping[str, tuple[object, ...]], where: str = ""
) -> None:
    """Refuse unsupported fields, except values without effect.

    neutral: unsupported field → its values without effect.
    """
    for name, value in fields.items():
        if name in neutral and not _is_one_of(value, neutral[name]):
            raise RefusalError(
                400,
                f"This service does not offer {where}{name}; leave it out.",
                code="unsupported_parameter",
                param=f"{where}{name}",
                reason="unsupported",
            )


def _is_one_of(value: msgspec.Raw, values: tuple[object, ...]) -> bool:
    """Return whether a value is one of ``values``; a long value is not decoded."""
    try:
        return len(memoryview(value)) <= _NEUTRAL_BYTES and msgspec.json.decode(value) in values
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def bad_value(error: Exception, message: str) -> RefusalError:
    """Return the refusal of a bad value or an unknown field. message: msgspec's."""
    at = re.search(r"at `\$\.([\w.\[\]]+)", message)
    if (name := unknown_name(error)) is not None:
        return unknown_field(name if at is None else f"{at[1]}.{name}")
    field = at or re.search(r"field `(\w+)`", message)
    return bad_request(None if field is None else field[1], f"{message}.")


def unknown_field(name: str) -> RefusalError:
    """Return the refusal of an unknown field."""
    name = name[:80]
    return RefusalError(
        400,
        f"Unrecognized request argument supplied: {name}",
        code="unknown_parameter",
        param=name,
        reason="unsupported",
    )


def unknown_name(error: Exception) -> str | None:
    """Return the unknown field that an error names; None for any other error."""
    match = _UNKNOWN.fullmatch(str(error))
    return match and match[1]
