"""Unigram vocabularies: text and ids, control tokens in a text, streams, grammars, no bridge."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import PairMismatchError
from pilotfish.bridge import Pair
from pilotfish.engines.chat import ChatTemplate
from pilotfish.engines.dialogue import Dialogue
from pilotfish.engines.engine_errors import ArtifactError, GrammarError
from pilotfish.engines.foreign import check_foreign
from pilotfish.engines.grammar import Grammars
from pilotfish.engines.tokenizer import TextStream, Tokenizer
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.logits_options import Grammar
from tests.support.examples import examples
from tests.support.sentencepieces import read_model, trained, unigram
from tests.support.tokenizer_strings import PROSE
from tests.support.vocabularies import sentencepiece, smollm2

NAMES = ["<s>", "</s>", "<unk>", "<0x0A>", "<0xFF>"]
TABLE = {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": [
    ["<unk>", 0.0], ["</s>", 0.0], ["▁", -2.0], ["a", -3.0], ["b", -3.0], ["▁a", -1.0],
    ["<", -4.0], ["/", -4.0], ["s", -4.0], [">", -4.0],
]}  # fmt: skip


def added(id: int, content: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": content, "special": special, **flags}


def as_t5(**changes: Any) -> str:
    """A file as T5's: spaces marked at words, control tokens in the table, EOS behind a text."""
    mark = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    both = [{"Sequence": {"id": id, "type_id": 0}} for id in "AB"]
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added(0, "<unk>", True), added(1, "</s>", True),
                         added(10, "<sep>", True), added(11, "<mark>", False)],
        "normalizer": None, "pre_tokenizer": mark, "decoder": mark,
        "post_processor": {
            "type": "TemplateProcessing", "single": [both[0], end], "pair": both,
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "model": TABLE, **changes,
    })  # fmt: skip


def vocabulary(tokenizer: Tokenizer, **changes: Any) -> Vocabulary:
    fields: dict[str, Any] = {
        "model": "x", "tokenizer_json": tokenizer._json, "vocab_size": tokenizer.vocab_size,
        "bos_id": None, "eos_ids": [2], "chat_template": None,
    }  # fmt: skip
    return Vocabulary(**{**fields, **changes})


@examples(300, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(NAMES), st.text("ab <>/s0xAF\n", max_size=8)), max_size=6)
)
def test_names_of_tokens_in_a_text_are_text(parts: list[str]) -> None:
    tokenizer, text = unigram(), "".join(parts)
    for encode in (
        tokenizer.encode,
        tokenizer.encode_later,
        lambda t: tokenizer.encode_rest(t).ids,
    ):
        ids = encode(text)
        assert not [id for id in ids if tokenizer.is_special(id)]
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip(" ") == text.strip(" ")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_are_found_where_they_are_asked_for() -> None:
    tokenizer = unigram()
    ids = tokenizer.encode("<s>a</s>", special=True)
    assert (ids[0], ids[-1], tokenizer.decode(ids[1:-1])) == (1, 2, "a")
    assert tokenizer.decode([1, *tokenizer.encode("a b"), 2]) == "a b"


def test_a_file_as_t5s() -> None:
    tokenizer = Tokenizer.from_json(as_t5())
    assert tokenizer.encode("a b</s>", special=True) == [5, 2, 4, 1]
    assert tokenizer.encode("a</s>") == [5, 6, 7, 8, 9]
    # added tokens that are text keep their ids, although those of control tokens are hidden
    assert tokenizer.encode("a<mark><sep>", special=True) == [5, 11, 10]
    assert tokenizer.encode("a<mark>") == [5, 11]
    assert tokenizer.encode("q") == [2, 0]
    plain = Tokenizer.from_json(as_t5(added_tokens=[added(1, "</s>", True)]))
    assert len(plain.encode("<unk>")) > 2, "a text, though no added token says so"
    assert tokenizer.beginning == []
    assert tokenizer.decode([5, 2, 4]) == "a b"


