"""What a turn of the assistant may be: a thought, then words, an answer of a form, or calls.

In:  a family's way to write, tools, and what the answer must be. Out: an `Outline`, which is a
     `Grammar` on the wire, and on each end a source for llguidance.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from pilotfish.engines.chat_formats.chat_format import Calls, ChatFormat
from pilotfish.engines.chat_formats.tools import MOST_TOOLS, REQUIRED, Tools
from pilotfish.engines.engine_errors import GrammarError
from pilotfish.engines.schemas import assertions
from pilotfish.speculation.logits_options import Grammar

KIND = "turn"  # of a grammar
_ANY = "(?s:.*)"
_SPACE, SPACES = "[ \\n]", 3
_LEAD = f"{_SPACE}{{0,{SPACES}}}"  # may stand before a call


class Outline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a turn may be.

    thought: what begins and ends a thought, which comes first. thinking: it has begun in the
    prompt. content: what the answer must be; None: any text. calls, tools: how calls are written,
    and the name and the schema of each tool that may be called. called: something must be.
    several: more than one may be.
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
        family: ChatFormat,
        template: str,
        *,
        tools: Tools | None = None,
        content: Grammar | None = None,
        thinking: bool = False,
    ) -> "Outline":
        """Outline a turn of this family; `GrammarError` if it cannot call tools.

        thinking: the prompt ends within a thought.
        """
        if tools is not None and family.calls is None:
            raise GrammarError(
                f"Calls of the family {family.name} are not JSON, and cannot be constrained."
            )
        thinks = family.thought[1] in template
        offered = () if tools is None else tools.callable
        return cls(
            thought=family.thought if thinks else None,
            thinking=thinks and thinking,
            content=content,
            calls=family.calls if tools is not None else None,
            tools=tuple((tool.name, assertions(json.dumps(tool.arguments))) for tool in offered),
            called=tools is not None and (tools.is_named or tools.choice == REQUIRED),
            several=tools is not None and tools.parallel and family.parallel and not tools.is_named,
        )

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of such a turn; None if it may be any text."""
        if self.calls is None and self.content is None:
            return None
        if self.calls is None and self.thought is None:
            return self.content
        return Grammar(KIND, msgspec.json.encode(self).decode())

    @property
    def marks(self) -> list[str]:
        """The texts of which a reader must see the control tokens."""
        calls = self.calls
        told = () if calls is None else (calls.trigger, calls.opening, calls.before, calls.behind,
                                         calls.end, calls.between, calls.closing)  # fmt: skip
        return [*(self.thought or ()), *told]

    def schemas(self) -> Iterator[str]:
        """The JSON schemas within it."""
        if self.content is not None and self.content.kind == "json":
            yield self.content.text
        for _, schema in self.tools:
            yield schema


def read_outline(text: str) -> Outline:
    """Read the text of a grammar of kind "turn"; raises `GrammarError` for a malformed one."""
    try:
        found = msgspec.json.decode(text, type=Outline)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"This is no turn: {error}.") from error
    if found.content is not None and found.content.kind == KIND:
        raise GrammarError("A turn is not within a turn.")
    if found.calls is not None and not found.calls.trigger:
        raise GrammarError("Calls of a turn begin with a trigger.")
    if (found.tools or found.called) and not (found.tools and found.calls):
        raise GrammarError("A turn that may have calls says how they are written, and of what.")
    if len(found.tools) > MOST_TOOLS:
        raise GrammarError(f"A turn has {len(found.tools)} tools; {MOST_TOOLS} is the most.")
    if found.thought is not None and not all(found.thought):
        raise GrammarError("A thought begins and ends with some text.")
    return found


class Controls:
    """The control tokens of a vocabulary. ids: by name."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        names = sorted(ids, key=len, reverse=True)  # the longer of two matches
        self._written = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)")

    def __contains__(self, name: str) -> bool:
        return name in self._ids

    def literal(self, text: str) -> str:
        """Write a rule's part of exactly this text; control tokens in it are those."""
        parts = [
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part, ensure_ascii=False)
            for part in self._written.split(text)
            if part
        ]
        return " ".join(parts)


