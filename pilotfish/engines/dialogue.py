"""Encode messages as a prompt in which no message can write a control token.

A rendered chat template is one text, in which "<|im_end|>" may be the template's own control token,
or text that a user typed to end the turn and begin another under a false role. `Dialogue.ids`
guarantees: control tokens come from the template alone. What a message says is text, and becomes
the tokens of that text. Where no message has written one, the ids are those of the rendered text,
and so of transformers' `apply_chat_template`.

Templates trim, cut and search messages, so the rendered text alone does not show which is which.
Therefore the template is rendered a second time with the messages *blunted*: every character that a
control token is written with is replaced. Both texts must have the same control tokens. If not, the
messages' control tokens are *hidden*: written with characters that stand for others, and turned
back once the text has been split at the template's own. If they still differ, as with a template
that makes "<|im_end|>" of "<|IM_END|>", all characters of control tokens are hidden.

Control tokens are those that the tokenizer calls special. Others, such as Qwen 3's <think>, are
text that has a token of its own, wherever it stands. All messages are treated alike, the
assistant's as well, since all come from the client. Names are not text: names of fields, and the
values of "role" and of a part's "type", which templates compare, and write where a control token
stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pilotfish.engines.chat import ChatTemplate
from pilotfish.engines.engine_errors import TemplateError, TextTooLongError
from pilotfish.engines.tokenizer import Tokenizer

_NAMES = frozenset(("role", "type"))
_THINKING = ("enable_thinking", "thinking")  # as templates name it
_BLUNT = ".-~*+=,;:!?"
_PRIVATE = range(0xE000, 0xF900)  # characters without a meaning of their own

# White space by Unicode, as for the tokenizers; Python's own includes \x1f.
_WHITE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_BLUNT_GROWTH = 4  # a blunted text may have so many times the tokens


class _TemplateInput(NamedTuple):
    """What a template is rendered with; all text in messages and tools is a client's."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    settings: Mapping[str, bool]

    def map_text(self, change: Callable[[str], str]) -> _TemplateInput:
        """Return the same with all text changed."""
        return self._replace(messages=_said(self.messages, change), tools=_said(self.tools, change))

    def characters(self) -> set[str]:
        """Collect all characters."""
        used: set[str] = set()

        def noted(text: str) -> str:
            used.update(text)
            return text

        self.map_text(noted)
        return used


class Dialogue:
    """Encodes messages by a chat template and a tokenizer. Thread-safe."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._tokens = tokenizer.special_tokens
        self._controls = {token.content: id for id, token in self._tokens.items()}
        written = sorted(self._controls, key=len, reverse=True)  # the longer of two matches
        self._written = re.compile("|".join(map(re.escape, written)) or r"(?!)")
        self._signs = sorted(set().union(*map(_signs, written)))
        self._blunt = next((sign for sign in _BLUNT if sign not in "".join(written)), "\ufffd")

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        most: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
    ) -> list[int]:
        """Encode a prompt of these messages, ready for the assistant's answer.

        tools: what the model is told that it may call; they are treated like messages. thinking:
        whether a model that can does so first; None: as it likes. most: as in `Tokenizer.encode`.
        Raises `TemplateError`, `TextTooLongError`, `ArtifactError`.
        """
        settings = {} if thinking is None else dict.fromkeys(_THINKING, thinking)
        told = _TemplateInput(messages, tools, settings)
        plain = self._rendered(told)
        ids = self._tokenizer.encode(plain, special=True, most=most)
        own = self._own_controls(told, most)
        if self._controls_in(ids) == own:
            return ids
        hiding = self._hiding(plain, told)

        def hidden(text: str) -> str:
            return _replaced(text, hiding)

        def without_controls(text: str) -> str:
            return self._written.sub(lambda found: hidden(found[0]), text)

        ids = self._read(self._rendered(told.map_text(without_controls)), hiding, most)
        if self._controls_in(ids) == own:
            return ids
        return self._read(self._rendered(told.map_text(hidden)), hiding, most)

    def _rendered(self, told: _TemplateInput) -> str:
        tools: Any = told.tools
        return self._template.render(told.messages, tools=tools, **told.settings)

    def _own_controls(self, told: _TemplateInput, most: int | None) -> list[int]:
        """List the control tokens that the template writes, in order."""
        blunting = dict.fromkeys([*self._signs, *self._likenesses(told)], self._blunt)
        blunted = self._rendered(told.map_text(lambda text: _replaced(text, blunting)))
        room = None if most is None else _BLUNT_GROWTH * most
        return self._controls_in(self._tokenizer.encode(blunted, special=True, most=room))

    def _likenesses(self, told: _TemplateInput) -> set[str]:
        """Find characters in messages that the tokenizer normalizes to signs.

        NFKC makes "<" of "＜". The tokenizer normalizes where it looks for a control token.
        """
        if not any(token.normalized for token in self._tokens.values()):
            return set()
        signs = set(self._tokenizer.normalized("".join(self._signs))).union(self._signs)
        return {
            one for one in told.characters() if signs.intersection(self._tokenizer.normalized(one))
        }

    def _controls_in(self, ids: Iterable[int]) -> list[int]:
        return [id for id in ids if id in self._tokens]

    def _hiding(self, plain: str, told: _TemplateInput) -> dict[str, str]:
        """Choose for each sign a character that is nowhere in the texts."""
        used = told.characters().union(plain)
        free = [character for character in map(chr, _PRIVATE) if character not in used]
        if len(free) < len(self._signs):
            raise TemplateError("the messages leave no character that could stand for others")
        return dict(zip(self._signs, free[: len(self._signs)], strict=True))

    def _read(self, text: str, hiding: Mapping[str, str], most: int | None) -> list[int]:
        """Encode a rendering: its control tokens are the template's, all else is text."""
        shown = {mark: sign for sign, mark in hiding.items()}
        ids: list[int] = []
        for piece, control in self._pieces(text):
            if piece:
                encode = self._tokenizer.encode_later if ids else self._tokenizer.encode
                ids += encode(_replaced(piece, shown), most=most)
            if control is not None:
                ids.append(control)
            if most is not None and len(ids) > most:
                raise TextTooLongError(f"the messages have more than {most} tokens")
        return ids

    def _pieces(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Split into texts and the control token after each; the last text has none.

        White space around a control token belongs to it where the tokenizer says so.
        """
        start, trimmed = 0, False
        for found in self._written.finditer(text):
            control = self._controls[found[0]]
            token = self._tokens[control]
            piece = text[start : found.start()]
            piece = piece.lstrip(_WHITE) if trimmed else piece
            yield piece.rstrip(_WHITE) if token.lstrip else piece, control
            start, trimmed = found.end(), token.rstrip
        rest = text[start:]
        yield rest.lstrip(_WHITE) if trimmed else rest, None


def _signs(written: str) -> set[str]:
    """Choose characters that every control token needs; punctuation where possible."""
    visible = {character for character in written if not character.isspace()}
    return {character for character in visible if not character.isalnum()} or visible


def _said(value: Any, change: Callable[[str], str]) -> Any:
    """Return messages with all their text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            name if name.isidentifier() else change(name): (
                inner if name in _NAMES and _is_name(inner) else _said(inner, change)
            )
            for name, inner in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_said(inner, change) for inner in value]
    return value


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()


def _replaced(text: str, replacements: Mapping[str, str]) -> str:
    """Replace characters in a text; by far the fastest way for long texts."""
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text
