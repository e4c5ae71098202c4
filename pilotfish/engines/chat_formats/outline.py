"""The outline of an assistant's turn: an optional thought, then text, structured text or calls.

In:  a chat format, tools, and a grammar for the answer. Out: an `Outline`. The outline is sent over
    the link as a `Grammar`. Device and edge each write llguidance's source from the outline.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from pilotfish.base.struct_types import gathered
from pilotfish.engines.chat_formats.chat_format import Calls, ChatFormat
from pilotfish.engines.chat_formats.tools import MOST_TOOLS, REQUIRED, Tools
from pilotfish.engines.engine_errors import GrammarError
from pilotfish.engines.schemas import assertions
from pilotfish.speculation.logits_options import Grammar

KIND = "turn"  # grammar kind of a turn
_ANY = "(?s:.*)"
_SPACE, SPACES = "[ \\n]", 3
_LEADING_SPACE = f"{_SPACE}{{0,{SPACES}}}"  # optional space before a call


class Outline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The allowed content of a turn.

    thought: begin and end marks of the thought at the turn's start. thinking: whether the prompt
    ends within the thought. content: grammar of the answer; None = any text. calls: syntax of
    calls. tools: name and JSON schema of each callable tool. called: whether at least one call is
    required. several: whether several calls are allowed.
    """

    thought: tuple[str, str] | None = None
    thinking: bool = False
    content: Grammar | None = None
    calls: Calls | None = None
    tools: tuple[tuple[str, str], ...] = ()
    called: bool = False
    several: bool = False

    @classmethod
    def for_chat_format(
        cls,
        chat_format: ChatFormat,
        template: str,
        *,
        tools: Tools | None = None,
        content: Grammar | None = None,
        thinking: bool = False,
    ) -> "Outline":
        """Make the outline of a turn.

        Raise `GrammarError` if the format's calls cannot be constrained.

        thinking: whether the prompt ends within a thought.
        """
        if tools is not None and chat_format.calls is None:
            raise GrammarError(
                f"Calls of the chat format {chat_format.name} are not JSON, so they cannot be "
                "constrained."
            )
        has_thought = chat_format.thought[1] in template
        callable_tools = () if tools is None else tools.callable
        return cls(
            thought=chat_format.thought if has_thought else None,
            thinking=has_thought and thinking,
            content=content,
            calls=chat_format.calls if tools is not None else None,
            tools=tuple(
                (tool.name, assertions(json.dumps(tool.arguments))) for tool in callable_tools
            ),
            called=tools is not None and (tools.is_named or tools.choice == REQUIRED),
            several=tools is not None
            and tools.parallel
            and chat_format.parallel
            and not tools.is_named,
        )

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of this turn; None if any text is allowed."""
        if self.calls is None and self.content is None:
            return None
        if self.calls is None and self.thought is None:
            return self.content
        return Grammar(KIND, msgspec.json.encode(self).decode())

    @property
    def marks(self) -> list[str]:
        """The texts with control tokens that a `TurnReader` must see."""
        calls = self.calls
        call_marks = () if calls is None else (
            calls.trigger, calls.opening, calls.before, calls.behind, calls.end, calls.between,
            calls.closing,
        )  # fmt: skip
        return [*(self.thought or ()), *call_marks]

    def schemas(self) -> Iterator[str]:
        """Yield the JSON schemas of answer and tools."""
        if self.content is not None and self.content.kind == "json":
            yield self.content.text
        for _, schema in self.tools:
            yield schema


def read_outline(text: str) -> Outline:
    """Decode the text of a grammar of kind "turn"; raise `GrammarError` if it is malformed."""
    try:
        outline = msgspec.json.decode(text, type=gathered(Outline))
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"This text is not the outline of a turn: {error}.") from error
    if outline.content is not None and outline.content.kind == KIND:
        raise GrammarError("The content of a turn cannot be the outline of another turn.")
    if outline.calls is not None and not outline.calls.trigger:
        raise GrammarError("The calls of a turn need a trigger.")
    if (outline.tools or outline.called) and not (outline.tools and outline.calls):
        raise GrammarError("A turn with calls needs both their syntax and the tools.")
    if len(outline.tools) > MOST_TOOLS:
        raise GrammarError(
            f"A turn has {len(outline.tools)} tools, but at most {MOST_TOOLS} are allowed."
        )
    if outline.thought is not None and not all(outline.thought):
        raise GrammarError("A thought needs a begin mark and an end mark.")
    return outline


class Controls:
    """The control tokens of a vocabulary. ids: token ids by name."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        names = sorted(ids, key=len, reverse=True)  # prefer the longest match
        self._pattern = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)")

    def __contains__(self, name: str) -> bool:
        return name in self._ids

    def literal(self, text: str) -> str:
        """Write a Lark expression for exactly this text.

        Where the text has the name of a control token, the expression matches the token itself.
        """
        parts = [
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part, ensure_ascii=False)
            for part in self._pattern.split(text)
            if part
        ]
        return " ".join(parts)


