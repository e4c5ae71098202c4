"""Read the input of ``/v1/responses``: a text, or items, which may be items of earlier answers.

In:  the input, and the messages of the conversation that it continues. Out: messages for a chat
template, as the chat route makes them, or a `RefusalError` that names the field at fault.
Successive thoughts, texts and calls of the assistant become one message.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from pilotfish.device_runtime.service.chat_messages import NO_TURN, Conversation, Message
from pilotfish.device_runtime.service.field_check import RequestFields
from pilotfish.device_runtime.service.prompts import content_of
from pilotfish.device_runtime.service.tools import arguments_text
from pilotfish.engines.chat_formats.reader import ToolCall

_ABSENT = msgspec.Raw()
_PART_NOTES = frozenset(
    ("annotations", "cache_control", "id", "logprobs", "prompt_cache_breakpoint")
)

_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id",),
    "reasoning": (),
}


class _TextPart(RequestFields):
    inert: ClassVar[frozenset[str]] = _PART_NOTES

    type: Literal["input_text", "output_text"]
    text: str


class _ThoughtPart(RequestFields):
    type: Literal["reasoning_text"]
    text: str


class InputItem(RequestFields):
    """An item with undecoded contents. Fields that mean nothing to the model are ignored."""

    inert: ClassVar[frozenset[str]] = frozenset(
        (
            "cache_control",
            "created_by",
            "encrypted_content",
            "id",
            "internal_chat_message_metadata_passthrough",
            "metadata",
            "namespace",
            "phase",
            "status",
            "summary",
        )
    )
    object_types: ClassVar[Mapping[str, Any]] = {
        "content": list[_TextPart],
        "output": list[_TextPart],
    }

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: msgspec.Raw = msgspec.Raw()
    call_id: str | None = None
    name: str | None = None
    arguments: msgspec.Raw = msgspec.Raw()
    output: msgspec.Raw = msgspec.Raw()

    def __post_init__(self) -> None:
        """Refuse an item that lacks a field of its type at once: a body may have many "{}"."""
        for name in _NEEDED[self.type]:
            if getattr(self, name) in (None, _ABSENT):
                raise ValueError(f"An item of type {self.type} needs {name}")


def conversation_of(items: "str | Sequence[InputItem]", before: Sequence[Message]) -> list[Message]:
    """Return the messages ``before``, followed by those of the input."""
    if isinstance(items, str):
        return [*before, {"role": "user", "content": items}]
    conversation = _Conversation(before)
    for at, item in enumerate(items):
        conversation.add(item, f"input[{at}].")
    return conversation.end_turn()


class _Conversation(Conversation):
    """A conversation to which items of ``input`` are added."""

    def add(self, item: InputItem, where: str) -> None:
        """Add an item to the conversation. where: its path, for errors."""
        turn = self.turn
        match item.type, item.role:
            case "reasoning", _:
                self.end_turn()
                thought = content_of(item.content, "assistant", f"{where}content", _ThoughtPart)
                self.turn = NO_TURN._replace(reasoning=thought)
            case "function_call", _:
                assert item.call_id is not None
                arguments = arguments_text(item.arguments)
                self.add_call(ToolCall(item.call_id, item.name or "", arguments))
            case "message", "assistant":
                content = content_of(item.content, "assistant", f"{where}content", _TextPart)
                if turn is None or turn.content or self.has_calls:
                    self.end_turn()
                    turn = NO_TURN
                self.turn = turn._replace(content=content)
            case "message", role:
                assert role is not None
                content = content_of(item.content, role, f"{where}content", _TextPart)
                role = "system" if role == "developer" else role
                self.end_turn().append({"role": role, "content": content})
            case _:
                assert item.call_id is not None
                output = content_of(item.output, "tool", f"{where}output", _TextPart)
                self.add_result(item.call_id, output, f"{where}call_id")
