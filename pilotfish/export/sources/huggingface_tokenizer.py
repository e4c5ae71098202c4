"""The tokenizer and the chat templates of a Hugging Face directory.

In: tokenizer.json, else tekken.json, tokenizer.model, or vocab.json and merges.txt; what other
files say of its added tokens, and of names for them. Templates: chat_template.jinja and
additional_chat_templates/, else those that tokenizer_config.json or chat_template.json name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from pilotfish.base.reading import read_text, reading_file
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.tokenizer import Tokenizer, wrapping_errors
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.json_object import read_object
from pilotfish.export.tokenizers.added import complete, read_added
from pilotfish.export.tokenizers.gpt2 import gpt2_tokenizer_json
from pilotfish.export.tokenizers.roles import CLASSES, content, named_tokens, tokenizer_class
from pilotfish.export.tokenizers.sentencepiece import sentencepiece_tokenizer_json
from pilotfish.export.tokenizers.tekken import tekken_tokenizer_json

log = logging.getLogger("pilotfish.export")
TEMPLATE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"
DEFAULT = "default"

# The files of a form, all of which must be there → how to make a tokenizer.json of them; the first
# whose files are there is taken.
FORMS: tuple[tuple[tuple[str, ...], Callable[[Path], str]], ...] = (
    (("tokenizer.json",), lambda path: complete(read_text(path / "tokenizer.json"), path)),
    (("tekken.json",), tekken_tokenizer_json),
    (("tokenizer.model",), sentencepiece_tokenizer_json),
    (("vocab.json", "merges.txt"), gpt2_tokenizer_json),
)
# Keys of tokenizer_config.json that a user may choose to ignore.
TEMPLATE_KEY = "chat_template"
IGNORABLE = frozenset({TEMPLATE_KEY, "add_prefix_space", "split_special_tokens"})
# Hashed besides if they are there, as they always were.
_ALSO = ("vocab.json", "merges.txt")


class _AddedToken(msgspec.Struct):
    content: str
    id: int
    special: bool = False


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int]


class _Tables(msgspec.Struct):
    """What a tokenizer.json says of its tokens, of those kinds that have a table of ids."""

    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def read_tokenizer(path: Path, ignored: Collection[str] = ()) -> tuple[str, list[Path]]:
    """Return the content of a tokenizer.json, and the files that it was made of.

    ignored: of `IGNORABLE`, what tokenizer_config.json may say without effect.

    Raises:
        ExportError: if no tokenizer is found, it is damaged, or its kind is not supported.
    """
    for names, read in FORMS:
        if all((path / name).is_file() for name in names):
            with reading_file(lambda problem: _unreadable(f"{path}: the tokenizer", problem)):
                text = read(path)
            _expect_agreement(path, text, ignored)
            used = dict.fromkeys((*names, *(name for name in _ALSO if (path / name).is_file())))
            return text, [path / name for name in used]
    forms = ", ".join(" and ".join(names) for names, _ in FORMS)
    raise ExportError(f"{path} holds no tokenizer.json, nor another form of it ({forms})")


def read_special_tokens(path: Path, text: str) -> dict[str, str]:
    """Return the tokens that templates may write by a name; see `tokenizers.roles`.

    text: the content of its tokenizer.json.

    Raises:
        ExportError: if one of the directory's files is damaged.
    """
    settings, parsed = read_object(path / "tokenizer_config.json"), _parse(text)
    padding = parsed.get("padding")
    named = named_tokens(
        settings,
        read_object(path / "special_tokens_map.json"),
        _find_class(path, settings, parsed),
        padding.get("pad_token") if isinstance(padding, dict) else None,
    )
    known = token_ids(text)
    return {name: token for name, token in named.items() if not token or token in known}


def read_end_tokens(ids: list[int], special_tokens: Mapping[str, str], text: str) -> list[int]:
    """Return the end tokens, and the tokenizer's own if it is none of them."""
    end = token_ids(text).get(special_tokens.get("eos_token", ""))
    return ids if end is None or end in ids else [*ids, end]


