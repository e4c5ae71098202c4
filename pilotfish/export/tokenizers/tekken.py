"""Mistral's tekken.json, as in Nemo and Ministral, converted to a tokenizer.json.

The file has tiktoken's form: a pattern, and tokens as bytes, sorted by rank. A piece of text that
equals a token becomes that token. Otherwise, the two neighbours that form the token with the lowest
rank are joined, again and again until no neighbours form a token. Special tokens have the first
ids, and other tokens follow by rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models

from pilotfish.base.reading import read_content, reading_file
from pilotfish.engines.token_bytes import CHARACTER_OF_BYTE
from pilotfish.engines.tokenizer import converting_errors
from pilotfish.export.export_errors import ExportError
from pilotfish.export.tokenizers.pretokenizers import Recipe
from pilotfish.export.tokenizers.spelling import put_before
from pilotfish.export.tokenizers.tables import merges_by_score

FILE = "tekken.json"
BOS = "<s>"
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]


class _Config(msgspec.Struct, frozen=True):
    pattern: str
    default_num_special_tokens: _Count | None = None
    default_vocab_size: _Count | None = None
    version: str = ""


class _Token(msgspec.Struct, frozen=True):
    rank: _Count
    token_bytes: bytes  # in base64


class _Special(msgspec.Struct, frozen=True):
    rank: _Count
    token_str: str
    is_control: bool = True


class _TekkenFile(msgspec.Struct, frozen=True):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


# Special tokens of files that list none (up to version 7).
OLD_SPECIAL = (
    *("<unk>", BOS, "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
OLD_VERSIONS = ("", "v1", "v2", "v3", "v7")


def tekken_tokenizer_json(directory: Path) -> str:
    """Convert the tekken.json in `directory` to a tokenizer.json.

    Raises:
        ExportError: if the file is damaged.
    """
    path = directory / FILE
    with reading_file(lambda problem: ExportError(f"{path} cannot be read: {problem}")):
        file = msgspec.json.decode(read_content(path), type=_TekkenFile)
    special = _special_tokens(file, path)
    ordinary = _ordinary_tokens(file, len(special), path)
    vocabulary = {token.content: id for id, token in enumerate(special)}
    vocabulary |= {token: len(special) + rank for rank, token in enumerate(ordinary)}
    if len(vocabulary) != len(special) + len(ordinary):
        raise ExportError(f"{path} is damaged: it contains a token twice")
    merges = merges_by_score({token: -rank for rank, token in enumerate(ordinary)})
    with converting_errors(f"{path} is damaged", ExportError):
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
        tokenizer.pre_tokenizer = Recipe((file.config.pattern,)).build()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(special)
    if BOS in vocabulary:
        put_before(tokenizer, BOS, vocabulary[BOS])
    return tokenizer.to_str()


def _special_tokens(file: _TekkenFile, path: Path) -> list[AddedToken]:
    """List the special tokens by id.

    Tokens that the file counts but does not name get generated names.
    """
    stated = file.special_tokens
    if stated is None:
        if file.config.version not in OLD_VERSIONS:
            raise ExportError(f"{path} states no special tokens")
        stated = [_Special(rank, token) for rank, token in enumerate(OLD_SPECIAL)]
    by_rank = {token.rank: token for token in stated}
    if sorted(by_rank) != list(range(len(stated))):
        raise ExportError(f"{path} is damaged: its special tokens are not numbered 0, 1, 2, …")
    count = file.config.default_num_special_tokens
    count = len(stated) if count is None else count
    if count < len(stated):
        raise ExportError(
            f"{path} is damaged: it lists more special tokens than the number it states"
        )
    named = [by_rank[rank] for rank in range(len(stated))]
    named += [_Special(rank, f"<SPECIAL_{rank}>") for rank in range(len(stated), count)]
    return [AddedToken(token.token_str, special=True, normalized=False) for token in named]


def _ordinary_tokens(file: _TekkenFile, special: int, path: Path) -> list[str]:
    """List the other tokens by rank, in GPT-2's characters, up to the vocabulary's size."""
    size = file.config.default_vocab_size
    count = len(file.vocab) if size is None else size - special
    chosen = file.vocab[: max(count, 0)]
    if len(chosen) < count or [token.rank for token in chosen] != list(range(len(chosen))):
        raise ExportError(
            f"{path} is damaged: it has fewer tokens than the number it states, or they are "
            "not sorted by rank"
        )
    if {token.token_bytes for token in chosen[:256]} != {bytes([byte]) for byte in range(256)}:
        raise ExportError(f"{path} is damaged: its first tokens are not the 256 bytes")
    return ["".join(map(CHARACTER_OF_BYTE.__getitem__, token.token_bytes)) for token in chosen]
