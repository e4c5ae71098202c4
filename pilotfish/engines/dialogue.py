"""Encode messages as a prompt in which no message can write a control token.

A rendered chat template is one text. "<|im_end|>" in that text may come from the template, or from
a user who typed it to end the turn and to begin another under a false role. `Dialogue.ids`
guarantees that control tokens come only from the template: text in messages is encoded as plain
text. If no message contains a control token, the ids equal those of the rendered text, and those of
transformers' `apply_chat_template`.

Templates trim, cut and search messages, so the rendered text alone does not show where a control
token came from. Therefore the template is rendered a second time with *blunted* messages, in which
every character of control tokens is replaced. Both texts must contain the same control tokens. If
they do not, control tokens in messages are *hidden*: written with substitute characters, which are
restored after the text has been split at the template's control tokens. If the control tokens still
differ (a template may turn "<|IM_END|>" into "<|im_end|>"), all characters of control tokens are
hidden in the messages.

Control tokens are the tokens that the tokenizer calls special. Other added tokens, such as Qwen 3's
<think>, are text. All messages are treated alike, even the assistant's, because all come from the
client. Field names and the values of "role" and "type" are left unchanged if they are identifiers:
templates compare them, and print them next to control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pilotfish.engines.chat import ChatTemplate
from pilotfish.engines.engine_errors import TemplateError, TextTooLongError
from pilotfish.engines.tokenizer import Tokenizer

_ENUM_FIELDS = frozenset(("role", "type"))
# Template variables that switch thinking on and off.
_THINKING_VARIABLES = ("enable_thinking", "thinking")
_BLUNT_CHARACTERS = ".-~*+=,;:!?"
_PRIVATE = range(0xE000, 0xF900)  # Unicode's private use area: characters without a meaning

# Unicode white space, as tokenizers define it; Python's str.isspace also accepts \x1f.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_BLUNT_GROWTH = 4  # maximum number of tokens in blunted text, as a multiple of `most`


class _TemplateInput(NamedTuple):
    """The arguments of a rendering; all text in messages and tools comes from a client."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    settings: Mapping[str, bool]

    def map_text(self, change: Callable[[str], str]) -> _TemplateInput:
        """Return a copy with `change` applied to all text in messages and tools."""
        return self._replace(
            messages=_map_strings(self.messages, change), tools=_map_strings(self.tools, change)
        )

    def characters(self) -> set[str]:
        """Collect all characters of messages and tools."""
        used: set[str] = set()

        def note(text: str) -> str:
            used.update(text)
            return text

        self.map_text(note)
        return used


