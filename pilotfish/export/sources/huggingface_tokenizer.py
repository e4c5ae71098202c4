"""The tokenizer and the chat templates of a Hugging Face directory.

The tokenizer is read from tokenizer.json, or else from tekken.json, tokenizer.model, or vocab.json
and merges.txt; other files add tokens and their roles. Templates are read from chat_template.jinja
and additional_chat_templates/, or else from tokenizer_config.json or chat_template.json.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from pilotfish.base.reading import read_text, reading_file
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.tokenizer import Tokenizer, converting_errors
from pilotfish.export.export_errors import ExportError
from pilotfish.export.source_names import NAMED_TEMPLATES
from pilotfish.export.sources.json_object import read_object
from pilotfish.export.sources.mapped_file import refuse_pointer
from pilotfish.export.tokenizers.added import complete, read_added
from pilotfish.export.tokenizers.gpt2 import gpt2_tokenizer_json
from pilotfish.export.tokenizers.roles import CLASSES, content, named_tokens, tokenizer_class
from pilotfish.export.tokenizers.sentencepiece import sentencepiece_tokenizer_json
from pilotfish.export.tokenizers.tekken import tekken_tokenizer_json

log = logging.getLogger("pilotfish.export")
TEMPLATE = "chat_template.jinja"
DEFAULT = "default"

# (files, function that converts them to a tokenizer.json); the first entry with all files present
# is used.
FORMS: tuple[tuple[tuple[str, ...], Callable[[Path], str]], ...] = (
    (("tokenizer.json",), lambda path: complete(read_text(path / "tokenizer.json"), path)),
    (("tekken.json",), tekken_tokenizer_json),
    (("tokenizer.model",), sentencepiece_tokenizer_json),
    (("vocab.json", "merges.txt"), gpt2_tokenizer_json),
)
# Keys of tokenizer_config.json that a user may choose to ignore.
TEMPLATE_KEY = "chat_template"
IGNORABLE = frozenset({TEMPLATE_KEY, "add_prefix_space", "split_special_tokens"})
# Further files that are hashed if they exist.
_ALSO = ("vocab.json", "merges.txt")


class _AddedToken(msgspec.Struct):
    content: str
    id: int
    special: bool = False


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int]


class _Tables(msgspec.Struct):
    """The tokens in a tokenizer.json, for models with a table of ids."""

    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


class DirectoryTokenizer:
    """A directory's tokenizer as a tokenizer.json, with what its other files say.

    Args:
        path: the directory.
        ignored: keys of tokenizer_config.json to ignore, from `IGNORABLE`.

    Attributes:
        text: content of the tokenizer.json.
        files: the files that it was made from.

    Raises:
        ExportError: if there is no tokenizer, it is damaged, or its kind is not supported.
    """

    def __init__(self, path: Path, ignored: Collection[str] = ()) -> None:
        self._path = path
        self.text, self.files = _read_form(path)
        self._settings = read_object(path / "tokenizer_config.json")
        self._roles = read_object(path / "special_tokens_map.json")
        self._parsed = _parse(self.text)
        decoder = self._parsed.get("decoder")
        byte_level = isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
        config = read_object(path / "config.json")
        self._class = tokenizer_class(self._settings, config, byte_level=byte_level)
        self._rebuilt = self._class in CLASSES  # whether transformers rebuilds it from settings
        self._expect_agreement(ignored, byte_level=byte_level)

    def _expect_agreement(self, ignored: Collection[str], *, byte_level: bool) -> None:
        """Refuse settings with which some readers would encode a text differently."""
        where = self._path / "tokenizer_config.json"
        split = self._settings.get("split_special_tokens") is True
        if split and "split_special_tokens" not in ignored:
            raise ExportError(
                f"{where}: split_special_tokens turns the control tokens of a chat template into "
                "text. Remove this key, or ignore it by --ignore-key split_special_tokens"
            )
        stated = self._settings.get("add_prefix_space")
        # no program uses the key for other kinds of tokenizers
        is_used = (self._rebuilt or byte_level) and "add_prefix_space" not in ignored
        checks = isinstance(stated, bool) and is_used
        warns = self._class == "LlamaTokenizer" and self._settings.get("legacy") is not True
        if not checks and not warns:
            return
        try:
            tokenizer = Tokenizer.from_json(self.text)
        except ArtifactError:
            return  # damaged: refused by its own reader
        if warns:
            self._warn_of_spaces(tokenizer)
        adds_space = tokenizer.encode("a") != tokenizer.encode_rest("a").ids
        if checks and adds_space != stated:
            puts = "puts a space" if adds_space else "puts no space"
            raise ExportError(
                f"{where}: add_prefix_space is {str(stated).lower()}, but tokenizer.json {puts} "
                "before a text, and other programs differ in which file they use. Make both files "
                "agree, or use tokenizer.json by --ignore-key add_prefix_space"
            )

    def special_tokens(self, known: Collection[str]) -> dict[str, str]:
        """Return the tokens that templates can write by name, of those that are `known`.

        See `tokenizers.roles`.
        """
        padding = self._parsed.get("padding")
        pad = padding.get("pad_token") if isinstance(padding, dict) else None
        named = named_tokens(self._settings, self._roles, self._class, pad)
        return {name: token for name, token in named.items() if not token or token in known}

    def expect_tokens(self, templates: Collection[str]) -> None:
        """Refuse a template that writes a token which some reader's tokenizer lacks.

        transformers gives a missing token the next free id, for which the model was not trained.
        """
        known, special = token_ids(self.text), read_added(self._path).special
        named = named_tokens(self._settings, self._roles, self._class)
        for token in self._unlisted_tokens(special):
            if any(token in template for template in templates):
                raise ExportError(
                    f"{self._path}: the chat template writes {token}, which tokenizer.json adds, "
                    "but added_tokens_decoder in tokenizer_config.json does not list, and other "
                    "programs differ in which file they use: let save_pretrained write the "
                    "tokenizer again"
                )
        written = {token: token for token in special} | named
        for name, token in written.items():
            word = re.escape(name)
            pattern = re.compile(rf"(?<!\w){word}(?!\w)" if name in named else word)
            if token and token not in known and any(map(pattern.search, templates)):
                raise ExportError(
                    f"{self._path}: the chat template writes {name}, but the tokenizer does not "
                    f"have this token, {token!r}: add the token to the model, or export the model "
                    "without chats by --ignore-key chat_template"
                )

    def _unlisted_tokens(self, special: Collection[str]) -> set[str]:
        """Return the added tokens of tokenizer.json that transformers ignores.

        A class that rebuilds its tokenizer adds only the tokens that tokenizer_config.json lists.
        Special tokens of the vocabulary keep their ids.
        """
        listed = self._settings.get("added_tokens_decoder")
        if not isinstance(listed, dict) or not self._rebuilt:
            return set()
        try:
            vocabulary = msgspec.convert(self._parsed, _Tables)
        except msgspec.ValidationError:
            return set()  # either a Unigram model, which no such class has, or a damaged file
        added = {token.content for token in vocabulary.added_tokens}
        vocabulary_tokens = {word for word in special if word in vocabulary.model.vocab}
        return added - vocabulary_tokens - set(map(content, listed.values()))

    def _warn_of_spaces(self, tokenizer: Tokenizer) -> None:
        """Warn if transformers 5, unlike other readers, puts no space after a control token.

        transformers 5 decides by `legacy` in the settings and ignores tokenizer.json; older
        releases, llama.cpp and Llama 2's original program put a space.
        """
        control = next(iter(tokenizer.special_tokens.values()), None)
        if control is None:
            return
        ids = tokenizer.encode(f"{control.content}a", special=True)[1:]
        if ids != tokenizer.encode_rest("a").ids:
            log.warning(
                "%s: the tokenizer puts a space between a control token and a text, as "
                "tokenizer.json states and llama.cpp does. transformers 5 puts no space unless "
                "tokenizer_config.json states legacy: true, so its token ids of chats differ",
                self._path.name,
            )


def _read_form(path: Path) -> tuple[str, list[Path]]:
    """Return the content of a tokenizer.json, and the files that it was made from."""
    for names, read in FORMS:
        if all((path / name).is_file() for name in names):
            with reading_file(lambda problem: _unreadable(f"{path}: the tokenizer", problem)):
                for name in names:
                    with (path / name).open("rb") as file:
                        refuse_pointer(path / name, file.read(100))
                text = read(path)
            used = dict.fromkeys((*names, *(name for name in _ALSO if (path / name).is_file())))
            return text, [path / name for name in used]
    forms = ", ".join(" and ".join(names) for names, _ in FORMS)
    raise ExportError(
        f"{path} has neither a tokenizer.json nor another form of a tokenizer ({forms})"
    )


def token_ids(text: str) -> dict[str, int]:
    """Return the ids of a tokenizer.json's tokens, token → id."""
    with converting_errors(
        "tokenizer.json does not have the content of a tokenizer.json", ExportError
    ):
        ids: dict[str, int] = tokenizers.Tokenizer.from_str(text).get_vocab()
    return ids


