"""Two vocabularies for tests: SmolLM2's (byte-level) and a small one of Llama 2's kind."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

from engines.tokenizer import Tokenizer
from export.sources.default import fetch_default
from export.sources.gguf_file import GgufFile
from export.tokenizer import GgufVocabulary
from tests.tokenizer_strings import CODE, PROSE

HERE = Path("vocabulary.gguf")  # named in errors only


@cache
def smollm2_metadata() -> dict[str, object]:
    return dict(GgufFile(fetch_default(lambda label, done, total: None)).metadata)


@cache
def smollm2(pretokenizer: str = "smollm") -> Tokenizer:
    metadata = smollm2_metadata() | {"tokenizer.ggml.pre": pretokenizer}
    return Tokenizer.from_json(GgufVocabulary(metadata, HERE).tokenizer_json)


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE, as plainly as possible: join the best-scoring neighbours, leftmost
    first, until none are left."""
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
    """A small Llama-2-like vocabulary: bytes, characters, and 200 joined pieces."""
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
