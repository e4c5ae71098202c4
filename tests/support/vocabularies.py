"""Vocabularies for tests: SmolLM2's (byte-level), a small one of Llama 2's kind, and small
byte-level ones that split text in any way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from pilotfish.engines.token_bytes import CHARACTER_OF_BYTE
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.export.sources.default import fetch_default
from pilotfish.export.sources.gguf_file import GgufFile
from pilotfish.export.tokenizers.gguf import GgufVocabulary
from tests.support.tokenizer_strings import CODE, PROSE

HERE = Path("vocabulary.gguf")  # for error messages only


@cache
def smollm2_metadata() -> dict[str, object]:
    return dict(GgufFile(fetch_default(lambda label, done, total: None)).metadata)


@cache
def smollm2(pretokenizer: str = "smollm") -> Tokenizer:
    metadata = smollm2_metadata() | {"tokenizer.ggml.pre": pretokenizer}
    return Tokenizer.from_json(GgufVocabulary(metadata, HERE).tokenizer_json)


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """Merge as SentencePiece's BPE, in plain code: the best-scoring neighbours, leftmost first."""
    pieces = list(text)
    while True:
        unions = [left + right for left, right in pairwise(pieces)]
        candidates = [(-scores[union], i) for i, union in enumerate(unions) if union in scores]
        if not candidates:
            return pieces
        _, i = min(candidates)
        pieces[i : i + 2] = [unions[i]]


@cache
def sentencepiece_metadata() -> dict[str, object]:
    """Make a small Llama-2-like vocabulary: bytes, characters, and 200 joined pieces."""
    texts = ["▁" + text.replace(" ", "▁") for text in (*PROSE, *CODE)]
    characters = ["▁", *sorted(set("".join(texts)) - {"▁", "\n", "\t", "\r"})[:120]]
    scores = dict.fromkeys(characters, -1e6)
    for rank in range(200):
        counts: dict[str, int] = {}
        for text in texts:
            pieces = merge_by_score(text, scores)
            for left, right in pairwise(pieces):
                if left in scores and right in scores:
                    counts[left + right] = counts.get(left + right, 0) + 1
        best = max(counts, key=lambda union: (counts[union], union))
        scores[best] = -float(rank)
    control = ["<unk>", "<s>", "</s>"]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*control, *raw, *scores],
        "tokenizer.ggml.scores": [0.0] * 259 + list(scores.values()),
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(scores)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@cache
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_json(GgufVocabulary(sentencepiece_metadata(), HERE).tokenizer_json)


@cache
def _merged_bytes() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Make a vocabulary of all bytes, and merges of pairs that are common in texts that are hard to
    split, so that a wrong split shows.
    """
    order = random.Random(6)
    hard = sorted(set("abdlstxzé'.!=<|>/ \n\r12\u0301\u0338，好하".encode()))
    characters = [CHARACTER_OF_BYTE[byte] for byte in hard]
    pairs = [(left, right) for left in characters for right in characters]
    order.shuffle(pairs)
    longer = [(left + right, order.choice(characters)) for left, right in pairs[:200]]
    merges = pairs + longer
    tokens = [*CHARACTER_OF_BYTE.values(), *dict.fromkeys(left + right for left, right in merges)]
    return {token: id for id, token in enumerate(tokens)}, merges


def byte_level(
    *splits: str | pre_tokenizers.PreTokenizer,
    normalizer: tokenizers.normalizers.Normalizer | None = None,
    added: Sequence[AddedToken] = (),
    prefix_space: bool = False,
) -> Tokenizer:
    """Make a small byte-level vocabulary that splits text by patterns or pre-tokenizers, in turn.

    Without any it splits as GPT-2. The special token <|end|> follows, then the `added` ones.
    """
    vocabulary, merges = _merged_bytes()
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    steps = [
        pre_tokenizers.Split(Regex(split), "isolated") if isinstance(split, str) else split
        for split in splits
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=not splits)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens([AddedToken("<|end|>", special=True, normalized=False), *added])
    return Tokenizer.from_json(tokenizer.to_str())
