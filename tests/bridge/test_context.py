"""The drafter's tokens of a growing answer equal a fresh encoding, however the answer came."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pilotfish.bridge.context import ContextTranslator
from pilotfish.engines.tokenizer import Tokenizer
from tests.bridge.context_drafters import (
    BYTE_LEVEL,
    DRAFTERS,
    ODD,
    SENTENCEPIECE,
    TARGETS,
    data_of,
    drafter,
    fresh,
    specials_of,
)
from tests.support.examples import examples
from tests.support.thinned import thinned
from tests.support.vocabularies import (
    merge_by_score,
    sentencepiece_metadata,
)

# What patterns, merges, normal forms and added tokens are particular about.
ATOMS = (
    *("a", "b", "don", "it", "x", "The", "fox", "end of", "É", "é", "e\u0301", "ſ", "zq", "q", "z"),
    *(" ", " ", "  ", "    ", "\n", "\r\n", "\n\n", "\t", "\u00a0", "\u3000", "\u0085", "\x1c"),
    *("'s", "'l", "l", "'ll", "'", "'RE", "'ve", "’s", "'t"),
    *("!", ".", "...", "?!", "$", "=", "<", "`", "-", "--", "/", "+", "\u0338", "\u037e", "≠"),
    *("1", "2", "12", "1234", "½", "²", "Ⅷ", "٣", "५"),
    *("\u0301", "\u0302\u0323", "\u0323", "\u09c7", "\u09be", "क", "ि", "\u0f71", "\u212a"),
    *("\u1112", "\u1161", "\u11ab", "한", "하", "你好", "世", "，", "。", "ありがとう", "・", "カ"),
    *("👩‍👩‍👧", "😀", "\u200d", "🏽", "🇩🇪", "\x00", "\x7f", "\ufeff", "\ufffd", "\u0378", "𐀀"),
    *(
        "▁",
        " ▁",
        "▁a",
        "<tool>",
        "<to",
        "ol>",
        "<|",
        "<|x",
        "|>",
        "a <|",
        "a.b",
        "1 2",
        "\n-",
        ".b",
    ),
    *("<|end|>", "<|im_end|>", "<s>", "<0x0A>", "<unk>", "é b", "q z", "!▁z"),
)
texts = st.one_of(
    st.lists(st.sampled_from(ATOMS), min_size=1, max_size=12).map("".join),
    st.text(max_size=6),
    st.text(st.sampled_from("ab '.1\n!é\u0301"), max_size=10),
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[int]]:
    """A target, and ids: encoded text, its bytes one by one, any tokens, special tokens."""
    name = draw(st.sampled_from(TARGETS))
    target = drafter(name).vocabulary
    ids: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        match draw(st.integers(0, 9)):
            case 0:
                ids += draw(st.lists(st.integers(0, target.vocab_size + 2), max_size=4))
            case 1:
                ids += draw(st.lists(st.sampled_from(specials_of(target)), max_size=2))
            case 2 | 3 | 4:
                for byte in draw(texts).encode():
                    id = target.byte_token(byte)
                    ids += [] if id is None else [id]
            case _:
                ids += target.encode_rest(draw(texts)).ids
    return name, ids


def chunks(ids: Sequence[int], cuts: Iterator[int]) -> Iterator[NDArray[np.uint32]]:
    """The answer as it grows, by `cuts` tokens each time."""
    at = 0
    while at < len(ids):
        at += next(cuts)
        yield np.array(ids[:at], np.uint32)


# Of each kind of vocabulary some; `HARD` is read by all.
SOME = [
    *("smollm2 qwen2", "gpt2 prefix", "qwen", "deepseek", "tiny with bytes", "sentencepiece"),
    *("metaspace always", "sentencepiece added", "looks behind", "unknown fused"),
]


@pytest.mark.parametrize("name", thinned(DRAFTERS, SOME))
@examples(60)
@given(answers(), st.randoms(use_true_random=False))
def test_own_tokens_are_a_fresh_encoding_at_every_border(
    name: str, answer: tuple[str, list[int]], random: Any
) -> None:
    (ours, _, keeps_bytes), target, ids = drafter(name), drafter(answer[0]).vocabulary, answer[1]
    # Every second special token has a counterpart.
    specials = dict.fromkeys(specials_of(target)[::2], specials_of(ours)[0])
    one_by_one, in_chunks = (
        ContextTranslator(target, ours, specials),
        ContextTranslator(target, ours, specials),
    )
    expected = {n: fresh(ids[:n], target, drafter(name), specials) for n in range(len(ids) + 1)}
    for n, ids_n in enumerate(chunks(ids, iter([1] * len(ids))), 1):
        assert one_by_one.translate(ids_n).tolist() == expected[n], data_of(target, ids[:n])
        if keeps_bytes:
            mine, theirs = data_of(ours, expected[n]), data_of(target, ids[:n])
            assert text_of(mine) == text_of(theirs)
    for ids_n in chunks(ids, iter(lambda: random.randint(1, 7), 0)):
        assert in_chunks.translate(ids_n).tolist() == expected[len(ids_n)]


def text_of(data: bytes) -> str:
    """The text that bytes stand for; SentencePiece writes a space as "▁", and so reads that."""
    text = data.decode("utf-8", "surrogateescape").replace("▁", " ")
    return normalize("NFKC", text)


# Each is cut at a wrong place where one of the rules is left out.
HARD = (
    "b'll b'l b've.",
    "a  \n  \n  b   b \n\n1\n 2",
    "ab1.b 22x.. a <|x a.b end of. a.b.b",
    "z<tool>b 1 2 1 2. x\n-b\n--",
    "e\u0301 e.\u0338b =\u0338= x=\u0338b é b é.b",
    "\u1112\u1161\u11ab 하\u11ab. .\u11ab\u1161",
    "b!zq zq.b z.bz. a  .b a .  b",
    "你好世。你好，世界. 好b 1好 12好",
    "a.b'b' b.b .b'a 'b",
    "...!!!==/b/\r\n/ b.\r\nb",
    "▁a ▁ ▁b!▁z q z ",
    "a\n      \n  b \t\t \n    \n.",
    "be\u0338\u0338\u0338\u0338\u0338\u0301. e\u0338b\u0338\u0301",
)


@pytest.mark.parametrize("name", DRAFTERS)
def test_hard_texts_byte_by_byte(name: str) -> None:
    target, ours = drafter("tiny with bytes").vocabulary, drafter(name).vocabulary
    for text in HARD:
        ids = [target.byte_token(byte) or 0 for byte in text.encode()]
        context = ContextTranslator(target, ours, {})
        for answer in chunks(ids, iter([1] * len(ids))):
            expected = fresh(answer.tolist(), target, drafter(name), {})
            assert context.translate(answer).tolist() == expected, data_of(target, answer.tolist())


ENGLISH = (
    "To solve this, we need to find how many apples Janet has left. She starts with 16 apples and "
    "eats 3 of them, so 16 - 3 = 13.\n\nThen she doesn't sell the rest: it's her friend's day!\n"
)
CHINESE = "为了解决这个问题，我们先计算还剩下多少个苹果。她一开始有十六个苹果，吃掉了三个。\n"
HINDI = "वह सोलह सेब से शुरू करती है, और तीन खाती है।\n"
NUMBERS = "".join(f"{number}\n" for number in range(60))
LINES = "apple\nbanana\ncherry\n"
CODE = (
    "def f(x: int) -> int:\n    for i in range(10):\n        x += i ** 2  # square\n    return x\n"
)


class Recorded:
    """A tokenizer that writes down the texts that are encoded with it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.texts = tokenizer, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_rest(self, text: str) -> tokenizers.Encoding:
        self.texts.append(text)
        return self._tokenizer.encode_rest(text)


