"""Added tokens of a Hugging Face directory: tokens outside the vocabulary's own file.

In: tokenizer_config.json (`added_tokens_decoder`, and tokens by role), added_tokens.json and
special_tokens_map.json, if present; the first file that states a token's id decides. A
tokenizer.model has no other added tokens; a tokenizer.json is extended and changed by these tokens
(`complete`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from pilotfish.engines.tokenizer import converting_errors
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.fields import format_value
from pilotfish.export.sources.json_object import read_object
from pilotfish.export.tokenizers.roles import EXTRA, ROLES, content

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True)
class AddedTokens:
    """The added tokens of all files.

    settings: content of tokenizer_config.json. tokens: id → token. special: strings of the special
    tokens; the vocabulary may lack some.
    """

    settings: Mapping[str, Any]
    tokens: Mapping[int, AddedToken]
    special: frozenset[str]

    def role(self, name: str) -> str | None:
        """Return the token with a role such as "bos_token"; None if the role has no token."""
        return content(self.settings.get(name))

    def add_to(
        self, tokenizer: tokenizers.Tokenizer, known: Mapping[int, AddedToken], place: str
    ) -> None:
        """Add these tokens, and the vocabulary's added tokens `known` that they do not replace.

        Raises:
            ExportError: if a token would not get its stated id.
        """
        stated = {**known, **self.tokens}
        stated |= self.special_in(tokenizer, stated.values())
        for token in stated.values():
            token.special = token.special or token.content in self.special
        _add(tokenizer, stated, place, "give the model a tokenizer.json")

    def special_in(
        self, tokenizer: tokenizers.Tokenizer, known: Iterable[AddedToken]
    ) -> dict[int, AddedToken]:
        """Return the special tokens in a tokenizer's vocabulary that are not among `known`."""
        others = sorted(self.special - {token.content for token in known})
        ids = {token: tokenizer.token_to_id(token) for token in others}
        return {
            id: AddedToken(token, special=True, normalized=False)
            for token, id in ids.items()
            if id is not None
        }


def read_added(directory: Path) -> AddedTokens:
    """Read the added tokens from the directory's files.

    Raises:
        ExportError: if a file is damaged.
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
        raise ExportError(
            f"{directory}: the added tokens are damaged: {format_value(error)}"
        ) from None
    special = frozenset(name for source in (roles, settings) for name in _special(source))
    return AddedTokens({**roles, **settings}, tokens, special)


def complete(text: str, directory: Path) -> str:
    """Return a tokenizer.json with the added tokens of the directory's other files.

    As in transformers, missing tokens are added, differing tokens are changed, and tokens with a
    role become special. If nothing differs, the text is returned unchanged.

    Raises:
        ExportError: if a file is damaged, or a token would not get its stated id.
    """
    added = read_added(directory)
    try:
        with converting_errors("damaged", ExportError):
            tokenizer = tokenizers.Tokenizer.from_str(text)
    except ExportError:
        return text  # the file is damaged: the tokenizer's own reader raises the error
    known: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    listed = added.settings.get("added_tokens_decoder")
    if listed is not None:  # the list overrides added_tokens.json
        stated = {id: added.tokens[id] for id in map(int, listed)}
    else:  # tokenizer.json overrides added_tokens.json
        stated = {
            id: _as_named(token.content, added.special)
            for id, token in added.tokens.items()
            if id not in known
        }
    roles = {added.role(name) for name in ROLES}
    for token in stated.values():
        token.special = token.special or token.content in roles
    different = {id: token for id, token in stated.items() if repr(token) != repr(known.get(id))}
    different |= added.special_in(tokenizer, (*known.values(), *stated.values()))
    if not different:
        return text
    _add(tokenizer, different, str(directory), "let save_pretrained write the tokenizer again")
    return tokenizer.to_str()


def _as_named(token: str, special: Collection[str]) -> AddedToken:
    return AddedToken(token, special=token in special, normalized=token not in special)


def _add(
    tokenizer: tokenizers.Tokenizer, tokens: Mapping[int, AddedToken], place: str, advice: str
) -> None:
    """Add tokens by id; refuse tokens that would get other ids."""
    in_order = sorted(tokens.items(), key=itemgetter(0))
    # a single call, since each call takes time proportional to all tokens
    tokenizer.add_tokens([token for _, token in in_order])
    for id, token in in_order:
        actual = tokenizer.token_to_id(token.content)
        if actual != id:
            raise ExportError(
                f"{place}: the added token {format_value(token.content)} would get the id "
                f"{actual}, not {id}: {advice}"
            )


def _special(source: Mapping[str, Any]) -> Iterator[str]:
    """Yield the special tokens of a file: those with a role, and those in a list or object."""
    stated = [source.get(role) for role in ROLES]
    for name in EXTRA:
        several = source.get(name)
        if isinstance(several, dict):
            several = list(several.values())
        stated += several if isinstance(several, list) else []
    for token in map(content, stated):
        if token:
            yield token
