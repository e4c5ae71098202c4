"""Prompts: what of a request becomes one, and how.

In: messages, a raw text, or token ids, as JSON has them. Out: a `Prompt` of the device's pair. What
is no prompt is refused by the name of its field.
"""

from collections.abc import Mapping
from typing import Any, cast

from device_runtime.bridge import Asked, Prompt
from device_runtime.device import Device
from device_runtime.service.refusal import RefusalError
from engines.errors import TemplateError
from wire.errors import TokenOutOfRangeError, UnsupportedError

# What a message of an earlier answer comes back with.
_NEUTRAL_MESSAGE: dict[str, tuple[object, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def prompt_for(device: Device, asked: Asked, *, chat: bool) -> Prompt:
    """The prompt of a request; chat: it is messages.

    While the edge's vocabulary is not known, what makes no prompt in the drafter's is left for the
    lane to read, which meets the edge.
    """
    try:
        prompt = device.prompt(asked, chat=chat)
    except (TemplateError, TokenOutOfRangeError, UnsupportedError) as error:
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


def message_of(message: dict[str, Any], at: int) -> dict[str, str]:
    """A message as the chat template wants it; ``at`` is its place among them."""
    where = f"messages[{at}]."
    refuse_unless_neutral(message, _NEUTRAL_MESSAGE, where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RefusalError(
            400,
            f"{where}role must be one of {', '.join(_ROLES)}.",
            code="invalid_value",
            param=f"{where}role",
        )
    for name in message.keys() - {"role", "content", "name"} - _NEUTRAL_MESSAGE.keys():
        raise unknown(f"{where}{name}")
    found = {"role": _ROLES[role], "content": _content(message.get("content"), role, where)}
    speaker = message.get("name")
    if speaker is not None:
        if not isinstance(speaker, str):
            raise RefusalError(400, f"{where}name must be a text.", param=f"{where}name")
        found["name"] = speaker
    return found


def _content(content: object, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise RefusalError(
            400,
            f"{where}content must be a text or a list of text parts.",
            code="invalid_value",
            param=f"{where}content",
        )
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RefusalError(
                400,
                f"{where}content may have parts of type text only.",
                code="unsupported_parameter",
                param=f"{where}content",
                reason="unsupported",
            )
        texts.append(text)
    return "".join(texts)


def prompt_of(prompt: object) -> "str | list[int]":
    """A raw prompt: one text, or one list of token ids; also as the only one of a list."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return cast(list[int], prompt)
    raise RefusalError(
        400,
        "prompt must be one text or one list of token ids.",
        code="invalid_value",
        param="prompt",
    )


def refuse_unless_neutral(
    fields: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]], where: str = ""
) -> None:
    """Refuse, by its name, a field that asks for something that is not offered.

    neutral: fields that are not offered, and the values by which they ask for nothing.
    """
    for name, value in fields.items():
        if name in neutral and value not in neutral[name]:
            raise RefusalError(
                400,
                f"This service does not offer {where}{name}; leave it out.",
                code="unsupported_parameter",
                param=f"{where}{name}",
                reason="unsupported",
            )


def unknown(name: str) -> RefusalError:
    """The refusal of a field that nobody here knows."""
    return RefusalError(
        400,
        f"Unrecognized request argument supplied: {name[:80]}",
        code="unknown_parameter",
        param=name,
        reason="unsupported",
    )
