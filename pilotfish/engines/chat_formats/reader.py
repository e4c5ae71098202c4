"""Split a streamed turn into its thought, text and calls.

In:  the text of an answer as it arrives, with the control tokens of the outline's marks. Out:
`TurnPart`s. Text is held back while it could still become a mark. Text that does not follow the
outline (possible without a grammar) counts as plain text.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from pilotfish.engines.chat_formats.outline import SPACES, Outline

_JSON_MARKS = re.compile(r'["{}\[\]\\]')


class TurnPart(NamedTuple):
    """A part of a turn.

    call: index of the call, for kinds "call" and "arguments". id: id of the call.

    The text of a "call" is the tool's name; "arguments" parts follow with fragments of JSON.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = -1
    id: str = ""


class ToolCall(NamedTuple):
    """A call. arguments: JSON; incomplete if the answer was cut off."""

    id: str
    name: str
    arguments: str

    @property
    def complete(self) -> bool:
        """Whether the arguments are complete JSON."""
        try:
            json.loads(self.arguments)
        except (ValueError, RecursionError):
            return False
        return True


class Turn(NamedTuple):
    """A whole turn."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]

    @classmethod
    def from_parts(cls, parts: Sequence[TurnPart]) -> "Turn":
        """Assemble a turn from its parts."""
        content, reasoning = (
            "".join(part.text for part in parts if part.kind == kind)
            for kind in ("content", "reasoning")
        )
        arguments: dict[int, list[str]] = {part.call: [] for part in parts if part.kind == "call"}
        for part in parts:
            if part.kind == "arguments":
                arguments[part.call].append(part.text)
        calls = (part for part in parts if part.kind == "call")
        tool_calls = (ToolCall(part.id, part.text, "".join(arguments[part.call])) for part in calls)
        return cls(content, reasoning, tuple(tool_calls))

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, and the last one is complete: a stop string may cut it off."""
        return bool(self.calls) and self.calls[-1].complete


