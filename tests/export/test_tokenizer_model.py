"""tokenizer.model alone: the ids are SentencePiece's own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.huggingface_tokenizer import DirectoryTokenizer
from pilotfish.export.tokenizers.gguf import GgufVocabulary
from pilotfish.export.tokenizers.sentencepiece import sentencepiece_tokenizer_json
from tests.support.examples import examples
from tests.support.sentencepieces import read_model, trained, write_model
from tests.support.tokenizer_strings import CJK, PROSE, make_strings
from tests.support.vocabularies import HERE

MODELS: dict[str, dict[str, Any]] = {
    "as Llama's": {"model_type": "bpe"},
    "as Gemma's": {
        "model_type": "bpe",
        "add_dummy_prefix": False,
        "user_defined_symbols": ("ab", "<0x", "\n\n"),
    },
    "without bytes": {"model_type": "bpe", "byte_fallback": False},
    "without extra spaces": {"model_type": "bpe", "remove_extra_whitespaces": True},
    "as Mistral's": {"model_type": "bpe", "user_defined_symbols": ("[DOC_1]", "[DOC_2]")},
    "unigram": {"model_type": "unigram"},
    "unigram without bytes": {"model_type": "unigram", "byte_fallback": False},
    "unigram with symbols": {
        "model_type": "unigram",
        "add_dummy_prefix": False,
        "user_defined_symbols": ("ab",),
    },
}
# Few characters, so that they meet in every order; some without a token, some that look like one.
HARD = st.text("aab  bx_🐟é\u0301①<0x0A>\n\t", max_size=16)


def theirs(options: dict[str, Any]) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=trained(**options))


@cache
def both(name: str) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    return read_model(trained(**MODELS[name])), theirs(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_sentencepieces(name: str) -> None:
    ours, processor = both(name)
    assert ours.vocab_size == processor.vocab_size()
    for text in make_strings():
        text = text.replace("▁", "_")  # that character is how SentencePiece writes a space
        assert ours.encode(text) == processor.encode(text), text
    assert ours.beginning == [processor.bos_id()]


@examples(400, deadline=None)
@given(st.one_of(HARD, st.text(max_size=30)), st.sampled_from([*MODELS]))
def test_ids_of_any_text_are_sentencepieces(text: str, name: str) -> None:
    text = text.encode("utf-8", "replace").decode().replace("▁", "_").replace("\0", "")
    ours, processor = both(name)
    assert ours.encode(text) == processor.encode(text)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_table_of_characters_is_applied(model_type: str) -> None:
    options = {"model_type": model_type, "normalization_rule_name": "nmt_nfkc"}
    ours, processor = read_model(trained(**options)), theirs(options)
    for text in (*PROSE, *CJK, "①Ａ ﬁ", "a\tb\u00a0c\u3000d"):
        assert ours.encode(text) == processor.encode(text), text
    assert ours.encode("①") == ours.encode("1")


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_text_survives(model_type: str) -> None:
    ours = read_model(trained(model_type))
    for text in make_strings():
        text = text.replace("▁", "_")
        assert ours.decode(ours.encode(text)) == text


def test_gguf_of_unigram_is_sentencepieces_too() -> None:
    options = {"model_type": "unigram", "byte_fallback": False}
    processor = theirs(options)
    ids = range(processor.vocab_size())
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [processor.id_to_piece(id) for id in ids],
        "tokenizer.ggml.scores": [processor.get_score(id) for id in ids],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (len(ids) - 3)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    ours = Tokenizer.from_json(GgufVocabulary(metadata, HERE).tokenizer_json)
    for text in make_strings():
        text = text.replace("▁", "_")
        assert ours.encode(text) == processor.encode(text), text
    assert ours.beginning == []
    for name in ("<unk>", "<s>", "</s>"):
        assert ours.encode(name) == processor.encode(name)


CONTROLS = {
    "1": {"content": "<s>", "special": True},
    "600": {"content": "<|im_start|>", "special": True, "rstrip": True},
    "601": {"content": "<think>", "special": False},
}


def settings(**more: Any) -> dict[str, Any]:
    return {"added_tokens_decoder": CONTROLS, "bos_token": {"content": "<s>"}, **more}


def test_added_tokens_have_the_ids_that_the_files_say() -> None:
    data = trained("bpe")
    stated = read_model(data, tokenizer_config=settings(add_bos_token=False))
    listed = read_model(
        data,
        added_tokens={"<|im_start|>": 600, "<think>": 601},
        special_tokens_map={"additional_special_tokens": ["<|im_start|>"], "pad_token": "<none>"},
    )
    assert (stated.beginning, listed.beginning) == ([], [1])
    for tokenizer in (stated, listed):
        assert tokenizer.vocab_size == 602
        assert tokenizer.encode("<|im_start|>a<think>", special=True)[0] == 600
        assert tokenizer.is_special(600)
        assert not tokenizer.is_special(601)
        assert 601 in tokenizer.encode("a<think>")
        assert 600 not in tokenizer.encode("<|im_start|>a")
    spaced, close = (f"<|im_start|>{space}a" for space in (" ", ""))
    assert stated.encode(spaced, special=True) == stated.encode(close, special=True)
    assert listed.encode(spaced, special=True) != listed.encode(close, special=True)


def test_a_space_is_put_before_each_part_or_once() -> None:
    data = trained("bpe")
    plain = read_model(data).encode("the")
    for reply in ({}, {"legacy": True}):
        tokenizer = read_model(data, tokenizer_config=reply)
        assert tokenizer.encode("</s>the", special=True) == [2, *plain]
    once = read_model(data, tokenizer_config={"legacy": False})
    _, *letters = once.encode("</s>the", special=True)
    assert "".join(map(once.piece, letters)) == "the"
    assert once.encode("the") == plain


def test_text_behind_a_symbol_goes_on() -> None:
    ours, processor = both("as Mistral's")
    for text in ("a[DOC_1]b", " a [DOC_1] b[DOC_2][DOC_1]", "the[DOC_2]  the"):
        assert ours.encode(text) == processor.encode(text)


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    data = trained("bpe")
    cases: list[tuple[bytes, dict[str, Any], str]] = [
        (trained("char"), {}, "neither BPE nor Unigram"),
        (trained("bpe", treat_whitespace_as_suffix=True), {}, "spaces after words"),
        (b"IQ== 0\nIg== 1\n", {}, "tiktoken's form"),
        (b"\xff\xff", {}, "not a SentencePiece model"),
        (b"", {}, "not a SentencePiece model"),
        (data, {"added_tokens": {"<x>": 700}}, "'<x>' would get the id 600, not 700"),
        (data, {"added_tokens": {"<s>": 600}}, "'<s>' would get the id 1, not 600"),
        (data, {"tokenizer_config": {"added_tokens_decoder": {"a": {}}}}, "tokens are damaged"),
        (data, {"tokenizer_config": {"added_tokens_decoder": []}}, "tokens are damaged"),
    ]
    for number, (content, files, named) in enumerate(cases):
        folder = write_model(tmp_path / str(number), content, **files)
        with pytest.raises(ExportError, match=named):
            sentencepiece_tokenizer_json(folder)


@pytest.mark.parametrize("size", [10, 100, 1000, 5000])
def test_half_a_file_is_refused(tmp_path: Path, size: int) -> None:
    write_model(tmp_path, trained("bpe")[:size])
    with pytest.raises(ExportError, match=r"tokenizer\.model"):
        sentencepiece_tokenizer_json(tmp_path)


def test_which_form_of_several_is_read(tmp_path: Path) -> None:
    write_model(tmp_path, trained("bpe"))
    tokenizer = DirectoryTokenizer(tmp_path)
    assert [file.name for file in tokenizer.files] == ["tokenizer.model"]
    (tmp_path / "tokenizer.json").write_text(tokenizer.text, "utf-8")
    assert [file.name for file in DirectoryTokenizer(tmp_path).files] == ["tokenizer.json"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExportError, match=r"neither a tokenizer\.json nor another form"):
        DirectoryTokenizer(tmp_path / "empty")
