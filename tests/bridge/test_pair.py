"""A prompt is made twice: for the target, and for the drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.base.errors import TokenOutOfRangeError, UnsupportedError
from pilotfish.bridge import Pair, Prompt
from pilotfish.engines.engine_errors import TemplateError
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.export.tokenizers.gguf import GgufVocabulary
from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.vocabularies import sentencepiece_metadata

OWN = [*"abdehlmorstwuy:", "Ġ", "Ċ", "he", "ll", "hell", "lo", "hello", "us", "er", "Ġw"]
THEIRS = [*"abcdehlmorstwuy:?", "Ġ", "el", "lo", "wo", "or", "Ġwo", "Ġwor", "us", "er", "user"]
END, THEIR_END = "<stop>", "<|end|>"
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
TEMPLATE = PLAIN + "{% if add_generation_prompt %}a{% endif %}"
WITHOUT_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}u{{ m.content }}" + END + "{% endfor %}b"
)
HELLO = [{"role": "user", "content": "hello world"}]
SYSTEM = [{"role": "system", "content": "be"}, *HELLO]


def vocabulary(
    tokens: list[str] = OWN, end: str = END, template: str | None = None, **changes: Any
) -> Vocabulary:
    size = len(tokens) + 1
    fields: dict[str, Any] = {
        "model": f"ends in {end}",
        "tokenizer_json": tiny_tokenizer(size, tokens, end),
        "vocab_size": size,
        "bos_id": None,
        "eos_ids": [size - 1],
        "chat_template": template,
    }
    return Vocabulary(**{**fields, **changes})


def pair_of(local: str | None = WITHOUT_SYSTEM, theirs: str | None = TEMPLATE) -> Pair:
    return Pair(vocabulary(template=local), vocabulary(THEIRS, THEIR_END, theirs))


def texts(pair: Pair, prompt: Prompt) -> tuple[str, str]:
    """What the target reads, and what the drafter does."""
    decoded = pair.target.tokenizer.decode(prompt.ids.tolist(), special=True)
    read = pair.drafter.tokenizer.decode(prompt.draft_ids.tolist(), special=True)
    return decoded, read


def test_each_end_reads_the_messages_in_its_own_template() -> None:
    pair = pair_of()
    prompt = pair.prompt(HELLO)
    assert texts(pair, prompt) == ("user:hello worlda", f"uhello world{END}b")
    assert prompt.ids.dtype == np.uint32
    target, drafter = pair.target.tokenizer, pair.drafter.tokenizer
    assert prompt.ids.tolist() == target.encode("user:hello worlda", special=True)
    assert prompt.draft_ids.tolist() == drafter.encode(f"uhello world{END}b", special=True)
    assert pair.drafter.eos_ids[0] in prompt.draft_ids  # a special token of the template is one
    assert len(prompt) == len(prompt.ids)
    assert prompt.vocabulary == pair.target.fingerprint


def test_a_text_is_one_user_message_or_taken_as_it_is() -> None:
    pair = pair_of()
    reply = pair.prompt("hello world")
    assert (reply.ids.tolist(), reply.draft_ids.tolist()) == (
        pair.prompt(HELLO).ids.tolist(),
        pair.prompt(HELLO).draft_ids.tolist(),
    )
    raw = pair.prompt("hello world", chat=False)
    assert texts(pair, raw) == ("hello world", "hello world")
    special = f"hello{THEIR_END}{END}"  # what a user types is text
    assert not {pair.target.eos_ids[0]} & {*pair.prompt(special, chat=False).ids.tolist()}
    assert not {pair.drafter.eos_ids[0]} & {*pair.prompt(special, chat=False).draft_ids.tolist()}


@pytest.mark.parametrize("local", [None, TEMPLATE, WITHOUT_SYSTEM, "{{ broken"])
def test_a_target_without_a_template_takes_texts_only(local: str | None) -> None:
    pair = pair_of(local, None)
    assert texts(pair, pair.prompt("hello world")) == ("hello world", "hello world")
    with pytest.raises(UnsupportedError, match=r"ends in .* has no chat template"):
        pair.prompt(HELLO)


@pytest.mark.parametrize("local", [None, "{{ broken", "{{ raise_exception('never') }}"])
def test_a_drafter_without_a_template_of_use_reads_the_targets_text(local: str | None) -> None:
    pair = pair_of(local)
    assert texts(pair, pair.prompt(HELLO)) == ("user:hello worlda",) * 2


def test_a_template_that_refuses_these_messages_is_no_template_for_them() -> None:
    pair = pair_of()
    assert texts(pair, pair.prompt(SYSTEM)) == ("system:beuser:hello worlda",) * 2
    with pytest.raises(TemplateError, match="no system"):
        pair_of(TEMPLATE, WITHOUT_SYSTEM).prompt(SYSTEM)


def test_special_tokens_of_the_targets_text_are_the_drafters() -> None:
    """The end of a turn is another token in either, and yet the same."""
    pair = pair_of(None, TEMPLATE.replace("{% endfor %}", THEIR_END + "{% endfor %}"))
    prompt = pair.prompt(HELLO)
    assert texts(pair, prompt) == (f"user:hello world{THEIR_END}a", f"user:hello world{END}a")
    assert prompt.draft_ids.tolist().count(pair.drafter.eos_ids[0]) == 1


def test_token_ids_are_the_targets() -> None:
    pair = pair_of()
    ids = pair.target.tokenizer.encode("hello world?")
    wanted_value: Any
    for wanted_value in (ids, tuple(ids), np.array(ids), np.array(ids, dtype=np.uint32)):
        prompt = pair.prompt(wanted_value)
        assert prompt.ids.tolist() == ids
        assert texts(pair, prompt) == ("hello world?", "hello world")  # it has no "?"
        assert not prompt.can_reencode
    wanted = pair.drafter.tokenizer.encode("hello world")
    assert prompt.draft_ids.tolist() == wanted  # in its own tokens, not token by token


@pytest.mark.parametrize("wrong", [[-1], [len(THEIRS) + 1], [2**40], [0, 1.5], ["a"], [[1]]])
@pytest.mark.parametrize("as_array", [False, True])
def test_ids_that_the_target_does_not_have(wrong: list[Any], as_array: bool) -> None:
    wanted: Any = np.array(wrong) if as_array else wrong
    for pair in (pair_of(), Pair(vocabulary(THEIRS), vocabulary(THEIRS, template=TEMPLATE))):
        with pytest.raises(TokenOutOfRangeError, match="not a token id"):
            pair.prompt(wanted)
    assert len(pair.prompt([0, len(THEIRS)])) == 2


def test_nothing_at_all() -> None:
    pair = pair_of()
    wanted: Any
    for wanted in ([], np.array([], dtype=np.uint32)):
        prompt = pair.prompt(wanted)
        assert len(prompt) == 0
        assert not prompt.can_reencode
    assert len(pair.prompt("", chat=False)) == 0
    assert pair.prompt("", chat=False).can_reencode
    assert texts(pair, pair.prompt("")) == ("user:a", f"u{END}b")


def test_a_drafter_that_knows_nothing_of_the_prompt_has_something_to_go_on_from() -> None:
    pair = pair_of()
    for wanted in ("???", [THEIRS.index("?")]):
        prompt = pair.prompt(wanted, chat=False)
        assert len(prompt.ids)
        assert prompt.draft_ids.tolist() == pair.drafter.eos_ids
    begins = Pair(vocabulary(bos_id=3), vocabulary(THEIRS, THEIR_END))
    assert begins.prompt("???", chat=False).draft_ids.tolist() == [3]
    bare = Pair(vocabulary(eos_ids=[]), vocabulary(THEIRS, THEIR_END))
    assert bare.prompt("???", chat=False).draft_ids.tolist() == [0]


def test_words_can_be_said_in_another_vocabulary_and_ids_cannot() -> None:
    pair = pair_of()
    for wanted, in_words in (("hello", True), (HELLO, True), ([1, 2], False), ("", True)):
        prompt = pair.prompt(wanted, chat=wanted != "")
        assert prompt.can_reencode == in_words
        assert prompt.source is wanted
        assert prompt.chat == (wanted != "")


@pytest.mark.parametrize("chat", [False, True])
def test_of_one_vocabulary_both_read_the_same(chat: bool) -> None:
    target = vocabulary(THEIRS, template=TEMPLATE)
    pair = Pair(vocabulary(THEIRS, template=WITHOUT_SYSTEM), target)
    assert pair.trivial
    for wanted in (HELLO, SYSTEM, "hello", [1, 2]):
        prompt = pair.prompt(wanted, chat=chat)
        assert prompt.draft_ids.tolist() == prompt.ids.tolist()


# SentencePiece


@pytest.fixture(scope="module")
def sentencepiece() -> Vocabulary:
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_bos_token": True}
    text = GgufVocabulary(metadata, Path("vocabulary.gguf")).tokenizer_json
    size = len(sentencepiece_metadata()["tokenizer.ggml.tokens"])
    return vocabulary(tokenizer_json=text, vocab_size=size, bos_id=1, eos_ids=[2])


def test_a_beginning_stands_once_before_what_a_drafter_reads(sentencepiece: Vocabulary) -> None:
    tokenizer = sentencepiece.tokenizer
    assert tokenizer.beginning == [1]
    pair = Pair(sentencepiece, vocabulary(THEIRS, THEIR_END, TEMPLATE))
    raw = pair.prompt("hello world", chat=False)
    assert raw.draft_ids.tolist() == [1, *tokenizer.encode("hello world")]
    assert raw.ids.tolist() == pair.target.tokenizer.encode("hello world")
    ids = pair.prompt(raw.ids.tolist())
    assert ids.draft_ids.tolist() == [1, *tokenizer.encode_rest("hello world").ids]
    assert pair.prompt([], chat=False).draft_ids.tolist() == [1]
    fallen_back = pair.prompt(HELLO)
    assert fallen_back.draft_ids.tolist() == [1, *tokenizer.encode_rest("user:hello worlda").ids]


def test_a_template_writes_its_beginning_itself(sentencepiece: Vocabulary) -> None:
    template = "{{ bos_token }}" + TEMPLATE
    fields = {name: getattr(sentencepiece, name) for name in sentencepiece.__struct_fields__}
    drafter = Vocabulary(**{**fields, "chat_template": template})
    pair = Pair(drafter, vocabulary(THEIRS, THEIR_END, TEMPLATE))
    values = pair.prompt(HELLO).draft_ids.tolist()
    assert values[0] == 1
    assert values.count(1) == 1


def test_a_target_of_sentencepiece_begins_as_it_wants(sentencepiece: Vocabulary) -> None:
    pair = Pair(vocabulary(), sentencepiece)
    raw = pair.prompt("hello world", chat=False)
    assert raw.ids.tolist() == [1, *sentencepiece.tokenizer.encode("hello world")]
    assert raw.draft_ids.tolist() == pair.drafter.tokenizer.encode("hello world")
    nothing = pair.prompt("", chat=False)
    assert nothing.ids.tolist() == [1]
    assert nothing.draft_ids.tolist() == pair.drafter.eos_ids