@pytest.mark.parametrize("text", [ENGLISH, CHINESE, HINDI, NUMBERS, LINES, CODE])
@pytest.mark.parametrize("name", [*(name for name in BYTE_LEVEL if name != "tiny"), *SENTENCEPIECE])
def test_only_the_tail_is_encoded_again(name: str, text: str) -> None:
    target, ours = drafter("smollm2 qwen2").vocabulary, Recorded(drafter(name).vocabulary)
    ids = target.encode(text * 5)
    context = ContextTranslator(target, ours, {})
    for answer in chunks(ids, iter([1] * len(ids))):
        last = context.translate(answer)
    assert last.tolist() == drafter(name).twin.encode(text * 5)
    assert max(map(len, ours.texts)) < 45, max(ours.texts, key=len)


@pytest.mark.parametrize("name", ODD)
def test_where_a_tokenizer_is_odd_all_the_text_is(name: str) -> None:
    target, ours = drafter("smollm2 qwen2").vocabulary, Recorded(drafter(name).vocabulary)
    ids = np.array(target.encode(ENGLISH), np.uint32)
    context = ContextTranslator(target, ours, {})
    for n in (3, 50, len(ids)):
        context.translate(ids[:n])
    assert ours.texts[-1] == ENGLISH


def test_an_answer_that_has_not_grown_costs_nothing() -> None:
    target, ours = drafter("smollm2 qwen2").vocabulary, Recorded(drafter("gpt2").vocabulary)
    context = ContextTranslator(target, ours, {})
    answer = np.array(target.encode(ENGLISH), np.uint32)
    first = context.translate(answer)
    del ours.texts[:]
    assert np.array_equal(context.translate(answer.copy()), first)
    assert ours.texts == []


