"""tekken.json alone: the ids are those of tiktoken's rule on its ranks."""

from __future__ import annotations

import base64
import json
import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.export.export_errors import ExportError
from pilotfish.export.tokenizers.pretokenizers import TEKKEN
from pilotfish.export.tokenizers.tekken import OLD_SPECIAL, tekken_tokenizer_json
from tests.support.examples import examples
from tests.support.tokenizer_strings import CJK, CODE, PROSE, make_strings

SPECIAL = 30


def join(data: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Tiktoken's rule, in plain code: a whole token, or the first-ranked unions, leftmost first."""
    if data in ranks:
        return [data]
    parts = [bytes([byte]) for byte in data]
    while True:
        unions = [left + right for left, right in pairwise(parts)]
        candidates = [(ranks[union], at) for at, union in enumerate(unions) if union in ranks]
        if not candidates:
            return parts
        _, at = min(candidates)
        parts[at : at + 2] = [unions[at]]


def split(text: str) -> list[str]:
    """The pieces of a text, by the pattern."""
    result = pre_tokenizers.Split(Regex(TEKKEN), "isolated").pre_tokenize_str(text)
    return [piece for piece, _ in result]


@cache
def ranks() -> dict[bytes, int]:
    """All bytes, then unions that are common, then some that no union of two others makes."""
    order = list(range(256))
    random.Random(1).shuffle(order)
    results = {bytes([byte]): rank for rank, byte in enumerate(order)}
    words = [piece.encode() for text in (*PROSE, *CODE, *CJK, "aab ab aba abab") * 2
             for piece in split(text)]  # fmt: skip
    for _ in range(300):
        counts: dict[bytes, int] = {}
        for word in words:
            for left, right in pairwise(join(word, results)):
                counts[left + right] = counts.get(left + right, 0) + 1
        best = max(counts, key=lambda union: (counts[union], union))
        results[best] = len(results)
    for whole in (b"xqzj", b" xqzj", "ﬁ ﬂ".encode()[:5], b"aabba", b"bab"):
        results.setdefault(whole, len(results))
    return results


def tekken(**changes: Any) -> dict[str, Any]:
    """The file's content; changes: of its config."""
    config = {
        "pattern": TEKKEN,
        "default_vocab_size": len(ranks()) + SPECIAL,
        "default_num_special_tokens": SPECIAL,
        "version": "v3",
    }
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks().items()
    ]
    beyond = [{"rank": len(vocab), "token_bytes": base64.b64encode(b"Dear ").decode()}]
    return {"config": {**config, **changes}, "vocab": vocab + beyond}


def read(content: object) -> Tokenizer:
    with TemporaryDirectory() as folder:
        (Path(folder) / "tekken.json").write_text(json.dumps(content))
        return Tokenizer.from_json(tekken_tokenizer_json(Path(folder)))


@cache
def tokenizer() -> Tokenizer:
    return read(tekken())


def expected(text: str) -> list[int]:
    return [
        SPECIAL + ranks()[part] for piece in split(text) for part in join(piece.encode(), ranks())
    ]


def test_ids_are_tiktokens() -> None:
    ours = tokenizer()
    assert ours.vocab_size == len(ranks()) + SPECIAL
    for text in make_strings():
        assert ours.encode(text) == expected(text), text
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("xqzj") == [SPECIAL + ranks()[b"xqzj"]]  # a token, though nothing joins it


@examples(400, deadline=None)
@given(st.one_of(st.text("aabb xqzj'ﬁé\n1", max_size=24), st.text(max_size=30)))
def test_ids_of_any_text_are_tiktokens(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    assert tokenizer().encode(text) == expected(text)


def test_special_tokens_have_the_first_ids() -> None:
    ours = tokenizer()
    names = [*OLD_SPECIAL, *(f"<SPECIAL_{id}>" for id in range(len(OLD_SPECIAL), SPECIAL))]
    assert [ours.piece(id) for id in range(SPECIAL)] == names
    assert all(ours.is_special(id) for id in range(SPECIAL))
    assert ours.encode("<s>[INST]", special=True) == [1, 3]
    assert not {1, 3}.intersection(ours.encode("<s>[INST]"))
    assert ours.beginning == [1]
    named = [{"rank": 1, "token_str": "<b>"}, {"rank": 0, "token_str": "<s>", "is_control": True}]
    newer = read(
        tekken(default_num_special_tokens=3, default_vocab_size=300, version="v13")
        | {"special_tokens": named}
    )
    assert [newer.piece(id) for id in range(3)] == ["<s>", "<b>", "<SPECIAL_2>"]
    assert newer.vocab_size == 300


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([], "cannot be read"),
        ({"vocab": []}, "missing required field `config`"),
        (tekken() | {"vocab": []}, "fewer tokens than the number it states"),
        (tekken() | {"vocab": tekken()["vocab"][::-1]}, "not sorted by rank"),
        (tekken(pattern="("), "damaged"),
        (tekken(version="v11"), "states no special tokens"),
        (tekken() | {"special_tokens": [{"rank": 1, "token_str": "a"}]}, "not numbered 0, 1, 2"),
        (tekken(default_num_special_tokens=3), "more special tokens than the number it states"),
        (
            tekken(default_num_special_tokens=2, default_vocab_size=300)
            | {"special_tokens": [{"rank": 0, "token_str": "a"}]},
            "a token twice",
        ),
        (tekken(default_vocab_size=100), "not the 256 bytes"),
    ],
)
def test_damaged_files_are_refused_by_name(content: object, named: str) -> None:
    with pytest.raises(ExportError, match=named):
        read(content)
