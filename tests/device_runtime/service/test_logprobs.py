"""Where the tokens of a text begin, by characters that several of them make, and by marks."""

from __future__ import annotations

import pytest

from pilotfish.device_runtime.service.openai_logprobs import (
    TextOffsets,
    chat_logprobs,
    text_logprobs,
)
from pilotfish.engines.tokenizer import Tokenizer
from tests.support.vocabularies import sentencepiece, smollm2

END = 2  # <|im_end|>, a control token


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", ["a fish 🐟 swims", "花が咲く", "", " led by a space"])
@pytest.mark.parametrize("tokenizer", [smollm2(), sentencepiece()], ids=["bytes", "sentencepiece"])
def test_offsets_are_places_in_the_text(tokenizer: Tokenizer, text: str, special: bool) -> None:
    mark = next(iter(tokenizer.special_tokens))
    ids = [mark, *tokenizer.encode(text), mark]
    whole = tokenizer.decode(ids, special=special)
    info = text_logprobs(ids, [], tokenizer, TextOffsets(tokenizer, 5, special=special))
    assert len(info["tokens"]) == len(info["text_offset"]) == len(ids)
    assert info["tokens"][0] == info["tokens"][-1] == tokenizer.piece(mark)
    places = [*(at - 5 for at in info["text_offset"]), len(whole)]
    assert places == sorted(places)
    # up to whole characters, the tokens before a place are the text before it
    for count, place in enumerate(places[:-1]):
        before = tokenizer.decode(ids[:count], special=special)
        assert whole.startswith(before.rstrip("\ufffd"))
        assert len(before.rstrip("\ufffd")) == place


def test_offsets_go_on_from_piece_to_piece() -> None:
    tokenizer = smollm2()
    ids = [*tokenizer.encode("a fish 🐟 swims"), END]
    whole = text_logprobs(ids, [], tokenizer, TextOffsets(tokenizer))["text_offset"]
    offsets = TextOffsets(tokenizer)
    parts = [text_logprobs([id], [], tokenizer, offsets)["text_offset"][0] for id in ids]
    assert parts == whole


def test_a_chat_tells_of_its_content_alone() -> None:
    ids = [*smollm2().encode("fish"), END]
    assert len(chat_logprobs(ids, [], smollm2())["content"]) == len(ids) - 1