def test_another_answer_is_begun_anew() -> None:
    target, ours = drafter("smollm2 qwen2").vocabulary, drafter("gpt2").vocabulary
    context = ContextTranslator(target, ours, {})
    answers = [target.encode(text) for text in ("One, two. Three", "One, two", "Six, seven", "")]
    cut_short = [target.byte_token(byte) for byte in "a é".encode()[:-1]]
    for ids in [*answers, cut_short, answers[0], cut_short]:
        answer = np.array(ids, np.uint32)
        assert context.translate(answer).tolist() == fresh(ids, target, drafter("gpt2"), {})
    context.restart()
    assert context.translate(np.array(answers[0], np.uint32)).tolist() == ours.encode(
        "One, two. Three"
    )


def test_an_array_that_is_written_over_is_another_answer() -> None:
    target, ours = drafter("smollm2 qwen2").vocabulary, drafter("gpt2").vocabulary
    context = ContextTranslator(target, ours, {})
    answer = np.array(target.encode("one"), np.uint32)
    context.translate(answer)
    [answer[0]] = target.encode("two")
    assert context.translate(answer).tolist() == ours.encode("two")


def test_what_is_returned_is_the_callers() -> None:
    target = drafter("smollm2 qwen2").vocabulary
    context = ContextTranslator(target, drafter("gpt2").vocabulary, {})
    answer = np.array(target.encode(ENGLISH), np.uint32)
    first = context.translate(answer)
    copy = first.copy()
    first[:] = -1
    assert np.array_equal(context.translate(answer), copy)


def test_bytes_wait_as_single_tokens_until_they_are_text() -> None:
    target, ours = drafter("smollm2 qwen2").vocabulary, drafter("gpt2").vocabulary
    ids = np.array([target.byte_token(byte) for byte in "é".encode()], np.uint32)
    context = ContextTranslator(target, ours, {})
    assert context.translate(ids[:1]).tolist() == [ours.byte_token(0xC3)]
    assert context.translate(ids).tolist() == ours.encode("é")
    assert ours.encode("é") != [ours.byte_token(byte) for byte in "é".encode()]


def test_a_byte_that_the_drafter_lacks_is_a_replacement_character() -> None:
    target, ours = drafter("tiny with bytes").vocabulary, drafter("smollm2 smollm").vocabulary
    assert ours.byte_token(0xF8) is None
    ids = np.array([target.byte_token(0xF8)], np.uint32)
    assert ContextTranslator(target, ours, {}).translate(ids).tolist() == ours.encode("\ufffd")


def test_special_tokens_are_mapped_or_dropped() -> None:
    target, ours = drafter("smollm2 qwen2").vocabulary, drafter("qwen").vocabulary
    ids = np.array(target.encode("a<|im_start|>b<|im_end|>c", special=True), np.uint32)
    end = ours.encode("<|end|>", special=True)
    assert ContextTranslator(target, ours, {2: end[0]}).translate(ids).tolist() == (
        ours.encode("a") + ours.encode("b") + end + ours.encode("c")
    )


@pytest.mark.parametrize("name", ["sentencepiece", "metaspace first"])
def test_an_answer_gets_no_space_before_it(name: str) -> None:
    metadata = sentencepiece_metadata()
    scores: dict[str, float] = dict(
        zip(
            metadata["tokenizer.ggml.tokens"][259:],
            metadata["tokenizer.ggml.scores"][259:],
            strict=True,
        )
    )
    text = "the quick fox (the lazy dog)"
    ids = drafter(name).vocabulary.encode_rest(text).ids
    assert [drafter(name).vocabulary.piece(id) for id in ids] == merge_by_score(
        text.replace(" ", "▁"), scores
    )
    assert drafter(name).vocabulary.encode(text) != ids


def test_a_file_that_asks_for_truncation_and_padding_loses_no_text() -> None:
    whole = tokenizers.Tokenizer.from_str(drafter("gpt2").vocabulary._json)
    whole.enable_truncation(4)
    whole.enable_padding(length=16)
    ours = Tokenizer.from_json(whole.to_str())
    assert (
        ours.encode(ENGLISH)
        == ours.encode_rest(ENGLISH).ids
        == drafter("gpt2").vocabulary.encode(ENGLISH)
    )
    assert ours.encode("a", special=True) == drafter("gpt2").vocabulary.encode("a")


def test_a_long_prompt_is_quick() -> None:
    target, ours = drafter("smollm2 qwen2").vocabulary, drafter("smollm2 smollm").vocabulary
    ids = np.array(target.encode(ENGLISH * 140, special=True), np.uint32)
    ids[::50] = 1  # <|im_start|>
    assert len(ids) > 8000
    ours.encode_rest("a")
    started = time.process_time()
    ContextTranslator(target, ours, {1: 1}).translate(ids)
    assert time.process_time() - started < 1.0  # 0.05 s