class Dialogue:
    """An encoder of messages, from a chat template and a tokenizer. Thread-safe."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._tokens = tokenizer.special_tokens
        self._controls = {token.content: id for id, token in self._tokens.items()}
        written = sorted(self._controls, key=len, reverse=True)  # prefer the longest match
        self._control_pattern = re.compile("|".join(map(re.escape, written)) or r"(?!)")
        self._signs = sorted(set().union(*map(_signs, written)))
        self._blunt_character = next(
            (sign for sign in _BLUNT_CHARACTERS if sign not in "".join(written)), "\ufffd"
        )

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        most: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
    ) -> list[int]:
        """Encode these messages as a prompt that ends where the assistant's answer begins.

        tools: descriptions of functions; their text is treated like that of messages. thinking:
        whether the model should think, if it can; None: the template's default. most: see
        `Tokenizer.encode`. Raises `TemplateError`, `TextTooLongError`, `ArtifactError`.
        """
        settings = {} if thinking is None else dict.fromkeys(_THINKING_VARIABLES, thinking)
        inputs = _TemplateInput(messages, tools, settings)
        plain = self._render(inputs)
        ids = self._tokenizer.encode(plain, special=True, most=most)
        expected = self._template_controls(inputs, most)
        if self._select_controls(ids) == expected:
            return ids
        substitutes = self._choose_substitutes(plain, inputs)

        def hide(text: str) -> str:
            return _replace_characters(text, substitutes)

        def hide_controls(text: str) -> str:
            return self._control_pattern.sub(lambda match: hide(match[0]), text)

        ids = self._encode_rendering(
            self._render(inputs.map_text(hide_controls)), substitutes, most
        )
        if self._select_controls(ids) == expected:
            return ids
        return self._encode_rendering(self._render(inputs.map_text(hide)), substitutes, most)

    def _render(self, inputs: _TemplateInput) -> str:
        tools: Any = inputs.tools
        return self._template.render(inputs.messages, tools=tools, **inputs.settings)

    def _template_controls(self, inputs: _TemplateInput, most: int | None) -> list[int]:
        """List the ids of the control tokens that the template itself writes, in order."""
        replacements = dict.fromkeys(
            [*self._signs, *self._lookalikes(inputs)], self._blunt_character
        )
        blunted = self._render(
            inputs.map_text(lambda text: _replace_characters(text, replacements))
        )
        limit = None if most is None else _BLUNT_GROWTH * most
        return self._select_controls(self._tokenizer.encode(blunted, special=True, most=limit))

    def _lookalikes(self, inputs: _TemplateInput) -> set[str]:
        """Find the characters that the tokenizer normalizes to characters of control tokens.

        For example, NFKC turns "＜" into "<", and some tokenizers normalize text before they look
        for control tokens.
        """
        if not any(token.normalized for token in self._tokens.values()):
            return set()
        signs = set(self._tokenizer.normalized("".join(self._signs))).union(self._signs)
        return {
            character
            for character in inputs.characters()
            if signs.intersection(self._tokenizer.normalized(character))
        }

    def _select_controls(self, ids: Iterable[int]) -> list[int]:
        return [id for id in ids if id in self._tokens]

    def _choose_substitutes(self, plain: str, inputs: _TemplateInput) -> dict[str, str]:
        """Choose a substitute for each sign: a character that occurs nowhere in the texts."""
        used = inputs.characters().union(plain)
        free = [character for character in map(chr, _PRIVATE) if character not in used]
        if len(free) < len(self._signs):
            raise TemplateError(
                "the messages contain every character that could serve as a substitute"
            )
        return dict(zip(self._signs, free[: len(self._signs)], strict=True))

    def _encode_rendering(
        self, text: str, substitutes: Mapping[str, str], most: int | None
    ) -> list[int]:
        """Encode a rendering in which only the template wrote control tokens; the rest is text."""
        originals = {mark: sign for sign, mark in substitutes.items()}
        ids: list[int] = []
        for piece, control in self._pieces(text):
            if piece:
                encode = self._tokenizer.encode_later if ids else self._tokenizer.encode
                ids += encode(_replace_characters(piece, originals), most=most)
            if control is not None:
                ids.append(control)
            if most is not None and len(ids) > most:
                raise TextTooLongError(f"the messages have more than {most} tokens")
        return ids

    def _pieces(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Split a text at its control tokens.

        Yield each piece and the control token that follows it.

        The last piece is followed by None. White space around a control token is dropped if the
        tokenizer's rules for that token say so.
        """
        start, trimmed = 0, False
        for match in self._control_pattern.finditer(text):
            control = self._controls[match[0]]
            token = self._tokens[control]
            piece = text[start : match.start()]
            piece = piece.lstrip(_WHITE_SPACE) if trimmed else piece
            yield piece.rstrip(_WHITE_SPACE) if token.lstrip else piece, control
            start, trimmed = match.end(), token.rstrip
        rest = text[start:]
        yield rest.lstrip(_WHITE_SPACE) if trimmed else rest, None


def _signs(written: str) -> set[str]:
    """Return the signs of a control token: its punctuation, or else all its characters."""
    visible = {character for character in written if not character.isspace()}
    return {character for character in visible if not character.isalnum()} or visible


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return messages with `change` applied to all their text."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            name if name.isidentifier() else change(name): (
                inner if name in _ENUM_FIELDS and _is_name(inner) else _map_strings(inner, change)
            )
            for name, inner in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_map_strings(inner, change) for inner in value]
    return value


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()


def _replace_characters(text: str, replacements: Mapping[str, str]) -> str:
    """Replace characters in a text; str.replace is by far the fastest way for long texts."""
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text