def expect_tokens(path: Path, text: str, templates: Collection[str]) -> None:
    """Refuse a template that writes a token which the tokenizer lacks, or not for all readers.

    transformers gives a token that is lacking the next free id, which the model does not know.
    """
    known, parsed = token_ids(text), _parse(text)
    settings, roles = (
        read_object(path / name) for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    named = named_tokens(settings, roles, _find_class(path, settings, parsed))
    special = read_added(path).special
    for token in _unlisted(path, settings, parsed, special):
        if any(token in template for template in templates):
            raise ExportError(
                f"{path}: the chat template writes {token}, which tokenizer.json adds, but "
                "added_tokens_decoder in tokenizer_config.json does not list, and readers differ "
                "in which they follow: let save_pretrained write the tokenizer again"
            )
    written = {token: token for token in special} | named
    for name, token in written.items():
        word = re.escape(name)
        pattern = re.compile(rf"(?<!\w){word}(?!\w)" if name in named else word)
        if token and token not in known and any(map(pattern.search, templates)):
            raise ExportError(
                f"{path}: the chat template writes {name}, and the tokenizer does not have the "
                f"token {token!r}: add it to the model, or export it without chats by --ignore-key "
                "chat_template"
            )


def _unlisted(
    path: Path, settings: dict[str, Any], parsed: dict[str, Any], special: Collection[str]
) -> set[str]:
    """Return tokens that tokenizer.json adds, and that transformers does not take from there.

    A class that builds its tokenizer anew adds what tokenizer_config.json lists, and no others; but
    a special token of the vocabulary keeps its id.
    """
    listed = settings.get("added_tokens_decoder")
    if not isinstance(listed, dict) or _find_class(path, settings, parsed) not in CLASSES:
        return set()
    try:
        vocabulary = msgspec.convert(parsed, _Tables)
    except msgspec.ValidationError:
        return set()  # Unigram, which no such class reads here, or damaged
    added = {token.content for token in vocabulary.added_tokens}
    vocabulary_tokens = {word for word in special if word in vocabulary.model.vocab}
    return added - vocabulary_tokens - set(map(content, listed.values()))


def token_ids(text: str) -> dict[str, int]:
    """Return the ids of a tokenizer.json's tokens by their strings."""
    with wrapping_errors("tokenizer.json is not a tokenizer.json", ExportError):
        ids: dict[str, int] = tokenizers.Tokenizer.from_str(text).get_vocab()
    return ids


def _expect_agreement(path: Path, text: str, ignored: Collection[str]) -> None:
    """Refuse settings by which some readers would encode a text otherwise."""
    settings = read_object(path / "tokenizer_config.json")
    where = path / "tokenizer_config.json"
    if settings.get("split_special_tokens") is True and "split_special_tokens" not in ignored:
        raise ExportError(
            f"{where}: split_special_tokens makes text of the control tokens that a chat template "
            "writes. Remove it, or let it pass by --ignore-key split_special_tokens"
        )
    parsed = _parse(text)
    _warn_of_spaces(path, settings, parsed, text)
    stated = settings.get("add_prefix_space")
    if not isinstance(stated, bool) or "add_prefix_space" in ignored:
        return
    if _find_class(path, settings, parsed) not in CLASSES and not _is_byte_level(parsed):
        return  # nobody heeds it there
    try:
        tokenizer = Tokenizer.from_json(text)
    except ArtifactError:
        return  # of a kind that is refused for that
    adds_space = tokenizer.encode("a") != tokenizer.encode_rest("a").ids
    if adds_space != stated:
        puts = "puts a space" if adds_space else "puts no space"
        raise ExportError(
            f"{where}: add_prefix_space is {str(stated).lower()}, but tokenizer.json {puts} before "
            "a text, and readers differ in which they follow. Make them agree, or let the file be "
            "followed by --ignore-key add_prefix_space"
        )


def _warn_of_spaces(
    path: Path, settings: dict[str, Any], parsed: dict[str, Any], text: str
) -> None:
    """Warn where transformers 5 puts no space behind a control token, and all others one.

    It does so by `legacy` in the settings, and does not read what tokenizer.json says of it; older
    releases and llama.cpp put one, as Llama 2's own program does.
    """
    if settings.get("legacy") is True or _find_class(path, settings, parsed) != "LlamaTokenizer":
        return
    try:
        tokenizer = Tokenizer.from_json(text)
    except ArtifactError:
        return  # of a kind that is refused for that
    control = next(iter(tokenizer.special_tokens.values()), None)
    if control is None:
        return
    ids = tokenizer.encode(f"{control.content}a", special=True)[1:]
    if ids != tokenizer.encode_rest("a").ids:
        log.warning(
            "%s: a space is put before a text behind a control token, as tokenizer.json says and "
            "llama.cpp does; transformers 5 puts none there unless tokenizer_config.json says "
            "legacy: true, so that ids of chats differ from its",
            path.name,
        )


def _find_class(path: Path, settings: dict[str, Any], parsed: dict[str, Any]) -> str:
    config = read_object(path / "config.json")
    return tokenizer_class(settings, config, byte_level=_is_byte_level(parsed))


def _is_byte_level(parsed: dict[str, Any]) -> bool:
    decoder = parsed.get("decoder")
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def _parse(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}  # damaged: the tokenizer's own reader says how


def drop_tokens_beyond(text: str, rows: int, templates: Collection[str]) -> tuple[str, list[str]]:
    """Leave out special tokens that the embedding has no row for; their names are returned, too.

    So it is with Gemma 3's `<image_soft_token>`, which stands for what its text models do not read.
    A token that a template writes stays: without it, prompts would be others.
    """
    try:
        values = msgspec.json.decode(text, type=_Tables)
    except (msgspec.MsgspecError, RecursionError):
        return text, []  # damaged, or of another kind: the tokenizer's own reader says how
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


def read_templates(path: Path) -> tuple[str | None, dict[str, str]]:
    """Return the default chat template, if there is one, and all others by their names.

    Raises:
        ExportError: if a file that may name templates cannot be read.
    """
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
    """Return templates by name: one stands alone, of several each has its name."""
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
