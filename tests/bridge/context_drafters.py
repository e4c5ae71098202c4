"""Drafters with tokenizers of every kind, and a fresh encoding to compare with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.export.tokenizers.gguf import GgufVocabulary
from pilotfish.export.tokenizers.pretokenizers import GPT2, LLAMA3, PRETOKENIZERS, QWEN2
from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.vocabularies import (
    HERE,
    byte_level,
    sentencepiece,
    sentencepiece_metadata,
    smollm2,
)

LETTERS, CAPITALS = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
BEFORE, ENDING = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    f"{BEFORE}{CAPITALS}*{LETTERS}+{ENDING}|{BEFORE}{CAPITALS}+{LETTERS}*{ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


def plain(text: str, **rules: bool) -> AddedToken:
    return AddedToken(text, **{"special": False, "normalized": False, **rules})


# They overlap, hold places where words end, and a special one hides another.
ADDED = [
    *(plain(text) for text in ("<tool>", "end of.", "a.b", "1 2", "<|x", "\n-", "    ")),
    *(AddedToken(text, special=True, normalized=False) for text in ("a <|", "<|im_end|>")),
]


class Drafter(NamedTuple):
    """A vocabulary, and its twin that never puts a space before a text.

    `keeps_bytes`: whether what it encodes decodes to the same, in some normal form.
    """

    vocabulary: Tokenizer
    twin: Tokenizer
    keeps_bytes: bool = True


def same(tokenizer: Tokenizer, *, keeps_bytes: bool = True) -> Drafter:
    return Drafter(tokenizer, tokenizer, keeps_bytes)


def marked(
    *, added: Sequence[AddedToken] = (), vocabulary: dict[str, int] | None = None, **parts: Any
) -> Tokenizer:
    """The small SentencePiece vocabulary without prefix space, with changes."""
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    whole = json.loads(GgufVocabulary(metadata, HERE).tokenizer_json)
    whole["model"] |= parts.pop("model", {})
    whole["model"]["vocab"] |= vocabulary or {}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(whole | parts))
    tokenizer.add_tokens(list(added))
    return Tokenizer.from_json(tokenizer.to_str())


def metaspace(scheme: str, split: bool) -> Tokenizer:
    step: dict[str, Any] = {"type": "Metaspace", "replacement": "▁"}
    if scheme == "old":  # what older files say
        step |= {"str_rep": "▁", "add_prefix_space": True}
    else:
        step |= {"prepend_scheme": scheme, "split": split}
    tokenizer = marked(normalizer=None, pre_tokenizer=step)
    return Tokenizer.from_json(json.dumps(json.loads(tokenizer._json) | {"pre_tokenizer": step}))


def metaspaced(scheme: str, split: bool) -> Drafter:
    return Drafter(metaspace(scheme, split), metaspace("never", split))


def spaced_once() -> Tokenizer:
    """As of a tokenizer.model with user-defined pieces: spaces are marked, then one more is put."""
    steps = [
        {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme, "split": False}
        for mark, scheme in ((" ", "first"), ("▁", "never"))
    ]
    return marked(pre_tokenizer={"type": "Sequence", "pretokenizers": steps})


def without_bytes() -> Tokenizer:
    """SentencePiece without some byte tokens: characters that need them become <unk> together."""
    whole = json.loads(marked()._json)
    for byte in (0xE4, 0xE5, 0xF0):
        whole["model"]["vocab"][f"unused {byte}"] = whole["model"]["vocab"].pop(f"<0x{byte:02X}>")
    return Tokenizer.from_json(json.dumps(whole))


# Settled by words.
BYTE_LEVEL: dict[str, Callable[[], Drafter]] = {
    **{
        f"smollm2 {name}": lambda name=name: same(smollm2(name), keeps_bytes=False)
        for name in ("smollm", "gpt-2", "qwen2", "llama-bpe", "default")
    },
    "gpt2": lambda: same(byte_level()),
    "gpt2 prefix": lambda: Drafter(byte_level(prefix_space=True), byte_level()),
    "qwen": lambda: same(byte_level(QWEN2, normalizer=normalizers.NFC(), added=ADDED)),
    "llama3": lambda: same(byte_level(LLAMA3)),
    "gpt4o": lambda: same(byte_level(GPT4O, added=ADDED)),
    "deepseek": lambda: same(
        byte_level(
            *DEEPSEEK, normalizer=normalizers.Sequence([]), added=[plain("b.", normalized=True)]
        )
    ),
    "default": lambda: same(byte_level(*PRETOKENIZERS["default"].patterns)),
    "digits": lambda: same(byte_level(pre_tokenizers.Digits(True), GPT2)),
    "falcon": lambda: same(byte_level(pre_tokenizers.Punctuation("contiguous"), GPT2)),
    "tiny": lambda: same(Tokenizer.from_json(tiny_tokenizer(128)), keeps_bytes=False),
    "tiny with bytes": lambda: same(Tokenizer.from_json(tiny_tokenizer(400))),
}


# Settled between characters that no token joins.
SENTENCEPIECE: dict[str, Callable[[], Drafter]] = {
    "sentencepiece": lambda: Drafter(sentencepiece(), marked()),
    "metaspace first": lambda: metaspaced("first", False),
    "metaspace twice": lambda: Drafter(spaced_once(), marked()),
    "metaspace always": lambda: metaspaced("always", True),
    "metaspace old": lambda: metaspaced("old", True),
    "sentencepiece added": lambda: same(
        marked(added=[plain("q z"), plain("<tool>"), plain("\n-"), plain("!▁z")])
    ),
}


# Forms for which nothing is settled.
ODD: dict[str, Callable[[], Drafter]] = {
    "looks behind": lambda: same(byte_level(rf"(?<=\p{{L}})[' .]\p{{L}}+|{WORDS}")),
    "looks at the beginning": lambda: same(byte_level(rf"\A[ '.]|{WORDS}")),
    "anchored": lambda: same(byte_level(rf"^[ '.]|{WORDS}")),
    "looks for a word": lambda: same(byte_level(rf"\b[ '.]\p{{L}}+|{WORDS}")),
    "merged": lambda: same(
        byte_level(pre_tokenizers.Split(Regex(r"[.']"), "merged_with_next"), r".{5}")
    ),
    "string": lambda: same(byte_level(pre_tokenizers.Split(".", "isolated"), WORDS)),
    "NFKC": lambda: same(byte_level(QWEN2, normalizer=normalizers.NFKC())),
    "strip": lambda: same(byte_level(QWEN2, normalizer=normalizers.Strip()), keeps_bytes=False),
    "single word": lambda: same(byte_level(QWEN2, added=[plain(".b", single_word=True)])),
    "lstrip": lambda: same(byte_level(QWEN2, added=[plain(".", lstrip=True)]), keeps_bytes=False),
    "rstrip": lambda: same(byte_level(QWEN2, added=[plain("a", rstrip=True)]), keeps_bytes=False),
    "normalized": lambda: same(
        byte_level(QWEN2, normalizer=normalizers.NFC(), added=[plain("é b", normalized=True)])
    ),
    "unsplit": lambda: same(byte_level(r"\p{Cs}")),
    "unknown fused": lambda: same(marked(model={"byte_fallback": False}), keeps_bytes=False),
    "unknown fused without a byte": lambda: same(without_bytes(), keeps_bytes=False),
    # It takes even a text "<s>" for that token.
    "whole text": lambda: same(
        marked(vocabulary={"zq": 900}, model={"ignore_merges": True}), keeps_bytes=False
    ),
}
DRAFTERS = BYTE_LEVEL | SENTENCEPIECE | ODD
TARGETS = ("smollm2 qwen2", "sentencepiece", "tiny with bytes", "qwen")


@cache
def drafter(name: str) -> Drafter:
    return DRAFTERS[name]()


@cache
def specials_of(tokenizer: Tokenizer) -> list[int]:
    return [id for id in range(tokenizer.vocab_size) if tokenizer.is_special(id)]


def fresh(
    ids: Sequence[int], target: Tokenizer, drafter: Drafter, specials: dict[int, int]
) -> list[int]:
    """The law, as plainly as possible."""
    ours: list[int] = []
    for special, run in groupby(ids, target.is_special):
        if special:
            ours += [specials[id] for id in run if id in specials]
            continue
        text = b"".join(map(target.token_bytes, run)).decode("utf-8", "surrogateescape")
        for part in re.split("([\udc80-\udcff])", text):
            if not part:
                continue
            byte = ord(part[0]) - 0xDC00
            if not 0x80 <= byte <= 0xFF:
                ours += drafter.twin.encode(part)
                continue
            piece = drafter.vocabulary.byte_token(byte)
            ours += drafter.twin.encode("\ufffd") if piece is None else [piece]
    return ours


def data_of(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(id) for id in ids if not tokenizer.is_special(id))
