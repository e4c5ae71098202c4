"""The tokenizer and the chat templates of a Hugging Face directory.

In: tokenizer.json, else tekken.json, tokenizer.model, or vocab.json and merges.txt. Templates:
chat_template.jinja and additional_chat_templates/, or those that tokenizer_config.json or
chat_template.json name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pilotfish.export.errors import ExportError
from pilotfish.export.sources.json_object import read_object
from pilotfish.export.tokenizers.gpt2 import gpt2_tokenizer_json
from pilotfish.export.tokenizers.sentencepiece import sentencepiece_tokenizer_json
from pilotfish.export.tokenizers.tekken import tekken_tokenizer_json
from pilotfish.reading import reading, text

TEMPLATE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"
DEFAULT = "default"

# The files of a form, all of which must be there → how to make a tokenizer.json of them; the first
# whose files are there is taken.
FORMS: tuple[tuple[tuple[str, ...], Callable[[Path], str]], ...] = (
    (("tokenizer.json",), lambda path: text(path / "tokenizer.json")),
    (("tekken.json",), tekken_tokenizer_json),
    (("tokenizer.model",), sentencepiece_tokenizer_json),
    (("vocab.json", "merges.txt"), gpt2_tokenizer_json),
)
# Hashed besides if they are there, as they always were.
_ALSO = ("vocab.json", "merges.txt")


class _AddedToken(msgspec.Struct):
    content: str
    id: int
    special: bool = False


class _Words(msgspec.Struct):
    vocab: dict[str, int]


class _Stated(msgspec.Struct):
    """What a tokenizer.json says of its tokens, of those kinds that have a table of ids."""

    model: _Words
    added_tokens: list[_AddedToken] = []


def read_tokenizer(path: Path) -> tuple[str, list[Path]]:
    """Return the content of a tokenizer.json, and the files that it was made of.

    Raises:
        ExportError: if no tokenizer is found, it is damaged, or its kind is not supported.
    """
    for names, read in FORMS:
        if all((path / name).is_file() for name in names):
            with reading(lambda problem: _unreadable(f"{path}: the tokenizer", problem)):
                found = read(path)
            used = dict.fromkeys((*names, *(name for name in _ALSO if (path / name).is_file())))
            return found, [path / name for name in used]
    forms = ", ".join(" and ".join(names) for names, _ in FORMS)
    raise ExportError(f"{path} holds no tokenizer.json, nor another form of it ({forms})")


def within(text: str, rows: int, templates: Collection[str]) -> tuple[str, list[str]]:
    """Leave out special tokens that the embedding has no row for; their names are returned, too.

    So it is with Gemma 3's `<image_soft_token>`, which stands for what its text models do not read.
    A token that a template writes stays: without it, prompts would be others.
    """
    try:
        values = msgspec.json.decode(text, type=_Stated)
    except (msgspec.MsgspecError, RecursionError):
        return text, []  # damaged, or of another kind: the tokenizer's own reader says how
    beyond = {token.content for token in values.added_tokens if token.id >= rows}
    special = {token.content for token in values.added_tokens if token.special}
    words = {id for word, id in values.model.vocab.items() if word not in beyond}
    if not beyond or not beyond <= special or max(words, default=0) >= rows:
        return text, []
    if any(name in template for name in beyond for template in templates):
        return text, []
    kept: dict[str, Any] = msgspec.json.decode(text)
    kept["added_tokens"] = [one for one in kept["added_tokens"] if one["content"] not in beyond]
    kept["model"]["vocab"] = {
        word: id for word, id in kept["model"]["vocab"].items() if word not in beyond
    }
    return msgspec.json.encode(kept).decode(), sorted(beyond)


def read_templates(path: Path) -> tuple[str | None, dict[str, str]]:
    """Return the default chat template, if there is one, and all others by their names.

    Raises:
        ExportError: if a file that may name templates cannot be read.
    """
    found: dict[str, str] = {}
    for name in ("chat_template.json", "tokenizer_config.json"):
        found |= templates_in(read_object(path / name).get("chat_template"))
    files = {DEFAULT: path / TEMPLATE}
    files |= {file.stem: file for file in sorted((path / NAMED_TEMPLATES).glob("*.jinja"))}
    for name, file in files.items():
        with reading(partial(_unreadable, str(file))), suppress(FileNotFoundError):
            found[name] = text(file)
    return found.pop(DEFAULT, None), found


def templates_in(stated: object) -> dict[str, str]:
    """Return templates by name: one stands alone, of several each has its name."""
    if isinstance(stated, str):
        return {DEFAULT: stated}
    entries = stated if isinstance(stated, list) else []
    named = [(each.get("name"), each.get("template")) for each in entries if isinstance(each, dict)]
    return {
        name: template
        for name, template in named
        if isinstance(name, str) and isinstance(template, str)
    }


def _unreadable(what: str, problem: str) -> ExportError:
    return ExportError(f"{what} cannot be read: {problem}")
