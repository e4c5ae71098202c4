"""Read the input of ``/v1/responses``: a text, or items, which may be items of earlier answers.

In:  the input, and the messages of the conversation that it continues. Out: messages for a chat
template, as the chat route makes them, or a `RefusalError` that names the field at fault.
Successive thoughts, texts and calls of the assistant become one message.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from pilotfish.device_runtime.service.answers import message_body
from pilotfish.device_runtime.service.field_check import RequestFields
from pilotfish.device_runtime.service.prompts import content_of
from pilotfish.device_runtime.service.refusal import bad_request
from pilotfish.device_runtime.service.tools import arguments_text
from pilotfish.engines.chat_formats.reader import ToolCall, Turn

Message = Mapping[str, Any]

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
    held: ClassVar[Mapping[str, Any]] = {
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
    return conversation.full_body()


def assistant_message(turn: Turn) -> Message:
    """Return a turn's message; it lacks calls that were cut off."""
    calls = tuple(call for call in turn.calls if call.complete)
    return _message_of(turn._replace(calls=calls))


def _message_of(turn: Turn) -> Message:
    body = message_body(turn)
    del body["refusal"]
    return {**body, "content": turn.content}


class _Conversation:
    """The messages so far, and the assistant's turn that the next item may extend."""

    def __init__(self, before: Sequence[Message]) -> None:
        self._messages = [*before]
        self._called = {call["id"] for message in before for call in message.get("tool_calls", ())}
        self._turn: Turn | None = None

    def full_body(self) -> list[Message]:
        """End the turn and return the messages."""
        if self._turn is not None:
            self._messages.append(_message_of(self._turn))
            self._turn = None
        return self._messages

    def add(self, item: InputItem, where: str) -> None:
        """Add an item to the conversation. where: its path, for errors."""
        turn = self._turn
        match item.type, item.role:
            case "reasoning", _:
                self.full_body()
                thought = content_of(item.content, "assistant", f"{where}content", _ThoughtPart)
                self._turn = Turn("", thought, ())
            case "function_call", _:
                assert item.call_id is not None
                call = ToolCall(item.call_id, item.name or "", arguments_text(item.arguments))
                self._called.add(call.id)
                turn = turn or Turn("", "", ())
                self._turn = turn._replace(calls=(*turn.calls, call))
            case "message", "assistant":
                content = content_of(item.content, "assistant", f"{where}content", _TextPart)
                if turn is None or turn.content or turn.calls:
                    self.full_body()
                    turn = Turn("", "", ())
                self._turn = turn._replace(content=content)
            case "message", role:
                assert role is not None
                content = content_of(item.content, role, f"{where}content", _TextPart)
                role = "system" if role == "developer" else role
                self.full_body().append({"role": role, "content": content})
            case _:
                self._add_output(item, where)

    def _add_output(self, item: InputItem, where: str) -> None:
        if item.call_id not in self._called:
            raise bad_request(
                f"{where}call_id", f"{where}call_id belongs to no earlier function_call."
            )
        output = content_of(item.output, "tool", f"{where}output", _TextPart)
        result = {"role": "tool", "content": output, "tool_call_id": item.call_id}
        self.full_body().append(result)
