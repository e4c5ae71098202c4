"""An answer's text where it ends: within a character, or at a stop string."""

from __future__ import annotations

import pytest

from pilotfish.device_runtime.answer import AnswerBuffer
from pilotfish.device_runtime.record import Round
from pilotfish.engines.chat_formats.outline import Outline
from pilotfish.engines.vocabulary import Vocabulary
from tests.support.plans import plan
from tests.support.vocabularies import byte_level

TEXT = "naïve 模型 👩‍👩‍👧 🇩🇪!"


def round_of(ids: list[int]) -> Round:
    return Round(protocol="stream", start=0, window=0, accepted=0, tokens=ids)


def vocabulary() -> Vocabulary:
    tokenizer = byte_level()
    return Vocabulary(
        model="",
        tokenizer_json=tokenizer._json,
        vocab_size=tokenizer.vocab_size,
        bos_id=None,
        eos_ids=[],
        chat_template=None,
    )


@pytest.mark.parametrize("stop", [[], ["never said"]])
def test_an_answer_that_is_cut_within_a_character_ends_before_it(stop: list[str]) -> None:
    target = vocabulary()
    ids = target.tokenizer.encode(TEXT)
    assert len(ids) > len(TEXT)  # some characters take several tokens
    for most in range(1, len(ids) + 1):
        wanted = plan(protocol="stream", max_tokens=most, stop=stop)
        answer = AnswerBuffer(target, Outline(content=None), wanted, ends=())
        pieces = [piece for token in ids for piece in answer.take(round_of([token]))]
        pieces += answer.end("length")
        text = answer.text
        assert text == "".join(piece.text for piece in pieces)
        assert TEXT.startswith(text)
        assert text == target.tokenizer.decode(ids[:most]).rstrip("\ufffd")
        assert answer.tokens == ids[:most]
        assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("stop", "text", "stop_string"),
    [
        (["x", "two"], "one ", "two"),
        (["three", "two"], "one ", "two"),
        (["two three", "two"], "one ", "two"),
        (["ne two t"], "o", "ne two t"),
        (["never said"], "one two three", None),
        ([], "one two three", None),
    ],
)
def test_an_answer_knows_the_stop_string_that_ended_it(
    stop: list[str], text: str, stop_string: str | None
) -> None:
    target = vocabulary()
    ids = target.tokenizer.encode("one two three")
    wanted = plan(protocol="stream", max_tokens=len(ids) + 1, stop=stop)
    for step in (1, 3, len(ids)):
        answer = AnswerBuffer(target, Outline(content=None), wanted, ends=())
        for at in range(0, len(ids), step):
            answer.take(round_of(ids[at : at + step]))
        answer.end("length")
        assert (answer.text, answer.stop_string) == (text, stop_string)
        assert answer.finish_reason == ("length" if stop_string is None else "stop")
