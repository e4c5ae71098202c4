"""Assemble the messages for a chat template from the items or blocks of a request.

A chat template has one message for each of the assistant's turns, which holds its thought, text and
calls. APIs whose requests list these one by one assemble them here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pilotfish.device_runtime.service.answers import message_body
from pilotfish.device_runtime.service.refusal import bad_request
from pilotfish.engines.chat_formats.reader import ToolCall, Turn

Message = Mapping[str, Any]
NO_TURN = Turn("", "", ())


def assistant_message(turn: Turn) -> Message:
    """Return a turn's message; it lacks calls that were cut off."""
    calls = tuple(call for call in turn.calls if call.complete)
    return _message_of(turn._replace(calls=calls))


def _message_of(turn: Turn) -> Message:
    body = message_body(turn)
    del body["refusal"]
    return {**body, "content": turn.content}


class Conversation:
    """The messages so far, and the assistant's turn that the next item may extend.

    before: the messages of the conversation that goes on. turn: None: the last message ends.
    """

    def __init__(self, before: Sequence[Message] = ()) -> None:
        self._messages = [*before]
        self._called = {call["id"] for message in before for call in message.get("tool_calls", ())}
        self.turn: Turn | None = None
        self._calls: list[ToolCall] = []  # the turn gets them when it ends

    @property
    def has_calls(self) -> bool:
        """Whether the assistant's turn has calls."""
        return bool(self._calls)

    def end_turn(self) -> list[Message]:
        """End the assistant's turn, if there is one; return the messages."""
        if self.turn is not None:
            self._messages.append(_message_of(self.turn._replace(calls=tuple(self._calls))))
            self.turn, self._calls = None, []
        return self._messages

    def add_call(self, call: ToolCall) -> None:
        """Add a call to the assistant's turn."""
        self._called.add(call.id)
        self.turn = self.turn or NO_TURN
        self._calls.append(call)

    def add_result(self, call_id: str, content: str, where: str) -> None:
        """Add the result of an earlier call. where: the path of the call's id, for errors."""
        if call_id not in self._called:
            raise bad_request(where, f"{where} belongs to no earlier call.")
        self.end_turn().append({"role": "tool", "content": content, "tool_call_id": call_id})
