"""Prompts: what of a request becomes one, and how.

In: messages, a raw text, or token ids, in JSON. Out: a `Prompt` of the device's pair. What is no
prompt is refused by the name of its field.

JSON is read as what is wanted there, and no further than to where it is something else: megabytes
of empty lists would become millions of objects first, and all others would wait for that.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from pilotfish.device_runtime.bridge import Asked, Prompt
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.service.refusal import RefusalError
from pilotfish.engines.errors import TemplateError
from pilotfish.wire.errors import PromptTooLongError, TokenOutOfRangeError, UnsupportedError

_Prompt = str | list[int]
_NEUTRAL_BYTES = 64
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`( - at `[^`]*`)?", re.DOTALL)
# What a message of an earlier answer comes back with.
_NEUTRAL_MESSAGE: dict[str, tuple[object, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}
# What depends on the edge that will be met.
_OF_THE_PAIR = (PromptTooLongError, TemplateError, TokenOutOfRangeError, UnsupportedError)
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def prompt_for(device: Device, asked: Asked, *, chat: bool) -> Prompt:
    """The prompt of a request; chat: it is messages.

    While the edge's vocabulary is not known, what makes no prompt in the drafter's is left for the
    lane to read, which meets the edge.
    """
    try:
        prompt = device.prompt(asked, chat=chat)
    except _OF_THE_PAIR as error:
        if not device.acquainted:
            return Prompt.unread(asked, chat)
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
        raise RefusalError(400, "The prompt is empty.", code="invalid_value", param=param)
    return prompt


def fields_of(name: str, fields: Iterable[str]) -> type[msgspec.Struct]:
    """A JSON object with these fields and no others, whose values are not read yet."""
    absent = [(field, msgspec.Raw, msgspec.Raw()) for field in dict.fromkeys(fields)]
    return msgspec.defstruct(name, absent, forbid_unknown_fields=True)


def given(fields: msgspec.Struct, names: Iterable[str] | None = None) -> dict[str, msgspec.Raw]:
    """Those that are there; of these names, if some are given."""
    chosen = fields.__struct_fields__ if names is None else names
    values = ((name, getattr(fields, name)) for name in chosen)
    return {name: value for name, value in values if memoryview(value).nbytes}


class MessageFields(msgspec.Struct, forbid_unknown_fields=True):
    """A message as it came. ``role`` is read at once, so that "{}" a million times is not."""

    role: str
    content: msgspec.Raw = msgspec.Raw()
    name: str | None = None
    annotations: msgspec.Raw = msgspec.Raw()
    audio: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()
    refusal: msgspec.Raw = msgspec.Raw()
    tool_calls: msgspec.Raw = msgspec.Raw()


def message_of(message: MessageFields, at: int) -> dict[str, str]:
    """A message as the chat template wants it; ``at`` is its place among them."""
    where = f"messages[{at}]."
    refuse_unless_neutral(given(message, _NEUTRAL_MESSAGE), _NEUTRAL_MESSAGE, where)
    role = message.role
    if role not in _ROLES:
        raise RefusalError(
            400,
            f"{where}role must be one of {', '.join(_ROLES)}.",
            code="invalid_value",
            param=f"{where}role",
        )
    found = {"role": _ROLES[role], "content": _content(message.content, role, where)}
    if message.name is not None:
        found["name"] = message.name
    return found


class _Part(msgspec.Struct):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


def _content(value: msgspec.Raw, role: str, where: str) -> str:
    try:
        content = msgspec.json.decode(value or b"null", type=str | list[_Part] | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if bytes(memoryview(value)[:1]) == b"[":
            raise RefusalError(
                400,
                f"{where}content may have parts of type text only.",
                code="unsupported_parameter",
                param=f"{where}content",
                reason="unsupported",
            ) from None
    else:
        if isinstance(content, str):
            return content
        if isinstance(content, list):
            return "".join(part.text for part in content)
        if role == "assistant":
            return ""
    raise RefusalError(
        400,
        f"{where}content must be a text or a list of text parts.",
        code="invalid_value",
        param=f"{where}content",
    )


def prompt_of(prompt: msgspec.Raw) -> str | list[int]:
    """A raw prompt: one text, or one list of token ids; also as the only one of a list."""
    for kind in (_Prompt, tuple[_Prompt]):
        try:
            found = msgspec.json.decode(prompt, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        return found[0] if isinstance(found, tuple) else found
    raise RefusalError(
        400,
        "prompt must be one text or one list of token ids.",
        code="invalid_value",
        param="prompt",
    )


def refuse_unless_neutral(
    fields: Mapping[str, msgspec.Raw], neutral: Mapping[str, tuple[object, ...]], where: str = ""
) -> None:
    """Refuse, by its name, a field that asks for something that is not offered.

    neutral: fields that are not offered, and the values by which they ask for nothing.
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
    """Whether it is among these small values; a long one is not even read."""
    try:
        return len(memoryview(value)) <= _NEUTRAL_BYTES and msgspec.json.decode(value) in values
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def unknown(name: str) -> RefusalError:
    """The refusal of a field that nobody here knows."""
    name = name[:80]
    return RefusalError(
        400,
        f"Unrecognized request argument supplied: {name}",
        code="unknown_parameter",
        param=name,
        reason="unsupported",
    )


def unknown_name(error: Exception) -> str | None:
    """Name the unknown field that an error is about; None for another error."""
    found = _UNKNOWN.fullmatch(str(error))
    return found and found[1]
