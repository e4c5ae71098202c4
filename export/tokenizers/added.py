"""Tokens that a Hugging Face directory names beside its vocabulary.

In: tokenizer_config.json (`added_tokens_decoder`, and tokens by their roles), added_tokens.json and
special_tokens_map.json, as far as they are there. The first that names a token's id is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from pilotfish.export.errors import ExportError
from pilotfish.export.sources.json_object import read_object

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True)
class Added:
    """What the files say.

    settings: tokenizer_config.json. tokens: by their ids. special: the names of special ones, some
    of which may be no tokens.
    """

    settings: Mapping[str, Any]
    tokens: Mapping[int, AddedToken]
    special: frozenset[str]

    def role(self, name: str) -> str | None:
        """Return the token that has a role, such as "bos_token"."""
        return _content(self.settings.get(name))

    def add_to(
        self, tokenizer: tokenizers.Tokenizer, known: Mapping[int, AddedToken], place: str
    ) -> None:
        """Add these tokens, and those that the vocabulary itself calls added, which yield.

        Raises `ExportError` where an id would not be the one that is stated.
        """
        stated = {**known, **self.tokens}
        named = {token.content for token in stated.values()}
        for content in sorted(self.special - named):
            id = tokenizer.token_to_id(content)
            if id is not None:
                stated[id] = AddedToken(content, special=True, normalized=False)
        in_order = sorted(stated.items(), key=itemgetter(0))
        for _, token in in_order:
            token.special = token.special or token.content in self.special
        tokenizer.add_tokens([token for _, token in in_order])  # at once: each call costs them all
        for id, token in in_order:
            found = tokenizer.token_to_id(token.content)
            if found != id:
                raise ExportError(
                    f"{place}: the added token {token.content!r} would get the id {found}, not "
                    f"{id}: give the model a tokenizer.json"
                )


def read_added(directory: Path) -> Added:
    """Read what the directory's files say about added tokens.

    Raises:
        ExportError: if one of them is damaged.
    """
    settings = read_object(directory / "tokenizer_config.json")
    roles = read_object(directory / "special_tokens_map.json")
    tokens: dict[int, AddedToken] = {}
    try:
        for content, id in read_object(directory / "added_tokens.json").items():
            tokens[int(id)] = AddedToken(content, special=False, normalized=False)
        for id, stated in settings.get("added_tokens_decoder", {}).items():
            flags = {flag: bool(stated.get(flag, False)) for flag in _FLAGS}
            tokens[int(id)] = AddedToken(
                stated["content"], special=bool(stated.get("special", False)), **flags
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ExportError(f"{directory}: the added tokens are damaged: {error!r}") from None
    special = frozenset(name for source in (roles, settings) for name in _special(source))
    return Added({**roles, **settings}, tokens, special)


def _special(source: Mapping[str, Any]) -> Iterator[str]:
    """Yield the special tokens that a file names by role, or in a list or object of them."""
    stated = [source.get(role) for role in ROLES]
    for name in LISTS:
        several = source.get(name)
        if isinstance(several, dict):
            several = list(several.values())
        stated += several if isinstance(several, list) else []
    for token in map(_content, stated):
        if token:
            yield token


def _content(token: object) -> str | None:
    """Return a token's string: it stands alone, or is the `content` of an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