def lark_rules(outline: Outline, controls: Controls) -> str:
    """Write the Lark rules of a turn; ``@content``, ``@tool0``, … refer to separate grammars.

    Plain text is a regular expression that ends where a mark is complete, so no rule depends on the
    lexer's lookahead. Plain text cannot spell the name of a mark that is a control token, because a
    reader of the text could not tell them apart.
    """
    rules = [f"GAP: /{_SPACE}{{1,{SPACES}}}/"]
    thought = forbidden_start = ""
    if outline.thought is not None:
        thought = f"(thought GAP?){'' if outline.thinking else '?'} "
        rules += _thought_rules(outline.thought, controls, is_begun=outline.thinking)
        forbidden_start = "" if outline.thinking else outline.thought[0]
    alternatives = []
    if outline.tools and outline.calls is not None:
        first, rules_of_calls = _call_rules(outline, outline.calls, controls, forbidden_start)
        alternatives.append(first)
        rules += rules_of_calls
    if not outline.called:
        alternatives.append("@content" if outline.content is not None else "WORDS?")
        rules.append(f"WORDS: {_text_terminal(outline.calls, forbidden_start)}")
    return "\n".join([f"start: {thought}({' | '.join(alternatives)})", *rules])


def _thought_rules(marks: tuple[str, str], controls: Controls, *, is_begun: bool) -> list[str]:
    """Write the rules of a thought: a single terminal if its marks are plain text."""
    begin, end = marks
    inside = f"({_terminal_without(end)})"
    if end in controls:
        opened = "" if is_begun else controls.literal(begin)
        return [f"thought: {opened} THINKING? {controls.literal(end)}", f"THINKING: {inside}"]
    closed = f"{inside} {json.dumps(end)}"
    if is_begun or begin in controls:
        opened = "" if is_begun else controls.literal(begin)
        return [f"thought: {opened} THINKING", f"THINKING: {closed}"]
    return ["thought: THINKING", f"THINKING: {json.dumps(begin)} {closed}"]


def _call_rules(
    outline: Outline, calls: Calls, controls: Controls, forbidden_start: str
) -> tuple[str, list[str]]:
    """Return the expression for all calls, and the rules that this expression uses."""
    literal = controls.literal
    each = [
        f"{literal(calls.before + name + calls.behind)} @tool{index} {literal(calls.end)}"
        for index, (name, _) in enumerate(outline.tools)
    ]
    more = f"({literal(calls.between)} call)*" if outline.several else ""
    gap = f"({literal(calls.gap)})?" if calls.gap else ""
    rules = [
        f"call: {' | '.join(each)}",
        f"calls: {gap} {literal(calls.opening)} call {more} {literal(calls.closing)}",
    ]
    words = not outline.called and outline.content is None
    if calls.trigger in controls:
        if not (words and calls.anywhere):
            return f"{literal(calls.trigger)} calls", rules
        return (
            f"BEFORE? {literal(calls.trigger)} calls",
            [*rules, f"BEFORE: {_text_terminal(calls, forbidden_start)}"],
        )
    before = ""  # no space is allowed here, since a space could cut off structured content
    if words or outline.called:
        before = (
            f"({_text_terminal(calls, forbidden_start)})"
            if words and calls.anywhere
            else f"/{_LEADING_SPACE}/"
        )
    return "TRIGGER calls", [*rules, f"TRIGGER: {before} {json.dumps(calls.trigger)}"]


def _text_terminal(calls: Calls | None, forbidden_start: str) -> str:
    """Write the terminal of plain text, which has no call in it and no thought at its start."""
    terminal = f"/{_ANY}/"
    if forbidden_start:
        terminal += f" & ~/{_escape_regex(forbidden_start)}{_ANY}/"
    if calls is not None:
        before = _ANY if calls.anywhere else _LEADING_SPACE
        terminal += f" & ~/{before}{_escape_regex(calls.trigger)}{_ANY}/"
    return terminal


def _terminal_without(text: str) -> str:
    """Write a terminal for any text that does not contain `text`."""
    return f"/{_ANY}/ & ~/{_ANY}{_escape_regex(text)}{_ANY}/"


def _escape_regex(text: str) -> str:
    """Write a regular expression that matches exactly this text."""
    return "".join(
        character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"
        for character in text
    )


def llguidance_source(
    outline: Outline, controls: Controls, plain_source: Callable[[Grammar], str]
) -> str:
    """Write llguidance's source of a grammar; `plain_source` writes the source of other kinds."""

    def part(name: str, grammar: Grammar) -> dict[str, Any]:
        source = plain_source(grammar)  # Lark, or JSON with one grammar
        single = (
            {"lark_grammar": source}
            if grammar.kind == "lark"
            else json.loads(source)["grammars"][0]
        )
        return {**single, "name": name}

    parts = [
        part(f"tool{index}", Grammar("json", schema))
        for index, (_, schema) in enumerate(outline.tools)
    ]
    if outline.content is not None and not outline.called:
        parts.append(part("content", outline.content))
    return json.dumps({"grammars": [{"lark_grammar": lark_rules(outline, controls)}, *parts]})