def _parse(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}  # the file is damaged: the tokenizer's own reader raises the error


def drop_tokens_beyond(text: str, rows: int, templates: Collection[str]) -> tuple[str, list[str]]:
    """Drop special tokens without a row in the embedding; return the file and their names.

    An example is `<image_soft_token>`, which Gemma 3's text models do not use. If a template writes
    such a token, nothing is dropped, because prompts would change.
    """
    try:
        values = msgspec.json.decode(text, type=_Tables)
    except (msgspec.MsgspecError, RecursionError):
        # the file is damaged or of another kind: the tokenizer's own reader raises the error
        return text, []
    beyond = {token.content for token in values.added_tokens if token.id >= rows}
    special = {token.content for token in values.added_tokens if token.special}
    words = {id for word, id in values.model.vocab.items() if word not in beyond}
    if not beyond or not beyond <= special or max(words, default=0) >= rows:
        return text, []
    if any(name in template for name in beyond for template in templates):
        return text, []
    reduced: dict[str, Any] = msgspec.json.decode(text)
    reduced["added_tokens"] = [
        token for token in reduced["added_tokens"] if token["content"] not in beyond
    ]
    reduced["model"]["vocab"] = {
        word: id for word, id in reduced["model"]["vocab"].items() if word not in beyond
    }
    return msgspec.json.encode(reduced).decode(), sorted(beyond)


