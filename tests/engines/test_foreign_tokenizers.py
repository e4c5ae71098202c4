"""A vocabulary from a stranger is of a known kind, or refused before the library breaks at it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.foreign import MAX_GROWTH, MAX_TOKENS, check_foreign
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.engines.vocabulary import Vocabulary
from tests.support.tiny_tokenizer import EOS, tiny_tokenizer
from tests.support.tokenizer_strings import CODE, PROSE
from tests.support.vocabularies import sentencepiece_metadata, smollm2

SIZE = 400
PLAIN: dict[str, Any] = json.loads(tiny_tokenizer(SIZE))
BYTE_LEVEL: dict[str, Any] = PLAIN["pre_tokenizer"]


def vocabulary(tokenizer_json: str, **changes: Any) -> Vocabulary:
    made = Vocabulary(
        model="x", tokenizer_json=tokenizer_json, vocab_size=SIZE, bos_id=None,
        eos_ids=[SIZE - 1], chat_template=None,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def changed(**parts: Any) -> str:
    return json.dumps(PLAIN | parts)


def split(pattern: dict[str, str]) -> dict[str, Any]:
    step = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return sequence("pretokenizers", step, {**BYTE_LEVEL, "use_regex": False})


def sequence(name: str, *steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}


def template(*single: Any, **special: Any) -> dict[str, Any]:
    pair = [{"Sequence": {"id": id, "type_id": 0}} for id in "AB"]
    return {
        "type": "TemplateProcessing", "single": list(single), "pair": pair,
        "special_tokens": special,
    }  # fmt: skip


def model(**changes: Any) -> dict[str, Any]:
    return {**PLAIN["model"], **changes}


def token(id: int, content: str) -> dict[str, Any]:
    return {**PLAIN["added_tokens"][0], "id": id, "content": content}


TEXT_ITSELF = {"Sequence": {"id": "A", "type_id": 0}}
BEGINNING = {"SpecialToken": {"id": "<s>", "type_id": 0}}
REFUSED: dict[str, str] = {
    "no object": "[]",
    "deep": '{"model": ' + "[" * 1_000_000,
    "a key twice": '{"normalizer": {"type": "NFC"}, ' + tiny_tokenizer(SIZE)[1:],
    "tables that abort the process": changed(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAAAAAA"}
    ),
    "text that becomes longer": changed(normalizer=replace("a" * (MAX_GROWTH + 1))),
    "text that becomes longer each time": changed(
        normalizer=sequence("normalizers", *[replace("aaa")] * 4)
    ),
    "text that becomes longer further down": changed(
        normalizer=sequence("normalizers", sequence("normalizers", *[replace("a" * 9)] * 2))
    ),
    "a very long first word": changed(
        normalizer={"type": "Prepend", "prepend": "a" * (MAX_GROWTH + 1)}
    ),
    "an unknown step": changed(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "an unknown step further down": changed(
        pre_tokenizer=sequence("pretokenizers", {"type": "FixedLength", "length": 0}, BYTE_LEVEL)
    ),
    "a step without a name": changed(pre_tokenizer={"pretokenizers": [BYTE_LEVEL]}),
    "a bad pattern": changed(pre_tokenizer=split({"Regex": "("})),
    "a pattern beyond measure": changed(pre_tokenizer=split({"Regex": "a|" * 5000})),
    "a deep pattern": changed(pre_tokenizer=split({"Regex": "(" * 4000 + ")" * 4000})),
    "chance": changed(model=model(dropout=0.5)),
    "a prefix that is longer than a token": changed(
        model=model(continuing_subword_prefix="longer", merges=[["a", "b"]])
    ),
    "a merge of nothing": changed(model=model(merges=[["a", "zzzz"]])),
    "a token far away": changed(model=model(vocab={**PLAIN["model"]["vocab"], "zz": 2**32 - 1})),
    "a token too many": changed(model=model(vocab={**PLAIN["model"]["vocab"], "zz": SIZE})),
    "an added token far away": changed(added_tokens=[token(MAX_TOKENS, "<x>")]),
    "an added token of nothing": changed(added_tokens=[token(SIZE - 1, "")]),
    "another model": changed(model=model(type="WordPiece")),
    "unigrams": changed(model={"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}),
    "a template of the second text": changed(
        post_processor=template({"Sequence": {"id": "B", "type_id": 0}})
    ),
    "a beginning that is no token": changed(
        post_processor=template(
            BEGINNING, TEXT_ITSELF, **{"<s>": {"id": "<s>", "ids": [SIZE], "tokens": ["<s>"]}}
        )
    ),
    "another family": changed(decoder={"type": "BPEDecoder", "suffix": "</w>"}),
}


@pytest.mark.parametrize("tokenizer_json", REFUSED.values(), ids=REFUSED.keys())
def test_what_no_language_model_has_is_refused(tokenizer_json: str) -> None:
    with pytest.raises(ArtifactError):
        Vocabulary.decode(vocabulary(tokenizer_json).encode(), "x")


def repeated(count: int) -> dict[str, str]:
    """Tokenizers that the library takes, and that say something so many times."""
    many = {"<s>": {"id": "<s>", "ids": [0] * count, "tokens": ["<s>"] * count}}
    return {
        "a text": changed(post_processor=template(*[TEXT_ITSELF] * count)),
        "a token": changed(post_processor=template(BEGINNING, TEXT_ITSELF, **many)),
        "a step": changed(normalizer=sequence("normalizers", *[{"type": "NFC"}] * count)),
        "an added token": changed(added_tokens=[token(SIZE, "x" * 1000)] * count),
        "one that grows": changed(
            normalizer=replace("x" * MAX_GROWTH), added_tokens=[token(SIZE, "xy" * 8)] * count
        ),
    }


@pytest.mark.parametrize("what", repeated(1))
def test_nothing_is_said_more_often_than_a_language_model_says_it(what: str) -> None:
    check_foreign(repeated(2)[what])
    with pytest.raises(ArtifactError, match=r"length <= |any language model's"):
        check_foreign(repeated(3000)[what])


BREAKS: dict[str, tuple[str, str]] = {
    "backtracking without end": (
        changed(pre_tokenizer=split({"Regex": "(?:a|aa)+$b"})),
        "a" * 60,
    ),
    "a replacement of nothing": (
        changed(normalizer=replace("bb", Regex="(?=c)")),
        "c" * 60,
    ),
}


@pytest.mark.parametrize(("tokenizer_json", "text"), BREAKS.values(), ids=BREAKS.keys())
def test_where_the_library_panics_there_is_a_typed_error(tokenizer_json: str, text: str) -> None:
    decoded = Vocabulary.decode(vocabulary(tokenizer_json).encode(), "x")
    for encode in (decoded.tokenizer.encode, decoded.tokenizer.encode_rest):
        with pytest.raises(ArtifactError, match="failed at a text"):
            encode(text)
    assert decoded.tokenizer.encode("b d"), "and it goes on afterwards"


def test_a_panic_while_reading_is_a_typed_error() -> None:
    """As `Tokenizer` meets it in a file of one's own, which is not looked through."""
    for bad in ("a prefix that is longer than a token", "a template of the second text"):
        with pytest.raises(ArtifactError):
            assert Tokenizer.from_json(REFUSED[bad]).beginning


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_none_of_the_librarys_panics(
    stop: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(text: str) -> Any:
        raise stop

    monkeypatch.setattr("pilotfish.engines.tokenizer.json.loads", interrupted)
    with pytest.raises(stop):
        Tokenizer.from_json(tiny_tokenizer(SIZE))


def sentencepiece_json() -> str:
    from pilotfish.export.tokenizers.gguf import GgufVocabulary
    from tests.support.vocabularies import HERE

    return GgufVocabulary(sentencepiece_metadata(), HERE).tokenizer_json


# As they are in the files of models; the tokens are those of the tiny one.
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+"
TAKEN: dict[str, Callable[[], str]] = {
    "tiny": lambda: tiny_tokenizer(SIZE),
    "SmolLM2": lambda: smollm2()._json,
    "Llama 2": sentencepiece_json,
    "Llama 3": lambda: changed(
        pre_tokenizer=split({"Regex": LLAMA_3}),
        post_processor=sequence(
            "processors",
            BYTE_LEVEL,
            template(
                BEGINNING, TEXT_ITSELF, **{"<s>": {"id": EOS, "ids": [399], "tokens": [EOS]}}
            ),
        ),
        model=model(ignore_merges=True),
    ),
    "Qwen": lambda: changed(
        normalizer={"type": "NFC"},
        pre_tokenizer=split({"Regex": LLAMA_3}),
        model=model(continuing_subword_prefix="", end_of_word_suffix=""),
    ),
    "Gemma": lambda: changed(
        normalizer=replace("▁", String=" "), pre_tokenizer=split({"String": " "})
    ),
    "Falcon": lambda: changed(
        pre_tokenizer=sequence(
            "pretokenizers",
            {"type": "Punctuation", "behavior": "Contiguous"},
            BYTE_LEVEL,
            {"type": "Digits", "individual_digits": False},
        )
    ),
    "with truncation and padding": lambda: changed(
        truncation={
            "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 5,
        },
        padding={
            "strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "a",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("tokenizer_json", TAKEN.values(), ids=TAKEN.keys())
def test_what_language_models_have_is_taken(tokenizer_json: Callable[[], str]) -> None:
    text = tokenizer_json()
    ours = Tokenizer.from_json(text)
    sent = vocabulary(text, vocab_size=ours.vocab_size, eos_ids=[ours.vocab_size - 1])
    decoded = Vocabulary.decode(sent.encode(), "x")
    assert decoded == sent
    assert decoded.fingerprint == ours.fingerprint
    for sample in (*PROSE, *CODE):
        assert decoded.tokenizer.encode(sample) == ours.encode(sample)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5)
    | st.sampled_from(["ByteLevel", "Sequence", "Replace", "Split", "BPE", "Precompiled"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "normalizers", "pretokenizers", "pattern", "content", "String"]),
        inner, max_size=4,
    ),
)  # fmt: skip


@given(st.sampled_from([*PLAIN]), JSON)
def test_any_part_is_taken_or_refused(name: str, part: Any) -> None:
    text = json.dumps({**PLAIN, name: part})
    try:
        check_foreign(text)
    except ArtifactError:
        return
    try:
        decoded = Vocabulary.decode(vocabulary(text).encode(), "x")
    except ArtifactError:
        return
    assert isinstance(decoded.tokenizer.encode("a b"), list)