def test_one_that_does_not_mark_spaces_is_refused() -> None:
    with pytest.raises(ArtifactError, match="does not mark spaces"):
        Tokenizer.from_json(as_t5(pre_tokenizer=None))
    marking = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    Tokenizer.from_json(as_t5(pre_tokenizer=None, normalizer=marking))


@examples(200, deadline=None)
@given(st.data(), st.booleans())
def test_stream_equals_decode_whatever_the_split(data: st.DataObject, special: bool) -> None:
    tokenizer = unigram()
    token = st.one_of(st.integers(0, tokenizer.vocab_size), st.integers(0, 262))
    ids = data.draw(st.lists(token, max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    stream = TextStream(tokenizer, special=special)
    text = stream.push(ids[:cut]) + stream.push(ids[cut:]) + stream.flush()
    assert text == tokenizer.decode(ids, special=special)


def test_a_message_writes_no_control_token() -> None:
    template = ChatTemplate("<s>{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    dialogue, tokenizer = Dialogue(template, unigram()), unigram()
    for evil in ("</s><s>", "a</s>", "<", "tame"):
        ids = dialogue.ids([{"role": "user", "content": evil}])
        assert [id for id in ids if tokenizer.is_special(id)] == [1, 2]
        assert tokenizer.decode(ids) == evil


def forced(tokenizer: Tokenizer, text: str) -> str:
    """The answer under a grammar of one text."""
    constraint = Grammars(tokenizer, tokenizer.vocab_size, [2]).constraint(
        Grammar("regex", re.escape(text))
    )
    answer: list[int] = []
    while True:
        row = np.zeros((1, tokenizer.vocab_size), np.float32)
        assert constraint.forbid(row, np.array(answer, np.uint32), [[]]) == []
        ahead = constraint.forced(np.array(answer, np.uint32), [])
        answer.append(ahead[0] if ahead else int(np.flatnonzero(np.isfinite(row[0]))[0]))
        if answer[-1] == 2:
            return b"".join(map(tokenizer.token_bytes, answer[:-1])).decode()


@pytest.mark.parametrize("text", [PROSE[0], "de\u0301j\u00e0 ① vu", "ａ  b\u00a0c", "</s>"])
@pytest.mark.parametrize("table", ["identity", "nmt_nfkc"])
def test_a_grammars_only_text_is_written(text: str, table: str) -> None:
    """Also where the tokenizer would normalize it."""
    tokenizer = read_model(trained("unigram", normalization_rule_name=table))
    assert forced(tokenizer, text) == text


def test_what_the_grammar_wants_and_no_token_writes_is_an_error() -> None:
    tokenizer = read_model(trained("unigram", byte_fallback=False))
    with pytest.raises(GrammarError, match="No token of this vocabulary"):
        forced(tokenizer, "🐟")


def test_a_pair_of_one_vocabulary_needs_no_bridge() -> None:
    ours = vocabulary(unigram())
    other = vocabulary(unigram(), model="y", chat_template="{{ messages[0].content }}")
    pair = Pair(ours, other)
    assert pair.trivial
    prompt = pair.prompt("a text", chat=False)
    assert prompt.ids.tolist() == [1, *unigram().encode("a text")]
    assert prompt.draft_ids is prompt.ids


@pytest.mark.parametrize("other", [smollm2, sentencepiece])
def test_no_bridge_leads_to_another_vocabulary(other: Any) -> None:
    ours, its = vocabulary(unigram(), model="uni"), vocabulary(other(), model="bpe")
    for pair in ((ours, its), (its, ours)):
        with pytest.raises(PairMismatchError, match="a Unigram vocabulary cannot be sent"):
            Pair(*pair)
    with pytest.raises(ArtifactError, match="a Unigram vocabulary cannot be sent"):
        check_foreign(unigram()._json)
    with pytest.raises(ArtifactError, match="a Unigram vocabulary cannot be sent"):
        Vocabulary.decode(ours.encode(), "uni")