def lark_rules(outline: Outline, controls: Controls) -> str:
    """Write the rules of a turn; ``@content`` and ``@tool0``… are grammars beside it.

    Plain text is regular: it ends where a mark is complete, so that nothing depends on how far a
    lexer looks ahead. It spells no mark that is a control token either, for a reader sees text.
    """
    rules = [f"GAP: /{_SPACE}{{1,{SPACES}}}/"]
    thought = unlike = ""
    if outline.thought is not None:
        thought = f"(thought GAP?){'' if outline.thinking else '?'} "
        rules += _thought(outline.thought, controls, begun=outline.thinking)
        unlike = "" if outline.thinking else outline.thought[0]
    ways = []
    if outline.tools and outline.calls is not None:
        first, more = _calls(outline, outline.calls, controls, unlike)
        ways.append(first)
        rules += more
    if not outline.called:
        ways.append("@content" if outline.content is not None else "WORDS?")
        rules.append(f"WORDS: {_words(outline.calls, unlike)}")
    return "\n".join([f"start: {thought}({' | '.join(ways)})", *rules])


def _thought(marks: tuple[str, str], controls: Controls, *, begun: bool) -> list[str]:
    """Write the rules of a thought, one terminal where its marks are text."""
    begin, end = marks
    inside = f"({_without(end)})"
    if end in controls:
        opened = "" if begun else controls.literal(begin)
        return [f"thought: {opened} THINKING? {controls.literal(end)}", f"THINKING: {inside}"]
    closed = f"{inside} {json.dumps(end)}"
    if begun or begin in controls:
        opened = "" if begun else controls.literal(begin)
        return [f"thought: {opened} THINKING", f"THINKING: {closed}"]
    return ["thought: THINKING", f"THINKING: {json.dumps(begin)} {closed}"]


def _calls(
    outline: Outline, calls: Calls, controls: Controls, unlike: str
) -> tuple[str, list[str]]:
    """Write how calls begin, and the rules of it and of what follows."""
    literal = controls.literal
    each = [
        f"{literal(calls.before + name + calls.behind)} @tool{at} {literal(calls.end)}"
        for at, (name, _) in enumerate(outline.tools)
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
            [*rules, f"BEFORE: {_words(calls, unlike)}"],
        )
    before = ""  # where the content is of a form, a space must not lead away from it
    if words or outline.called:
        before = f"({_words(calls, unlike)})" if words and calls.anywhere else f"/{_LEAD}/"
    return "TRIGGER calls", [*rules, f"TRIGGER: {before} {json.dumps(calls.trigger)}"]


def _words(calls: Calls | None, unlike: str) -> str:
    """Write the terminal of a text without calls, which does not begin with a thought either."""
    terminal = f"/{_ANY}/"
    if unlike:
        terminal += f" & ~/{_exactly(unlike)}{_ANY}/"
    if calls is not None:
        before = _ANY if calls.anywhere else _LEAD
        terminal += f" & ~/{before}{_exactly(calls.trigger)}{_ANY}/"
    return terminal


def _without(text: str) -> str:
    """Write a terminal of any text that does not contain this one."""
    return f"/{_ANY}/ & ~/{_ANY}{_exactly(text)}{_ANY}/"


def _exactly(text: str) -> str:
    """Write a regular expression of exactly this text."""
    return "".join(
        one if one.isascii() and one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text
    )


def llguidance_source(outline: Outline, controls: Controls, of: Callable[[Grammar], str]) -> str:
    """Write the source for llguidance. of: makes that of a plain `Grammar`."""

    def part(name: str, grammar: Grammar) -> dict[str, Any]:
        told = of(grammar)  # Lark, or an object with one grammar
        alone = (
            {"lark_grammar": told} if grammar.kind == "lark" else json.loads(told)["grammars"][0]
        )
        return {**alone, "name": name}

    parts = [
        part(f"tool{at}", Grammar("json", schema)) for at, (_, schema) in enumerate(outline.tools)
    ]
    if outline.content is not None and not outline.called:
        parts.append(part("content", outline.content))
    return json.dumps({"grammars": [{"lark_grammar": lark_rules(outline, controls)}, *parts]})