class TurnReader:
    """The reader of one turn. call_id: function that makes the id of a call."""

    def __init__(self, outline: Outline, call_id: Callable[[], str]) -> None:
        self._outline = outline
        self._calls = outline.calls if outline.tools else None
        self._names = frozenset(name for name, _ in outline.tools)
        self._call_id = call_id
        self._buffer = ""  # text that is not consumed yet
        self._parts: list[TurnPart] = []
        # text since the trigger, kept in case the text turns out to be no call
        self._call_text = ""
        self._call_count = 0
        self._depth, self._quoted, self._escaped = 0, False, False
        # Parser state: a function that consumes text of the buffer and returns whether the next
        # function can continue.
        self._state: Callable[[], bool] = self._at_start
        self._skip_space = False  # whether to drop leading space, which belongs to the last mark
        if outline.thought is None:
            self._state = self._in_text
        elif outline.thinking:
            self._begin_thought("")

    def push(self, text: str) -> list[TurnPart]:
        """Add text; return the parts that are now certain."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._take_parts()

    def end(self) -> list[TurnPart]:
        """End the turn; return its last parts.

        A call without the beginning of arguments is dropped.
        """
        if self._state == self._in_thought:
            self._emit("reasoning", self._buffer.rstrip())
        elif self._state in (self._at_start, self._in_text, self._in_plain_text):
            self._emit("content", self._buffer)
        self._buffer = ""
        return self._take_parts()

    def _take_parts(self) -> list[TurnPart]:
        parts, self._parts = self._parts, []
        return parts

    def _emit(self, kind: Literal["content", "reasoning", "arguments"], text: str) -> None:
        if self._skip_space:
            text = text.lstrip()
            self._skip_space = not text
        if text:
            call = self._call_count - 1 if kind == "arguments" else -1
            self._parts.append(TurnPart(kind, text, call))

    def _switch(self, state: Callable[[], bool], rest: str) -> bool:
        self._state, self._buffer = state, rest
        return True

    # Thought and plain text

    def _may_lead_to(self, mark: str) -> bool:
        """Whether the buffer starts with the mark, or may do so after more text arrives.

        Spaces may precede the mark: as in the grammar, at most `SPACES`, or any number if a call is
        required.
        """
        buffer = self._buffer
        most = len(buffer) if self._outline.called else SPACES
        begin = next(
            (index for index, character in enumerate(buffer[:most]) if character not in " \n"), most
        )
        rest = buffer[begin:]
        return rest.startswith(mark) or mark.startswith(rest)

    def _at_start(self) -> bool:
        assert self._outline.thought is not None
        begin, _ = self._outline.thought
        if self._buffer.startswith(begin):
            return self._begin_thought(self._buffer[len(begin) :])
        return not begin.startswith(self._buffer) and self._switch(self._in_text, self._buffer)

    def _begin_thought(self, rest: str) -> bool:
        self._skip_space = True
        return self._switch(self._in_thought, rest)

    def _in_thought(self) -> bool:
        assert self._outline.thought is not None
        _, end = self._outline.thought
        thought, mark, rest = self._buffer.partition(end)
        if mark:
            self._emit("reasoning", thought.rstrip())
            self._skip_space = True
            return self._switch(self._in_text, rest)
        self._buffer = self._emit_before("reasoning", end)
        return False

    def _in_text(self) -> bool:
        calls = self._calls
        if calls is None:
            return self._switch(self._in_plain_text, self._buffer)
        if not calls.anywhere:
            if not self._may_lead_to(calls.trigger):
                return self._switch(self._in_plain_text, self._buffer)
            return calls.trigger in self._buffer and self._switch(
                self._at_opening, self._buffer.lstrip()
            )
        before, mark, rest = self._buffer.partition(calls.trigger)
        if mark:
            self._emit("content", before.rstrip())
            return self._switch(self._at_opening, mark + rest)
        self._buffer = self._emit_before("content", calls.trigger)
        return False

    def _in_plain_text(self) -> bool:
        self._emit("content", self._buffer)
        self._buffer = ""
        return False

    def _emit_before(self, kind: Literal["content", "reasoning"], mark: str) -> str:
        """Emit the text that cannot belong to the mark or to space before the mark.

        Return the rest.
        """
        buffer = self._buffer
        most = min(len(buffer), len(mark) - 1)
        overlap = next((n for n in range(most, 0, -1) if mark.startswith(buffer[-n:])), 0)
        final = len(buffer[: len(buffer) - overlap].rstrip())
        self._emit(kind, buffer[:final])
        return buffer[final:]

    # Calls

    def _expect_text(self, text: str, then: Callable[[], bool]) -> bool:
        """Consume exactly this text, then switch to state `then`; return whether to go on."""
        if self._buffer.startswith(text):
            self._call_text += text
            return self._switch(then, self._buffer[len(text) :])
        return not text.startswith(self._buffer) and self._give_up()

    def _at_opening(self) -> bool:
        assert self._calls is not None
        calls = self._calls
        gap = calls.gap if self._buffer.startswith(calls.trigger + calls.gap) else ""
        return self._expect_text(calls.trigger + gap + calls.opening + calls.before, self._at_name)

    def _at_name(self) -> bool:
        assert self._calls is not None
        name, mark, rest = self._buffer.partition(self._calls.behind)
        if not mark:
            may_come = any(
                (tool_name + self._calls.behind).startswith(name) for tool_name in self._names
            )
            return not may_come and self._give_up()
        if name not in self._names:
            return self._give_up()
        self._parts.append(TurnPart("call", name, self._call_count, self._call_id()))
        self._call_count += 1
        self._call_text, self._skip_space = "", False
        self._depth, self._quoted, self._escaped = 0, False, False
        return self._switch(self._in_arguments, rest)

    def _in_arguments(self) -> bool:
        """Emit the text of a JSON object until the object ends."""
        index = 0
        while index < len(self._buffer):
            if self._escaped:
                self._escaped = False
                index += 1
                continue
            match = _JSON_MARKS.search(self._buffer, index)
            if match is None:
                break
            index = match.end()
            mark = match[0]
            if mark == "\\":
                self._escaped = self._quoted
            elif mark == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    self._emit("arguments", self._buffer[:index])
                    return self._switch(self._after_call, self._buffer[index:])
        self._emit("arguments", self._buffer)
        self._buffer = ""
        return False

    def _after_call(self) -> bool:
        """Look for the next call or the closing; anything else is plain text."""
        assert self._calls is not None
        between = self._calls.end + self._calls.between + self._calls.before
        closing = self._calls.end + self._calls.closing
        if self._buffer.startswith(between):
            return self._expect_text(between, self._at_name)
        if between.startswith(self._buffer) or closing.startswith(self._buffer):
            return False
        if self._buffer.startswith(closing):
            self._skip_space = True
            return self._switch(self._in_text, self._buffer[len(closing) :])
        return self._switch(self._in_plain_text, self._buffer)

    def _give_up(self) -> bool:
        """Treat an incomplete call as plain text."""
        text, self._call_text = self._call_text + self._buffer, ""
        return self._switch(self._in_plain_text, text)
