"""The bytes that the tokens of a vocabulary stand for.

Two families of vocabularies are supported. In byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2), each
character of a token stands for one byte. In SentencePiece, as BPE (Llama 2, Mistral) or Unigram,
"▁" is a space and <0x0A> is a byte. The file's `decoder` shows to which family a vocabulary
belongs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from pilotfish.engines.engine_errors import ArtifactError

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SPACE_MARK = "▁"


class ByteScheme(NamedTuple):
    """Conversions between the tokens of a vocabulary and bytes.

    token_bytes: function from a token's spelling to its bytes. byte_piece: function from a byte to
    the spelling of its token. drops_first_space: whether decoding drops a leading space.
    """

    token_bytes: Callable[[str], bytes]
    byte_piece: Callable[[int], str]
    drops_first_space: bool


def _byte_level(piece: str) -> bytes:
    """Return the bytes of a byte-level token; an added token with other characters is text."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:
        return piece.encode("utf-8")


def _sentencepiece(piece: str) -> bytes:
    """Return the bytes of a SentencePiece token."""
    if match := BYTE_TOKEN.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(SPACE_MARK, " ").encode("utf-8")


def _byte_characters() -> dict[str, int]:
    """Build GPT-2's alphabet: printable Latin-1 maps to itself, other bytes to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


BYTE_OF_CHARACTER = _byte_characters()
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def byte_scheme(decoder: dict[str, Any] | None, name: str) -> ByteScheme:
    """Return the scheme of a vocabulary, given the `decoder` of its tokenizer.json."""
    steps = [decoder] if decoder else []
    if decoder and decoder["type"] == "Sequence":
        steps = decoder["decoders"]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return ByteScheme(_byte_level, CHARACTER_OF_BYTE.__getitem__, drops_first_space=False)
    marks_spaces = any(
        step.get("replacement") == SPACE_MARK or step.get("pattern") == {"String": SPACE_MARK}
        for step in steps
    )
    if marks_spaces and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        strips = any(step["type"] == "Strip" and step["start"] for step in steps)
        prepends = any(step.get("prepend_scheme", "never") != "never" for step in steps)
        return ByteScheme(_sentencepiece, "<0x{:02X}>".format, drops_first_space=strips or prepends)
    raise ArtifactError(
        f"{name}: the decoder {sorted(kinds)} belongs to a family of tokenizers that is not "
        "supported (byte-level BPE, and SentencePiece's BPE and Unigram are)"
    )
