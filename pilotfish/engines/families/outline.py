"""What a turn of the assistant may be: a thought, then words, an answer of a form, or calls.

In:  a family's way to write, tools, and what the answer must be. Out: an `Outline`, which is a
     `Grammar` on the wire, and on each end a source for llguidance.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pilotfish.engines.errors import GrammarError
from pilotfish.engines.families.family import Calls, Family
from pilotfish.engines.families.tools import AUTO, Tools
from pilotfish.speculation.shaping import Grammar

KIND = "turn"  # of a grammar
_ANY = "(?s:.*)"
_GAP = "GAP: /[ \\n]{1,3}/"


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
    def of(
        cls,
        family: Family,
        template: str,
        *,
        tools: Tools | None = None,
        content: Grammar | None = None,
        thinking: bool = False,
    ) -> "Outline":
        """Outline a turn of this family; `GrammarError` if it cannot call tools."""
        if tools is not None and family.calls is None:
            raise GrammarError(
                f"Calls of the family {family.name} are not JSON, and cannot be constrained."
            )
        thinks = family.thought[1] in template
        callable = () if tools is None else tools.callable
        return cls(
            thought=family.thought if thinks else None,
            thinking=thinks and thinking,
            content=content,
            calls=family.calls if tools is not None else None,
            tools=tuple((tool.name, json.dumps(tool.arguments)) for tool in callable),
            called=tools is not None and tools.choice != AUTO,
            several=tools is not None
            and tools.parallel
            and tools.choice not in {tool.name for tool in tools.tools}
            and family.calls is not None
            and family.calls.parallel,
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
    def written(self) -> list[str]:
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
    """Read a grammar's text; `GrammarError` if it is none."""
    try:
        found = msgspec.json.decode(text, type=Outline)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"This is no turn: {error}.") from error
    if found.content is not None and found.content.kind == KIND:
        raise GrammarError("A turn is not within a turn.")
    if found.calls is not None and not (found.tools and found.calls.trigger):
        raise GrammarError("A turn that may have calls names tools and a trigger.")
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


def lark(outline: Outline, controls: Controls) -> str:
    """Write the rules of a turn; ``@content`` and ``@tool0``… are grammars beside it.

    Plain text is regular: it ends where a trigger is complete, so that nothing depends on how far a
    lexer looks ahead.
    """
    rules = [_GAP]
    start = ""
    unlike = ""  # no text begins with it
    if outline.thought is not None:
        begin, _ = outline.thought
        rules.append(f"thought: {_thought(outline, controls, rules)}")
        start = "thought GAP? " if outline.thinking else "(thought GAP?)? "
        if begin not in controls and not outline.thinking:
            unlike = begin
    ways = []
    if outline.calls is not None:
        ways.append(_calls(outline, outline.calls, controls, rules, unlike))
    if not outline.called:
        ways.append("@content" if outline.content is not None else "WORDS?")
        rules.append(f"WORDS: {_words(outline.calls, controls, unlike)}")
    return "\n".join([f"start: {start}({' | '.join(ways)})", *rules])


def _thought(outline: Outline, controls: Controls, rules: list[str]) -> str:
    assert outline.thought is not None
    begin, end = outline.thought
    opened = "" if outline.thinking else controls.literal(begin)
    if end in controls:
        rules.append(f"THINKING: /{_ANY}/")
        return f"{opened} THINKING? {controls.literal(end)}"
    rules.append(f"THINKING: ({_without(end)}) {json.dumps(end)}")
    return f"{opened} THINKING"


def _calls(
    outline: Outline, calls: Calls, controls: Controls, rules: list[str], unlike: str
) -> str:
    """Write how calls begin, and the rules of what follows."""
    each = [
        f"{controls.literal(calls.before + name + calls.behind)} @tool{at} "
        f"{controls.literal(calls.end)}"
        for at, (name, _) in enumerate(outline.tools)
    ]
    rules.append(f"call: {' | '.join(each)}")
    more = f"({controls.literal(calls.between)} call)*" if outline.several else ""
    opening, closing = controls.literal(calls.opening), controls.literal(calls.closing)
    gap = f"{json.dumps(calls.gap)}?" if calls.gap else ""
    rules.append(f"calls: {gap} {opening} call {more} {closing}")
    if outline.called or outline.content is not None or not calls.anywhere:
        return f"{controls.literal(calls.trigger)} calls"
    if calls.trigger in controls:
        rules.append(f"BEFORE: {_text(unlike)}")
        return f"BEFORE? {controls.literal(calls.trigger)} calls"
    before = _without(calls.trigger) + (f" & ~/{_exactly(unlike)}{_ANY}/" if unlike else "")
    rules.append(f"BEFORE: ({before}) {json.dumps(calls.trigger)}")
    return "BEFORE calls"


def _words(calls: Calls | None, controls: Controls, unlike: str) -> str:
    """Write the terminal of a text without calls."""
    if calls is None or calls.trigger in controls:
        return _text(unlike)
    trigger = _exactly(calls.trigger)
    inside = f"~/{_ANY if calls.anywhere else ''}{trigger}{_ANY}/"
    return f"{_text(unlike)} & {inside}"


def _text(unlike: str) -> str:
    """Write a terminal of any text that does not begin so."""
    return f"/{_ANY}/ & ~/{_exactly(unlike)}{_ANY}/" if unlike else f"/{_ANY}/"


def _without(text: str) -> str:
    """Write a terminal of any text that does not contain this one."""
    return f"/{_ANY}/ & ~/{_ANY}{_exactly(text)}{_ANY}/"


def _exactly(text: str) -> str:
    """Write a regular expression of exactly this text."""
    return "".join(
        one if one.isascii() and one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text
    )


def source(outline: Outline, controls: Controls, of: Any) -> str:
    """Write the source for llguidance. of: makes that of a plain `Grammar`."""
    parts = []
    if outline.content is not None and not outline.called:
        parts.append({**_alone(of(outline.content)), "name": "content"})
    for at, (_, schema) in enumerate(outline.tools):
        parts.append({**_alone(of(Grammar("json", schema))), "name": f"tool{at}"})
    return json.dumps({"grammars": [{"lark_grammar": lark(outline, controls)}, *parts]})


def _alone(source: str) -> dict[str, Any]:
    """Return the only grammar of a source."""
    grammars = json.loads(source)["grammars"]
    found: dict[str, Any] = grammars[0]
    return found