def read_templates(path: Path, ignored: Collection[str] = ()) -> tuple[str | None, dict[str, str]]:
    """Return the default chat template, None without one, and all others by name.

    ignored: "chat_template" omits all of them.

    Raises:
        ExportError: if a file that may contain templates cannot be read.
    """
    if TEMPLATE_KEY in ignored:
        return None, {}
    templates: dict[str, str] = {}
    files = {DEFAULT: path / TEMPLATE}
    files |= {file.stem: file for file in sorted((path / NAMED_TEMPLATES).glob("*.jinja"))}
    for name, file in files.items():
        with reading_file(partial(_unreadable, str(file))), suppress(FileNotFoundError):
            templates[name] = read_text(file)
    for name in ("tokenizer_config.json", "chat_template.json"):
        templates = templates or templates_in(read_object(path / name).get("chat_template"))
    return templates.pop(DEFAULT, None), templates


def templates_in(stated: object) -> dict[str, str]:
    """Return templates by name; a single unnamed one is the default."""
    if isinstance(stated, str):
        return {DEFAULT: stated}
    if isinstance(stated, dict):
        stated = [{"name": name, "template": template} for name, template in stated.items()]
    entries = stated if isinstance(stated, list) else []
    named = [(each.get("name"), each.get("template")) for each in entries if isinstance(each, dict)]
    return {
        name: template
        for name, template in named
        if isinstance(name, str) and isinstance(template, str)
    }


def _unreadable(what: str, problem: str) -> ExportError:
    return ExportError(f"{what} cannot be read: {problem}")
