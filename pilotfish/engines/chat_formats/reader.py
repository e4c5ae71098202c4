"""Read a turn while it is written: thought, words, calls.

In:  the text of an answer, control tokens of its outline included, as it comes. Out: `TurnPart`s.
     Text is held back while it may be the beginning of something else. What is not as the outline
     says, as without a grammar, is words.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from pilotfish.engines.chat_formats.outline import SPACES, Outline

_MARKS = re.compile(r'["{}\[\]\\]')


class TurnPart(NamedTuple):
    """A part of a turn. call: of a call and its arguments, its number; id: of a call.

    The text of a call is its tool's name; its arguments follow, JSON in parts.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = -1
    id: str = ""


class ToolCall(NamedTuple):
    """A call. arguments: JSON, if the answer was not cut off."""

    id: str
    name: str
    arguments: str

    @property
    def complete(self) -> bool:
        """Whether the arguments are all there."""
        try:
            json.loads(self.arguments)
        except (ValueError, RecursionError):
            return False
        return True


class Turn(NamedTuple):
    """A turn as a whole."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]

    @classmethod
    def from_parts(cls, parts: Sequence[TurnPart]) -> "Turn":
        """Put its parts together."""
        content, reasoning = (
            "".join(one.text for one in parts if one.kind == kind)
            for kind in ("content", "reasoning")
        )
        arguments: dict[int, list[str]] = {one.call: [] for one in parts if one.kind == "call"}
        for one in parts:
            if one.kind == "arguments":
                arguments[one.call].append(one.text)
        calls = (one for one in parts if one.kind == "call")
        told = (ToolCall(one.id, one.text, "".join(arguments[one.call])) for one in calls)
        return cls(content, reasoning, tuple(told))


class TurnReader:
    """Reads one turn. call_id: makes the id of a call."""

    def __init__(self, outline: Outline, call_id: Callable[[], str]) -> None:
        self._outline = outline
        self._calls = outline.calls if outline.tools else None
        self._names = frozenset(name for name, _ in outline.tools)
        self._call_id = call_id
        self._held = ""  # not read yet
        self._parts: list[TurnPart] = []
        self._raw = ""  # of a call, until its name is known
        self._count = 0
        self._depth, self._quoted, self._escaped = 0, False, False
        # reads on; returns whether to call the next one, with what is held
        self._read: Callable[[], bool] = self._at_beginning
        self._bare = False  # white space here belongs to the mark before it
        if outline.thought is None:
            self._read = self._in_words
        elif outline.thinking:
            self._think("")

    def push(self, text: str) -> list[TurnPart]:
        """Return the parts that this text completes."""
        self._held += text
        while self._held and self._read():
            pass
        return self._taken()

    def end(self) -> list[TurnPart]:
        """Return what was held back: the turn ends here.

        A call without arguments yet is left out.
        """
        if self._read == self._in_thought:
            self._say("reasoning", self._held.rstrip())
        elif self._read in (self._at_beginning, self._in_words, self._in_plain_words):
            self._say("content", self._held)
        self._held = ""
        return self._taken()

    def _taken(self) -> list[TurnPart]:
        taken, self._parts = self._parts, []
        return taken

    def _say(self, kind: Literal["content", "reasoning", "arguments"], text: str) -> None:
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        if text:
            call = self._count - 1 if kind == "arguments" else -1
            self._parts.append(TurnPart(kind, text, call))

    def _go(self, read: Callable[[], bool], rest: str) -> bool:
        self._read, self._held = read, rest
        return True

    # Thought and words

    def _led(self, mark: str) -> bool:
        """Whether the mark comes, or may come yet, behind some space.

        As the grammar has it: more space than that begins words.
        """
        held = self._held
        most = len(held) if self._outline.called else SPACES
        begin = next((at for at, one in enumerate(held[:most]) if one not in " \n"), most)
        rest = held[begin:]
        return rest.startswith(mark) or mark.startswith(rest)

    def _at_beginning(self) -> bool:
        assert self._outline.thought is not None
        begin, _ = self._outline.thought
        if self._held.startswith(begin):
            return self._think(self._held[len(begin) :])
        return not begin.startswith(self._held) and self._go(self._in_words, self._held)

    def _think(self, rest: str) -> bool:
        self._bare = True
        return self._go(self._in_thought, rest)

    def _in_thought(self) -> bool:
        assert self._outline.thought is not None
        _, end = self._outline.thought
        thought, found, rest = self._held.partition(end)
        if found:
            self._say("reasoning", thought.rstrip())
            self._bare = True
            return self._go(self._in_words, rest)
        self._held = self._said_before("reasoning", end)
        return False

    def _in_words(self) -> bool:
        calls = self._calls
        if calls is None:
            return self._go(self._in_plain_words, self._held)
        if not calls.anywhere:
            if not self._led(calls.trigger):
                return self._go(self._in_plain_words, self._held)
            return calls.trigger in self._held and self._go(self._at_opening, self._held.lstrip())
        before, found, rest = self._held.partition(calls.trigger)
        if found:
            self._say("content", before.rstrip())
            return self._go(self._at_opening, found + rest)
        self._held = self._said_before("content", calls.trigger)
        return False

    def _in_plain_words(self) -> bool:
        self._say("content", self._held)
        self._held = ""
        return False

    def _said_before(self, kind: Literal["content", "reasoning"], mark: str) -> str:
        """Tell what cannot be part of the mark, or white space before it; returns the rest."""
        held = self._held
        most = min(len(held), len(mark) - 1)
        overlap = next((n for n in range(most, 0, -1) if mark.startswith(held[-n:])), 0)
        sure = len(held[: len(held) - overlap].rstrip())
        self._say(kind, held[:sure])
        return held[sure:]

    # Calls

    def _literally(self, text: str, then: Callable[[], bool]) -> bool:
        """Read exactly this text; returns whether to go on."""
        if self._held.startswith(text):
            self._raw += text
            return self._go(then, self._held[len(text) :])
        return not text.startswith(self._held) and self._give_up()

    def _at_opening(self) -> bool:
        assert self._calls is not None
        calls = self._calls
        gap = calls.gap if self._held.startswith(calls.trigger + calls.gap) else ""
        return self._literally(calls.trigger + gap + calls.opening + calls.before, self._at_name)

    def _at_name(self) -> bool:
        assert self._calls is not None
        name, found, rest = self._held.partition(self._calls.behind)
        if not found:
            may_come = any((one + self._calls.behind).startswith(name) for one in self._names)
            return not may_come and self._give_up()
        if name not in self._names:
            return self._give_up()
        self._parts.append(TurnPart("call", name, self._count, self._call_id()))
        self._count += 1
        self._raw, self._bare = "", False
        self._depth, self._quoted, self._escaped = 0, False, False
        return self._go(self._in_arguments, rest)

    def _in_arguments(self) -> bool:
        """Read a JSON object to its end."""
        at = 0
        while at < len(self._held):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = _MARKS.search(self._held, at)
            if found is None:
                break
            at = found.end()
            mark = found[0]
            if mark == "\\":
                self._escaped = self._quoted
            elif mark == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    self._say("arguments", self._held[:at])
                    return self._go(self._behind_call, self._held[at:])
        self._say("arguments", self._held)
        self._held = ""
        return False

    def _behind_call(self) -> bool:
        """Read on to the next call; what else there is belongs to no call."""
        assert self._calls is not None
        between = self._calls.end + self._calls.between + self._calls.before
        closing = self._calls.end + self._calls.closing
        if self._held.startswith(between):
            return self._literally(between, self._at_name)
        if between.startswith(self._held) or closing.startswith(self._held):
            return False
        if self._held.startswith(closing):
            self._bare = True
            return self._go(self._in_words, self._held[len(closing) :])
        return self._go(self._in_plain_words, self._held)

    def _give_up(self) -> bool:
        """Take what looked like a call for words."""
        text, self._raw = self._raw + self._held, ""
        return self._go(self._in_plain_words, text)
