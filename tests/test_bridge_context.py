"""The drafter's tokens of a growing answer equal a fresh encoding, however the answer came."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from device_runtime.bridge.context import Context
from engines.tokenizer import Tokenizer
from export.pretokenizers import GPT2, LLAMA3, PRETOKENIZERS, QWEN2
from export.tokenizer import GgufVocabulary
from tests.tiny import tiny_tokenizer
from tests.tokenizer_strings import CODE, PROSE
from tests.vocabularies import HERE, byte_level, sentencepiece, sentencepiece_metadata, smollm2

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
    rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_ENDING}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def plain(text: str, **rules: bool) -> AddedToken:
    return AddedToken(text, **{"special": False, "normalized": False, **rules})


def special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


# Added tokens that overlap, hold a place where words end, or hide one another.
ADDED = (
    *(plain(text) for text in ("<tool>", "end of.", "a.b", "1 2", "<|x", "\n-", "    ")),
    *(special(text) for text in ("a <|", "<|im_end|>")),
)


def sentencepiece_with(
    change: dict[str, Any] | None = None, pre_tokenizer: Any = None, **model: Any
) -> Tokenizer:
    """The small SentencePiece vocabulary without a prefix space, other parts instead of its own."""
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    parts = json.loads(GgufVocabulary(metadata, HERE).tokenizer_json)
    parts["model"] |= model
    if pre_tokenizer is not None:
        parts |= {"normalizer": None, "pre_tokenizer": pre_tokenizer}
    return Tokenizer.from_json(json.dumps(parts | (change or {})))


def metaspace(scheme: str, split: bool) -> dict[str, Any]:
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}
    # What older files say instead.
    old = {"type": "Metaspace", "replacement": "▁", "str_rep": "▁", "add_prefix_space": True}
    return old if scheme == "old" else step


def added_json(*tokens: str, first: int, **rules: bool) -> list[dict[str, Any]]:
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return [{"id": first + i, "content": t, **usual, **rules} for i, t in enumerate(tokens)]


class Drafter(NamedTuple):
    """A vocabulary, and the same as one that never puts a space before a text."""

    own: Tokenizer
    fresh: Tokenizer
    keeps_bytes: bool = True  # what it encodes decodes to the same, in some normal form


def byte_level_drafter(*splits: Any, **options: Any) -> Drafter:
    own = byte_level(*splits, **options)
    return Drafter(own, own)


LLAMA_SIZE = sentencepiece_metadata  # resolved lazily below


@cache
def drafter(name: str) -> Drafter:
    family, _, detail = name.partition(":")
    if family == "smollm2":
        return Drafter(smollm2(detail), smollm2(detail), keeps_bytes=False)
    if family == "tiny":
        tiny = Tokenizer.from_json(tiny_tokenizer(int(detail)))
        return Drafter(tiny, tiny, keeps_bytes=False)
    return BYTE_LEVEL[detail]() if family == "byte-level" else SENTENCEPIECE[detail]()


def sentencepiece_drafter(scheme: str, split: bool) -> Drafter:
    return Drafter(
        sentencepiece_with(pre_tokenizer=metaspace(scheme, split)),
        sentencepiece_with(pre_tokenizer=metaspace("never", split)),
    )


def same(tokenizer: Tokenizer, **options: Any) -> Drafter:
    return Drafter(tokenizer, tokenizer, **options)


ONLY_WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
BYTE_LEVEL = {
    "gpt2": byte_level_drafter,
    "prefix": lambda: Drafter(byte_level(prefix_space=True), byte_level()),
    "qwen": lambda: byte_level_drafter(QWEN2, normalizer=normalizers.NFC(), added=ADDED),
    "llama3": lambda: byte_level_drafter(LLAMA3),
    "gpt4o": lambda: byte_level_drafter(GPT4O, added=ADDED),
    "deepseek": lambda: byte_level_drafter(*DEEPSEEK, normalizer=normalizers.Sequence([])),
    "default": lambda: byte_level_drafter(*PRETOKENIZERS["default"].patterns),
    "digits": lambda: byte_level_drafter(pre_tokenizers.Digits(individual_digits=True), GPT2),
    "falcon": lambda: byte_level_drafter(pre_tokenizers.Punctuation("contiguous"), GPT2),
    "unsplit": lambda: byte_level_drafter(r"\z"),
    # Forms for which nothing may be settled.
    "looks behind": lambda: byte_level_drafter(rf"(?<=\p{{L}})[' .]\p{{L}}+|{ONLY_WORDS}"),
    "looks at the beginning": lambda: byte_level_drafter(rf"\A[ '.]|{ONLY_WORDS}"),
    "anchored": lambda: byte_level_drafter(rf"^[ '.]|{ONLY_WORDS}"),
    "merged": lambda: byte_level_drafter(
        pre_tokenizers.Split(Regex(r"[ .']"), "merged_with_previous"), GPT2
    ),
    "NFKC": lambda: byte_level_drafter(QWEN2, normalizer=normalizers.NFKC()),
    "stripped": lambda: same(
        byte_level(QWEN2, normalizer=normalizers.Strip(left=True, right=True)), keeps_bytes=False
    ),
    "single word": lambda: byte_level_drafter(QWEN2, added=[plain(".b", single_word=True)]),
    "lstrip": lambda: byte_level_drafter(QWEN2, added=[plain("b", lstrip=True)]),
    "rstrip": lambda: byte_level_drafter(QWEN2, added=[plain("a", rstrip=True)]),
    "normalized": lambda: byte_level_drafter(
        QWEN2, normalizer=normalizers.NFC(), added=[plain("é b", normalized=True)]
    ),
}
SENTENCEPIECE = {
    "gguf": lambda: Drafter(sentencepiece(), sentencepiece_with()),
    "first": lambda: sentencepiece_drafter("first", split=False),
    "always": lambda: sentencepiece_drafter("always", split=True),
    "old": lambda: Drafter(
        sentencepiece_with(pre_tokenizer=metaspace("old", True)),
        sentencepiece_with(pre_tokenizer=metaspace("never", True)),
    ),
    "added": lambda: same(
        sentencepiece_with({"added_tokens": added_json("a b", "<tool>", "\n-", first=600)})
    ),
    # Forms for which nothing may be settled.
    "normalized": lambda: same(
        sentencepiece_with({"added_tokens": added_json("a b", first=600, normalized=True)})
    ),
    "fused": lambda: same(sentencepiece_with(byte_fallback=False), keeps_bytes=False),
    "fewer bytes": lambda: same(sentencepiece_without_bytes(), keeps_bytes=False),
    "whole": lambda: same(sentencepiece_with(ignore_merges=True)),
}
